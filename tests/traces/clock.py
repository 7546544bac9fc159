"""An asyncio loop on a virtual clock: whoever waits is served at once, and time is what they waited for.

What a program gives to a thread is done in the loop, after a while of virtual time in which other things may happen.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any


class _NoFiles(selectors.SelectSelector):
    """Nothing is ever read: to wait is to move the clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen again"
        if timeout > 0:
            self.loop.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`thread_s()` says how long the next thing that is done in a thread takes."""

    def __init__(self, thread_s: Callable[[], float]) -> None:
        self.now_s = 0.0
        selector = _NoFiles()
        super().__init__(selector)
        selector.loop, self._thread_s = self, thread_s

    def time(self) -> float:
        return self.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()

        def run() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:  # told to whoever waits
                done.set_exception(error)

        self.call_later(self._thread_s(), run)
        return done
