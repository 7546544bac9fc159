"""Flow control of a cluster's feed: the next message to the first stage. A state machine without clock or I/O.

A lease is a batch, and a batch is one step of `accumulate` microbatches. At most `max_in_flight` microbatches are sent
and not acknowledged: those the first stage holds in flight, two on the connection, and those computed during one round
trip. The first stage acknowledges microbatches in order; a batch is settled with the last of its microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from ravnest.coordinator.requester import Microbatch
from ravnest.errors import FrameError
from ravnest.protocol.pipeline import Evaluate, Forward

__all__ = ["FeedController", "FeedMessage"]

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_PREFETCH = 2  # microbatches on the connection, so that the first stage does not wait for the next
_MAX_IN_FLIGHT = 256


@dataclass(frozen=True)
class FeedMessage:
    """A message to the first stage: header and payload."""

    header: Forward | Evaluate
    buffers: Sequence[ReadableBuffer]


class FeedController:
    """The feed of one cluster. `load` and `evaluate` queue microbatches, `next_message` returns the next to send."""

    def __init__(
        self, *, accumulate: int, depth: int, samples_per_s: float = 0.0, round_trip_s: float = 0.0, first_step: int = 0
    ) -> None:
        self.accumulate, self.depth = accumulate, depth
        self.max_in_flight = depth + _PREFETCH
        self.steps = self._first_step = first_step
        self.num_sent = self.num_acknowledged = first_step * accumulate
        self._per_s, self._round_trip_s = samples_per_s, round_trip_s
        self._queue: deque[FeedMessage] = deque()
        self._batches: dict[int, tuple[int, int]] = {}  # by step that is not settled: batch and samples
        self._evaluations: deque[tuple[int, list[FeedMessage]]] = deque()  # with the step before which they are sent
        self._evaluating = 0  # sent, without a result yet

    @property
    def has_sent(self) -> bool:
        return self.num_sent > self._first_step * self.accumulate

    @property
    def wants_batch(self) -> bool:
        """Whether a microbatch could be sent now and the queue is empty."""
        return not self._queue and self.num_sent - self.num_acknowledged < self.max_in_flight

    def load(self, batch: int, microbatches: Sequence[Microbatch]) -> int:
        """Queue a batch for training; returns its step."""
        count = len(microbatches)
        assert count == self.accumulate, f"a batch needs {self.accumulate} microbatches, got {count}"
        step, self.steps = self.steps, self.steps + 1
        self._batches[step] = batch, sum(microbatch.samples for microbatch in microbatches if microbatch.share)
        for i, microbatch in enumerate(microbatches):
            number = step * self.accumulate + i
            header = Forward(number, microbatch.samples, microbatch.share, microbatch.sizes)
            self._queue.append(FeedMessage(header, microbatch.buffers))
        self._limit_in_flight(microbatches[0].samples)
        while self._evaluations and self._evaluations[0][0] <= self.steps:
            self._queue.extend(self._evaluations.popleft()[1])
        return step

    def _limit_in_flight(self, samples: int) -> None:
        per_round_trip = self._round_trip_s * self._per_s / max(samples, 1)
        self.max_in_flight = min(self.depth + _PREFETCH + ceil(per_round_trip), _MAX_IN_FLIGHT)

    def evaluate(self, first: int, microbatches: Sequence[Microbatch], *, fresh: bool, after_batches: int = 0) -> None:
        """Queue held-out microbatches, numbered from `first`, behind the others and `after_batches` more batches."""
        messages = [
            FeedMessage(Evaluate(first + i, microbatch.samples, fresh, sizes=microbatch.sizes), microbatch.buffers)
            for i, microbatch in enumerate(microbatches)
        ]
        if after_batches:
            self._evaluations.append((self.steps + after_batches, messages))
        else:
            self._queue.extend(messages)

    def predict(self, number: int, prompt: Microbatch, positions: tuple[int, ...]) -> None:
        """Queue a prompt before the next microbatch, to predict the token that follows each position."""
        message = FeedMessage(Evaluate(number, prompt.samples, positions=positions, sizes=prompt.sizes), prompt.buffers)
        self._queue.appendleft(message)

    def release_evaluations(self) -> None:
        """Queue evaluations that wait for further batches: there will be none."""
        while self._evaluations:
            self._queue.extend(self._evaluations.popleft()[1])

    def evaluation_received(self) -> None:
        """Count the result of a held-out microbatch."""
        if not self._evaluating:
            raise FrameError("received an evaluation result for a microbatch that was not sent")
        self._evaluating -= 1

    def next_message(self) -> FeedMessage | None:
        """The next message, or None if nothing may be sent now."""
        if not self._queue:
            return None
        if isinstance(self._queue[0].header, Evaluate):
            if self._evaluating >= self.max_in_flight:
                return None
            self._evaluating += 1
        else:
            if self.num_sent - self.num_acknowledged >= self.max_in_flight:
                return None
            self.num_sent += 1
        return self._queue.popleft()

    def acknowledge(self, microbatch: int) -> tuple[int, int] | None:
        """Count an acknowledgement; returns the batch that it settles, and the samples of that batch."""
        if microbatch != self.num_acknowledged or microbatch >= self.num_sent:
            expected = f"{self.num_acknowledged} of {self.num_sent}"
            raise FrameError(f"microbatch {microbatch} was acknowledged, expected {expected}")
        self.num_acknowledged += 1
        step, index = divmod(microbatch, self.accumulate)
        return self._batches.pop(step) if index == self.accumulate - 1 else None
