"""A clock that tests advance by hand."""

from __future__ import annotations


class ManualClock:
    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds
