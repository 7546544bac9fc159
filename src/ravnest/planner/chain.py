"""Describes a program in numbers: seconds and bytes of its ops, and the cut points between stages.

A stage is a range of ops. A planner compares many ranges, so each quantity of a range is quick to compute: sums by
prefix sums, maxima by a table of powers of two, and bytes of storages that several ops share by

    bytes(i, k) = sum over blocks in [i, k) of the bytes they touch - bytes counted more than once

where a storage touched by blocks b1 < b2 < ... is counted once too often for each neighbouring pair inside [i, k).
A block is the ops between two neighbouring cut points.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from operator import add
from typing import NamedTuple

from ravnest.core.config import config, require
from ravnest.planner.memory import StageShare

__all__ = ["Chain", "CutPoints", "Storage"]

_INDEX_WEIGHT = 0.01  # of an op's index, next to its fraction of time, weights and activations


class Storage(NamedTuple):
    """Memory, and the ops that use it."""

    num_bytes: int
    ops: tuple[int, ...]


@config
class Chain:
    """Seconds of each op, `cuts` at which the program may be cut, and bytes over the cut before each op (and the end).

    Seconds are those of a node of speed 1; all numbers are for one microbatch. `weights` are trained and belong to the
    stage of their first op; `fixed` are buffers and frozen weights; `saved` is kept from forward to backward;
    `work_bytes` is the temporary memory of each op.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    cuts: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    weights: tuple[Storage, ...] = ()
    fixed: tuple[Storage, ...] = ()
    saved: tuple[Storage, ...] = ()
    work_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num = self.num_ops
        require(num >= 1, "forward_s must have at least one op")
        require(len(self.backward_s) == num, f"{num} ops need {num} backward_s, got {len(self.backward_s)}")
        require(all(0 <= s < inf for s in (*self.forward_s, *self.backward_s)), "seconds must be finite and >= 0")
        for name in ("forward_bytes", "backward_bytes"):
            sizes = getattr(self, name)
            require(
                len(sizes) == num + 1, f"{name} must have {num + 1} entries, one per op and the end, got {len(sizes)}"
            )
            require(min(sizes) >= 0, f"{name} must be >= 0, got {min(sizes)}")
        require(len(self.work_bytes) in (0, num), f"{num} ops need {num} work_bytes, got {len(self.work_bytes)}")
        require(all(a < b for a, b in pairwise((0, *self.cuts, num))), f"cuts must be ascending from 1 to {num - 1}")
        for storage in (*self.weights, *self.fixed, *self.saved):
            require(
                storage.num_bytes >= 0 and all(0 <= i < num for i in storage.ops),
                f"{storage} is outside of the {num} ops",
            )

    @property
    def num_ops(self) -> int:
        return len(self.forward_s)

    def sharing_weights(self) -> Chain:
        """The chain with only those cuts that leave weights on both sides.

        Otherwise one stage could hold the whole model while another only computes the loss. Frozen weights count, small
        constants do not: those smaller than the mean of the trained weights.
        """
        if not self.weights:
            return self
        least_bytes = max(1, sum(weight.num_bytes for weight in self.weights) / len(self.weights))
        frozen = [storage for storage in self.fixed if storage.num_bytes >= least_bytes]
        owned = sorted(min(storage.ops) for storage in (*self.weights, *frozen) if storage.ops and storage.num_bytes)
        if not owned:
            return self
        return replace(self, cuts=tuple(cut for cut in self.cuts if owned[0] < cut <= owned[-1]))

    def cut_points(self, limit: int) -> CutPoints:
        """At most `limit` cuts to choose from: of neighbours with little between them, the cheapest.

        The distance of two cuts is measured in fractions of the time, the weights and the activations. The cut points
        of a smaller limit are among those of a larger one.
        """
        require(limit >= 1, f"limit must be >= 1, got {limit}")
        span, kept = 1 / self.num_ops / 1024, self.cuts
        while len(kept) > limit:
            kept = self._thinned(kept, span)
            span *= 1.25
        if len(kept) not in self._known:
            self._known[len(kept)] = CutPoints(self, kept)
        return self._known[len(kept)]

    @cached_property
    def _known(self) -> dict[int, CutPoints]:
        return {}

    def _thinned(self, cuts: Sequence[int], span: float) -> tuple[int, ...]:
        kept: list[int] = []
        group_start = -inf
        for cut in cuts:
            if self._position[cut] - group_start > span:
                group_start = self._position[cut]
                kept.append(cut)
            elif self.cut_bytes(cut) < self.cut_bytes(kept[-1]):
                kept[-1] = cut
        return tuple(kept)

    def cut_bytes(self, cut: int) -> int:
        return self.forward_bytes[cut] + self.backward_bytes[cut]

    @cached_property
    def _position(self) -> list[float]:
        """Where each op starts in the chain, in fractions of the whole."""
        weights, saved = [0.0] * self.num_ops, [0.0] * self.num_ops
        for target, storages in ((weights, (*self.weights, *self.fixed)), (saved, self.saved)):
            for storage in storages:
                if storage.ops:
                    target[min(storage.ops)] += storage.num_bytes
        seconds = list(map(add, self.forward_s, self.backward_s))
        position = [_INDEX_WEIGHT * i / self.num_ops for i in range(self.num_ops + 1)]
        for amounts in (seconds, weights, saved):
            whole = sum(amounts) or 1.0
            position = [p + done / whole for p, done in zip(position, accumulate(amounts, initial=0.0), strict=True)]
        return position


class CutPoints:
    """A chain with the boundaries that stages may have: 0, some of its cuts, and its end.

    Ranges are given by indices of boundaries, `0 <= i < k <= end`.
    """

    def __init__(self, chain: Chain, cuts: Sequence[int]) -> None:
        self.chain = chain
        self.bounds = (0, *cuts, chain.num_ops)
        self.end = len(self.bounds) - 1
        self._forward_s = self._prefix(chain.forward_s)
        self._backward_s = self._prefix(chain.backward_s)
        self._owned = self._prefix(_by_first_op(chain))
        self._held = _RangeBytes(chain.weights, self.bounds)
        self._fixed = _RangeBytes(chain.fixed, self.bounds)
        self._saved = _RangeBytes(chain.saved, self.bounds)
        self._work = _RangeMax([max(chain.work_bytes[a:b], default=0) for a, b in pairwise(self.bounds)])

    def upto_s(self, *, recompute: bool) -> list[float]:
        """Seconds of all ops before each boundary; recomputation does every forward twice."""
        times = 2 if recompute else 1
        return [times * f + b for f, b in zip(self._forward_s, self._backward_s, strict=True)]

    def share(self, i: int, k: int) -> StageShare:
        """The bytes of a stage from boundary i to boundary k."""
        chain, start, stop = self.chain, self.bounds[i], self.bounds[k]
        owned = int(self._owned[k] - self._owned[i])
        return StageShare(
            parameter_bytes=owned,
            borrowed_bytes=self._held(i, k) - owned,
            fixed_bytes=self._fixed(i, k),
            saved_bytes=self._saved(i, k),
            work_bytes=self._work(i, k),
            input_bytes=chain.forward_bytes[start],
            link_bytes=chain.cut_bytes(start) + chain.cut_bytes(stop),
        )

    def _prefix(self, amounts: Sequence[float]) -> list[float]:
        upto = list(accumulate(amounts, initial=0))
        return [upto[b] for b in self.bounds]


def _by_first_op(chain: Chain) -> list[int]:
    amounts = [0] * chain.num_ops
    for storage in chain.weights:
        if storage.ops:
            amounts[min(storage.ops)] += storage.num_bytes
    return amounts


class _RangeBytes:
    """Bytes of the storages that any block of a range touches."""

    def __init__(self, storages: Iterable[Storage], bounds: Sequence[int]) -> None:
        num_blocks = len(bounds) - 1
        touched = [0] * num_blocks
        again: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # block -> (next block, bytes)
        for storage in storages:
            blocks = sorted({bisect_right(bounds, op) - 1 for op in storage.ops})
            for block in blocks:
                touched[block] += storage.num_bytes
            for block, following in pairwise(blocks):
                again[block].append((following, storage.num_bytes))
        self._upto = list(accumulate(touched, initial=0))
        row = [0] * (num_blocks + 1)
        self._again = [row] * (num_blocks + 1)  # [i][k]: bytes counted again in [i, k); equal rows are one list
        for i in reversed(range(num_blocks)):
            if i in again:
                steps = [0] * (num_blocks + 1)
                for following, size in again[i]:
                    steps[following + 1] += size
                row = list(map(add, row, accumulate(steps)))
            self._again[i] = row

    def __call__(self, i: int, k: int) -> int:
        return self._upto[k] - self._upto[i] - self._again[i][k]


class _RangeMax:
    """The maximum of a range: two overlapping powers of two cover it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._levels = [list(sizes)]
        width = 1
        while 2 * width <= len(sizes):
            last = self._levels[-1]
            self._levels.append([max(last[i], last[i + width]) for i in range(len(last) - width)])
            width *= 2

    def __call__(self, i: int, k: int) -> int:
        level = (k - i).bit_length() - 1
        row = self._levels[level]
        return max(row[i], row[k - (1 << level)])
