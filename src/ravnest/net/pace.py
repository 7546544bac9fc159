"""A limit on how fast a node sends, shared by all its links: a bucket that fills with `bytes_per_s`.

    wait = max(0, booked - now)        booked += bytes / bytes_per_s

Who wants to send books its bytes and is told how long to wait first. An unused rate is saved for at most `burst_s`, so
the mean over any time longer than that keeps to the limit, give or take one frame of each link.
"""

from __future__ import annotations

import threading

from ravnest.core.clock import Clock, SystemClock
from ravnest.core.config import require

__all__ = ["Pace"]


class Pace:
    """Used by many threads at once."""

    def __init__(self, bytes_per_s: float, *, burst_s: float = 0.1, clock: Clock | None = None) -> None:
        require(bytes_per_s > 0, f"a rate is more than 0 bytes/s, not {bytes_per_s}")
        require(burst_s >= 0, f"burst_s is 0 seconds or more, not {burst_s}")
        self.bytes_per_s, self._burst_s, self._clock = bytes_per_s, burst_s, clock or SystemClock()
        self._booked_s = self._clock.now_s() - burst_s  # until then the line is taken
        self._lock = threading.Lock()

    def book(self, num_bytes: int) -> float:
        """Take so many bytes of the line; how many seconds to wait before they are sent."""
        with self._lock:
            now_s = self._clock.now_s()
            begins_s = max(self._booked_s, now_s - self._burst_s)
            self._booked_s = begins_s + num_bytes / self.bytes_per_s
            return max(0.0, begins_s - now_s)
