"""Clocks that are passed in, so that decisions can be replayed and tested without waiting, and deadlines.

A `Deadline` is a timeout as a fixed point in time: an operation made of many waits still ends in time.

Exponential backoff with jitter: each wait is twice as long as the last, and clients do not retry in step.

wait = min(max_s, min_s * 2^n) * uniform(1/2, 1)
"""

from __future__ import annotations

import math
import random
import time
from typing import Protocol

__all__ = ["Clock", "Deadline", "SystemClock", "Backoff"]


class Clock(Protocol):
    """Monotonic seconds with an arbitrary zero."""

    def now_s(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class Deadline:
    """The time `seconds` from now, on the machine's monotonic clock (the one the kernel waits by)."""

    def __init__(self, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds of a deadline must be finite and >= 0, got {seconds}")
        self.seconds = seconds
        self._until_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Remaining seconds; 0 once the deadline has passed."""
        return max(0.0, self._until_s - time.monotonic())

    def passed(self) -> bool:
        return self.left_s() == 0.0

    def restart(self) -> None:
        """Move the deadline to `seconds` from now."""
        self._until_s = time.monotonic() + self.seconds


class Backoff:
    def __init__(self, min_s: float = 0.5, max_s: float = 30.0, rng: random.Random | None = None) -> None:
        self._min_s, self._max_s, self._rng = min_s, max_s, rng or random.Random()
        self._next_s = min_s

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return wait_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again at `min_s`, after a success."""
        self._next_s = self._min_s
