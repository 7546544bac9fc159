"""An asyncio loop on a virtual clock: a wait takes no real time.

Calls in a thread run in the loop, after some virtual time in which other things may happen.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any


class _NoFiles(selectors.SelectSelector):
    """No file is ever ready: waiting moves the clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "the loop waits forever"
        if timeout > 0:
            self.loop.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`thread_s()` is the duration of the next call in a thread."""

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
            except Exception as error:  # for the awaiting task
                done.set_exception(error)

        self.call_later(self._thread_s(), run)
        return done
