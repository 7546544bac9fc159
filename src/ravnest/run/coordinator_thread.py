"""Runs a coordinator in its own thread, next to the thread that iterates the user's data and shows progress."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.service import CoordinatorServer
from ravnest.core.host import data_directory, lock_directory
from ravnest.errors import RavnestError
from ravnest.run.local import LocalNodes

__all__ = ["CoordinatorThread", "coordinators_directory"]

T = TypeVar("T")

_OPEN_S = 60.0
_CLOSE_S = 20.0


class CoordinatorThread:
    """A context in which the coordinator listens. `make` is called in the loop's thread.

    The coordinator's directory is locked meanwhile, so that no other coordinator writes to the same journal. In a local
    run, the agents of its `nodes` run in the same loop.
    """

    def __init__(self, directory: Path, make: Callable[[], CoordinatorServer], nodes: LocalNodes | None = None) -> None:
        self._make, self._nodes = make, nodes
        busy = f"another coordinator uses {directory}: end it, or choose another --coordinator-dir"
        self._lock = lock_directory(directory, busy)
        self._runner = asyncio.Runner()
        self._opened = threading.Event()
        self._closing: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._reason, self._is_over = "the run has ended", True
        self._has_started = False
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def __enter__(self) -> CoordinatorThread:
        self._lock.__enter__()
        self._thread.start()
        is_open = self._opened.wait(_OPEN_S)
        if self._error is not None or not is_open:
            self._lock.__exit__(None, None, None)
            self.check()
            raise RavnestError(f"the coordinator did not start within {_OPEN_S:g} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._reason, self._is_over = f"the run has stopped: {error or kind}", False
            if self._nodes is not None:
                self._nodes.kill()
        closing = self._closing
        if closing is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(closing.set)
        self._thread.join(_CLOSE_S)
        self._lock.__exit__(None, None, None)

    def check(self) -> None:
        """Raise the error that stopped the coordinator, if one did."""
        if self._error is not None:
            if self._nodes is None and self._has_started:
                self._error.add_note(
                    "The coordinator stopped; its nodes try to reconnect. Continue the run with `--resume`"
                )
            raise self._error

    def call(self, work: Callable[[Coordinator], T]) -> T:
        """Call a function in the loop and return its result."""

        async def do() -> T:
            return work(self.service.coordinator)

        return asyncio.run_coroutine_threadsafe(do(), self._loop).result(_OPEN_S)

    def soon(self, work: Callable[[Coordinator], None]) -> None:
        """Call a function in the loop, without waiting."""
        self._loop.call_soon_threadsafe(work, self.service.coordinator)

    def _run(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._serve())
        except BaseException as error:  # reported to the thread that opened it
            self._error = error
        finally:
            self._opened.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self.service = self._make()
        await self.service.open()
        self.ticket = self.service.ticket() if self.service.config.port is not None else ""
        self._has_started = True
        self._opened.set()
        closing, running = asyncio.create_task(self._closing.wait()), asyncio.create_task(self.service.run())
        nodes = asyncio.create_task(self._nodes.run()) if self._nodes is not None else None
        tasks = [task for task in (closing, running, nodes) if task is not None]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if closing.done() or (nodes is not None and nodes.done()):
            await self.service.close(self._reason, is_over=self._is_over)
        else:
            await self.service.abort()
        if nodes is not None:
            await _end_nodes(nodes)
        await running


async def _end_nodes(nodes: asyncio.Task[None]) -> None:
    """Cancel the agents, which end their workers; raises the error with which an agent ended before."""
    nodes.cancel()
    try:
        await nodes
    except asyncio.CancelledError:
        pass
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def coordinators_directory() -> Path:
    """Return the default parent of this user's coordinator directories, which are named by port."""
    return data_directory() / "coordinators"
