"""Clocks, deadlines and backoff, for waits that end in time and decisions that can be replayed.

A `Clock` is passed to every decision, so that tests need not wait. A `Deadline` is a timeout as a fixed point in time:
an operation made of many waits still ends in time. `Backoff` is exponential with jitter, so that clients do not retry
in step; wait n, counted from 0, is

    min(max_s, min_s * 2^n) * uniform(1/2, 1)
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
    """Seconds to wait before each retry, from `min_s` up to `max_s`."""

    def __init__(self, min_s: float = 0.5, max_s: float = 30.0, rng: random.Random | None = None) -> None:
        self._min_s, self._max_s, self._rng = min_s, max_s, rng or random.Random()
        self._next_s = min_s

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return wait_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again at `min_s`, after a success."""
        self._next_s = self._min_s
