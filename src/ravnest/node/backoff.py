"""How long to wait before trying again: twice as long each time, and never in step with others who wait too.

wait = min(most, least * 2^n) * uniform(1/2, 1)
"""

from __future__ import annotations

import random

__all__ = ["Backoff"]


class Backoff:
    def __init__(self, least_s: float = 0.5, most_s: float = 30.0, rng: random.Random | None = None) -> None:
        self._least_s, self._most_s, self._rng = least_s, most_s, rng or random.Random()
        self._next_s = least_s

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        return wait_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It worked: the next failure is a first one."""
        self._next_s = self._least_s
