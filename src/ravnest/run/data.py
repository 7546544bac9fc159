"""Batches of the user, and the queue between the thread that iterates them and the loop that leases them to clusters.

An iterable starts over when it ends; an iterator ends the run. A batch is kept from when it is produced until it is
settled, because a cluster may lose it. The producer is at most `lead` batches ahead of the leases, which bounds the
memory.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from itertools import chain
from typing import Any

from torch import Tensor

from ravnest.coordinator.requester import Microbatch
from ravnest.graph import Program
from ravnest.graph.prediction import PromptEncoder
from ravnest.pipeline.tensor_codec import TensorCodec, as_bytes

__all__ = ["BatchQueue", "Batches", "limited"]


class Batches:
    """The user's data. `first` is for tracing, and also the first batch of `next`; `epochs` counts finished passes."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self.epochs = 0
        self._iterator: Iterator[Any] = iter(data)
        try:
            self.first = next(self._iterator)
        except StopIteration:
            raise ValueError("the data are empty: there is no batch to train on") from None
        self._iterator = chain([self.first], self._iterator)

    def next(self) -> Any | None:
        """Return the next batch, or None at the end."""
        for batch in self._iterator:
            return batch
        self._iterator = iter(self._data)
        self.epochs += 1
        return next(self._iterator, None)

    def skip(self, count: int) -> None:
        """Skip batches that were used before: by the data's own `skip(n)`, which returns the rest, else one by one.

        For data with a length, `n` is within an epoch.
        """
        own = getattr(self._data, "skip", None)
        if callable(own):
            length = len(self._data) if isinstance(self._data, Sized) else 0
            self.epochs, left = divmod(count, length) if length else (0, count)
            self._iterator = iter(own(left))
            return
        for passed in range(count):
            if self.next() is None:
                raise ValueError(f"the data ended after {passed} batches, but the run has already used {count}")


class _Epochs(Batches):
    """Batches that end after a number of epochs."""

    def __init__(self, batches: Batches, epochs: int) -> None:
        self._inner, self._max_epochs = batches, epochs
        self.first = batches.first

    def next(self) -> Any | None:
        batch = self._inner.next()
        return None if self._inner.epochs >= self._max_epochs else batch

    def skip(self, count: int) -> None:
        self._inner.skip(count)


def limited(batches: Batches, epochs: int | None) -> Batches:
    """Return the batches of the first `epochs` epochs; None: all."""
    return batches if epochs is None else _Epochs(batches, epochs)


def split_microbatches(leaves: Sequence[Tensor], batched: Sequence[bool], count: int) -> list[list[Tensor]]:
    """Split a batch into at most `count` microbatches of about equal size; unbatched tensors go with each."""
    if not any(batched):  # a batch that cannot be split
        return [list(leaves)]
    size = next(len(t) for t, is_batched in zip(leaves, batched, strict=True) if is_batched)
    number = min(size, count)
    if number == 0:
        raise ValueError("a batch must have at least one sample, got 0")
    parts = [t.tensor_split(number) if b else [t] * number for t, b in zip(leaves, batched, strict=True)]
    return [list(part) for part in zip(*parts, strict=True)]


class BatchQueue:
    """A bounded queue: one thread offers batches, another takes them.

    `batch_size` is that of the first batch, `max_batch` that of its microbatches, both in samples.
    """

    def __init__(self, program: Program, *, batch_size: int, max_batch: int, lead: int = 4) -> None:
        self.max_batch, self.lead, self._batch_size = max_batch, lead, batch_size
        self._program = program
        self._codec = TensorCodec(program.inputs, "none", max_batch=max_batch)
        self._batched = [bool(v.shape) and isinstance(v.shape[0], tuple) for v in program.inputs]
        self._lock = threading.Lock()
        self._kept: dict[int, list[Tensor]] = {}
        self._produced = self._taken = 0
        self._closed = False
        self._settled: frozenset[int] = frozenset()

    def resume(self, first: int, next_new: int, unsettled: Collection[int]) -> None:
        """Start with batch `first`; of the batches before `next_new`, only the unsettled ones are kept."""
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
        """Add a batch; raises `ValueError` if it does not match the first one."""
        leaves = self._program.feed(batch)
        samples = self._samples(leaves)
        if samples == 0:
            raise ValueError("a batch must have at least one sample, got 0")
        if samples > self._batch_size:
            raise ValueError(
                f"a batch has {samples} samples, the first had {self._batch_size}: "
                "no batch may be larger than the first"
            )
        with self._lock:
            if self._produced not in self._settled:
                self._kept[self._produced] = leaves
            self._produced += 1

    def close(self) -> None:
        """Make no further batch available: only batches that were leased before can be taken."""
        with self._lock:
            self._closed = True

    def available(self) -> int:
        with self._lock:
            return self._taken if self._closed else self._produced

    def take(self, batch: int, count: int) -> list[Microbatch]:
        """Return a batch as exactly `count` microbatches; missing ones repeat the last, with share 0."""
        with self._lock:
            leaves = self._kept[batch]
            self._taken = max(self._taken, batch + 1)
        parts = split_microbatches(leaves, self._batched, count)
        sizes = [self._samples(part) for part in parts]
        missing = count - len(parts)
        shares = [size / sum(sizes) for size in sizes] + [0.0] * missing
        return [
            self._microbatch(part, share) for part, share in zip([*parts, *[parts[-1]] * missing], shares, strict=True)
        ]

    def held_out(self, batches: Sequence[Any]) -> list[Microbatch]:
        """Return held-out batches as microbatches of the size that workers expect."""
        microbatches: list[Microbatch] = []
        for batch in batches:
            leaves = self._program.feed(batch)
            parts = split_microbatches(leaves, self._batched, -(-self._samples(leaves) // self.max_batch))
            microbatches += [self._microbatch(part, 0.0) for part in parts]
        return microbatches

    def prompt(self, tokens: Sequence[int]) -> tuple[Microbatch, int]:
        """Return a prompt as a microbatch of one sample, and the position of its last token; raises `ValueError`."""
        leaves, position = PromptEncoder(self._program)(tokens)
        return self._microbatch(leaves, 0.0), position

    def settled(self, batch: int) -> None:
        with self._lock:
            self._kept.pop(batch, None)

    def _samples(self, leaves: Sequence[Tensor]) -> int:
        return next((len(t) for t, b in zip(leaves, self._batched, strict=True) if b), self._batch_size)

    def _microbatch(self, part: Sequence[Tensor], share: float) -> Microbatch:
        return Microbatch(self._samples(part), share, [as_bytes(t) for t in self._codec.pack(part)])
