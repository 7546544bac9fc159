"""What the root of a cluster is sent next: a state machine without clock or I/O.

A lease is a batch, a batch is a window of `accumulate` microbatches. At most `ahead` microbatches are on their way: as
many as the root holds in flight, two for the line, and as many as are done while a message goes there and back. A
batch is settled when the root has acknowledged the last of its microbatches, which it does in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from ..core.errors import FrameError
from ..core.messages import Evaluate, Forward
from .requester import Piece

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Feeder", "Sending"]

_LINE = 2  # microbatches on the line to the root, so that it never waits for the next
_MOST_AHEAD = 256


@dataclass(frozen=True)
class Sending:
    """A message for the root, and the bytes behind it."""

    header: Forward | Evaluate
    buffers: Sequence[ReadableBuffer]


class Feeder:
    """Of one cluster: tell it what there is to send and what came back; ask it what to send."""

    def __init__(
        self, *, accumulate: int, depth: int, samples_per_s: float = 0.0, round_trip_s: float = 0.0, begin: int = 0
    ) -> None:
        self.accumulate, self.depth = accumulate, depth
        self.ahead = depth + _LINE
        self.windows = self._begin = begin
        self.fed = self.acknowledged = begin * accumulate
        self._per_s, self._round_trip_s = samples_per_s, round_trip_s
        self._sendings: deque[Sending] = deque()
        self._batches: dict[int, tuple[int, int]] = {}  # of windows that are not settled: batch and samples
        self._evaluating = 0  # sent, result not here yet

    @property
    def has_sent(self) -> bool:
        return self.fed > self._begin * self.accumulate

    @property
    def wants_batch(self) -> bool:
        """Whether a microbatch could be sent at once, and there is none."""
        return not self._sendings and self.fed - self.acknowledged < self.ahead

    def load(self, batch: int, pieces: Sequence[Piece]) -> int:
        """Train on this batch next; returns its window."""
        assert len(pieces) == self.accumulate, f"{len(pieces)} pieces of a batch, {self.accumulate} are needed"
        window, self.windows = self.windows, self.windows + 1
        self._batches[window] = batch, sum(piece.samples for piece in pieces if piece.share)
        for i, piece in enumerate(pieces):
            number = window * self.accumulate + i
            self._sendings.append(Sending(Forward(number, piece.samples, piece.share), piece.buffers))
        self._look_ahead(pieces[0].samples)
        return window

    def _look_ahead(self, samples: int) -> None:
        meanwhile = self._round_trip_s * self._per_s / max(samples, 1)
        self.ahead = min(self.depth + _LINE + ceil(meanwhile), _MOST_AHEAD)

    def evaluate(self, first: int, pieces: Sequence[Piece], *, fresh: bool) -> None:
        """Send held-out microbatches too, numbered from `first`, after what is there already."""
        for i, piece in enumerate(pieces):
            self._sendings.append(Sending(Evaluate(first + i, piece.samples, fresh), piece.buffers))

    def evaluated(self) -> None:
        """The result of a held-out microbatch is here."""
        if not self._evaluating:
            raise FrameError("there is a result of a held-out microbatch that was not sent")
        self._evaluating -= 1

    def next(self) -> Sending | None:
        """What to send now, if anything."""
        if not self._sendings:
            return None
        if isinstance(self._sendings[0].header, Evaluate):
            if self._evaluating >= self.ahead:
                return None
            self._evaluating += 1
        else:
            if self.fed - self.acknowledged >= self.ahead:
                return None
            self.fed += 1
        return self._sendings.popleft()

    def acknowledge(self, microbatch: int) -> tuple[int, int] | None:
        """The root is done with a microbatch; returns the batch that is settled by that, and its samples."""
        if microbatch != self.acknowledged or microbatch >= self.fed:
            raise FrameError(f"microbatch {microbatch} was acknowledged, {self.acknowledged} of {self.fed} is next")
        self.acknowledged += 1
        window, last = divmod(microbatch, self.accumulate)
        return self._batches.pop(window) if last == self.accumulate - 1 else None
