"""Exponential backoff with jitter: each wait is twice as long as the last, and clients do not retry in step.

wait = min(max_s, min_s * 2^n) * uniform(1/2, 1)
"""

from __future__ import annotations

import random

__all__ = ["Backoff"]


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
