"""A coordinator in a thread of its own, next to the thread that iterates the user's data and shows progress."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from .coordinator.coordinator import Coordinator
from .coordinator.service import Service
from .core.here import hold

__all__ = ["Serving"]

T = TypeVar("T")

_OPEN_S = 60.0
_CLOSE_S = 20.0


class Serving:
    """A context: inside it the coordinator listens. `make` is called in the loop's thread.

    The coordinator's directory is held for as long, so that no other coordinator writes to the same journal.
    """

    def __init__(self, directory: Path, make: Callable[[], Service]) -> None:
        self._make = make
        busy = f"another coordinator keeps its files in {directory}: end it, or give this one another --coordinator"
        self._held = hold(directory, busy)
        self._runner = asyncio.Runner()
        self._opened = threading.Event()
        self._closing: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._reason = "the run has ended"
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def __enter__(self) -> Serving:
        self._held.__enter__()
        self._thread.start()
        self._opened.wait(_OPEN_S)
        if self._error is not None:
            self._held.__exit__(None, None, None)
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._reason = f"the run has ended: {error or kind}"
        closing = self._closing
        if closing is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(closing.set)
        self._thread.join(_CLOSE_S)
        self._held.__exit__(None, None, None)

    def check(self) -> None:
        """Raise what made the coordinator stop, if it has."""
        if self._error is not None:
            self._error.add_note(
                "The coordinator stopped at that; nodes wait for it. `--resume` takes the run up again"
            )
            raise self._error

    def call(self, work: Callable[[Coordinator], T]) -> T:
        """Have the loop do something, and wait for it."""

        async def do() -> T:
            return work(self.service.coordinator)

        return asyncio.run_coroutine_threadsafe(do(), self._loop).result(_OPEN_S)

    def soon(self, work: Callable[[Coordinator], None]) -> None:
        """Have the loop do something, without waiting."""
        self._loop.call_soon_threadsafe(work, self.service.coordinator)

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._serve())
        except BaseException as error:  # the supervisor of this thread: whoever opened it must know
            self._error = error
        finally:
            self._opened.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self.service = self._make()
        await self.service.open()
        self.ticket = self.service.ticket()
        self._opened.set()
        closing, tending = asyncio.create_task(self._closing.wait()), asyncio.create_task(self.service.tend())
        await asyncio.wait([closing, tending], return_when=asyncio.FIRST_COMPLETED)
        if closing.done():
            await self.service.close(self._reason)
        else:
            await self.service.give_up()
        await tending
