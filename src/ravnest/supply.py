"""Batches between the thread that iterates the user's data and the loop that lends them to clusters.

A batch is kept from when it is produced until it is settled, because a cluster may lose it. The producer is at most
`lead` batches ahead of what is lent, so that memory stays bounded however fast the data are.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from .coordinator.requester import Piece
from .data import pieces
from .graph import Program
from .runtime.freight import Freight, as_bytes

__all__ = ["Supply"]


class Supply:
    """One thread offers, another takes. `batch_size` is of the first batch, `max_batch` of its microbatches."""

    def __init__(self, program: Program, *, batch_size: int, max_batch: int, lead: int = 4) -> None:
        self.max_batch, self.lead, self._most = max_batch, lead, batch_size
        self._program = program
        self._freight = Freight(program.inputs, "none", max_batch=max_batch)
        self._batched = [bool(v.shape) and isinstance(v.shape[0], tuple) for v in program.inputs]
        self._lock = threading.Lock()
        self._kept: dict[int, list[Tensor]] = {}
        self._produced = self._taken = 0
        self._closed = False
        self._settled: frozenset[int] = frozenset()

    def go_on(self, first: int, next_new: int, unsettled: Collection[int]) -> None:
        """Begin with batch `first`; of those before `next_new` only the unsettled are still needed."""
        with self._lock:
            self._produced, self._taken = first, next_new
            self._settled = frozenset(range(first, next_new)) - set(unsettled)

    @property
    def produced(self) -> int:
        with self._lock:
            return self._produced

    @property
    def has_room(self) -> bool:
        with self._lock:
            return self._produced - self._taken < self.lead

    def offer(self, batch: Any) -> None:
        """Add a batch; a `ValueError` says what is wrong with it."""
        leaves = self._program.feed(batch)
        samples = self._samples(leaves)
        if samples == 0:
            raise ValueError("a batch has no samples")
        if samples > self._most:
            raise ValueError(
                f"a batch has {samples} samples, the first had {self._most}: no batch may be larger than the first"
            )
        with self._lock:
            if self._produced not in self._settled:
                self._kept[self._produced] = leaves
            self._produced += 1

    def close(self) -> None:
        """Nothing more is lent that was not lent before."""
        with self._lock:
            self._closed = True

    def available(self) -> int:
        with self._lock:
            return self._taken if self._closed else self._produced

    def take(self, batch: int, count: int) -> list[Piece]:
        """A batch in exactly `count` microbatches. One with fewer samples is filled up with its last, at no weight."""
        with self._lock:
            leaves = self._kept[batch]
            self._taken = max(self._taken, batch + 1)
        parts = pieces(leaves, self._batched, count)
        sizes = [self._samples(part) for part in parts]
        missing = count - len(parts)
        shares = [size / sum(sizes) for size in sizes] + [0.0] * missing
        return [self._piece(part, share) for part, share in zip([*parts, *[parts[-1]] * missing], shares, strict=True)]

    def held_out(self, batches: Sequence[Any]) -> list[Piece]:
        """Held-out batches in microbatches of the size that workers expect."""
        found: list[Piece] = []
        for batch in batches:
            leaves = self._program.feed(batch)
            parts = pieces(leaves, self._batched, -(-self._samples(leaves) // self.max_batch))
            found += [self._piece(part, 0.0) for part in parts]
        return found

    def settled(self, batch: int) -> None:
        with self._lock:
            self._kept.pop(batch, None)

    def _samples(self, leaves: Sequence[Tensor]) -> int:
        return len(next(t for t, is_batched in zip(leaves, self._batched, strict=True) if is_batched))

    def _piece(self, part: Sequence[Tensor], share: float) -> Piece:
        return Piece(self._samples(part), share, [as_bytes(t) for t in self._freight.pack(part)])
