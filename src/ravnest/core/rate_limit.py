"""Rate limiter for a node's uploads, shared by all its links: a token bucket that fills with `bytes_per_s`.

    wait = max(0, reserved - now)        reserved += bytes / bytes_per_s

A sender reserves its bytes and waits as long as `reserve` returns. Unused rate is saved for at most `burst_s`, so the
mean over any longer time stays within the limit, up to one frame of each link.
"""

from __future__ import annotations

import threading

from ravnest.core.clock import Clock, SystemClock
from ravnest.core.config import require

__all__ = ["RateLimiter"]


class RateLimiter:
    """Thread-safe."""

    def __init__(self, bytes_per_s: float, *, burst_s: float = 0.1, clock: Clock | None = None) -> None:
        require(bytes_per_s > 0, f"bytes_per_s must be > 0, got {bytes_per_s}")
        require(burst_s >= 0, f"burst_s must be >= 0, got {burst_s}")
        self.bytes_per_s, self._burst_s, self._clock = bytes_per_s, burst_s, clock or SystemClock()
        self._reserved_s = self._clock.now_s() - burst_s  # the rate is used up until then
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> float:
        """Reserve `num_bytes` of the rate; return the seconds to wait before they are sent."""
        with self._lock:
            now_s = self._clock.now_s()
            start_s = max(self._reserved_s, now_s - self._burst_s)
            self._reserved_s = start_s + num_bytes / self.bytes_per_s
            return max(0.0, start_s - now_s)
