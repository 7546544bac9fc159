"""Those who were sent away, told with others like them in one event, and not often: nobody can fill the log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from .events import CallerRefused

__all__ = ["Refusals"]

_MOST = 8  # kinds that are told apart at a time


class Refusals:
    """Lives in an asyncio loop; `tell` gets an event for each kind, at most every `every_s`."""

    def __init__(self, tell: Callable[[CallerRefused], None], now_s: Callable[[], float], every_s: float) -> None:
        self._tell, self._now_s, self._every_s = tell, now_s, every_s
        self._counts: Counter[tuple[str, str]] = Counter()
        self._telling: asyncio.TimerHandle | None = None
        self._told_s = 0.0

    def add(self, address: str, reason: str) -> None:
        key = (address.rpartition(":")[0] or address, reason)
        if key not in self._counts and len(self._counts) >= _MOST:
            key = ("many", "for various reasons")
        self._counts[key] += 1
        if self._telling is None:
            wait_s = max(self._told_s + self._every_s - self._now_s(), 0.0)
            self._telling = asyncio.get_running_loop().call_later(wait_s, self.tell_all)

    def tell_all(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        self._telling, self._told_s = None, self._now_s()
        counts, self._counts = self._counts, Counter()
        for (address, reason), count in counts.items():
            self._tell(CallerRefused(self._now_s(), address, reason, count))
