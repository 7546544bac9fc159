"""A relative timeout turned into a fixed moment, so that a wait made of many waits still ends in time."""

from __future__ import annotations

import math
import time

__all__ = ["Deadline"]


class Deadline:
    """The moment `seconds` from now, on the machine's monotonic clock (the one the kernel waits by)."""

    def __init__(self, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a deadline is a finite number of seconds, not {seconds}")
        self.seconds = seconds
        self._until_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left; 0 when the moment has passed."""
        return max(0.0, self._until_s - time.monotonic())

    def passed(self) -> bool:
        return self.left_s() == 0.0

    def restart(self) -> None:
        """Count the same number of seconds again, from now."""
        self._until_s = time.monotonic() + self.seconds
