"""Keeps a worker for an agent: starts it, and starts another when it dies, whose door is at the same port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..core.control import Copied, Moved, Report, Whereabouts
from .backoff import Backoff
from .supervise import WorkerProcess
from .talk import Begin, Freed, FromAgent, FromWorker, Opened, Unable

__all__ = ["Keeper"]

_END_S = 2.5


class Keeper:
    """Lives in the agent's loop. What the worker says of parts goes to `heard`, its death to `lost`.

    `is_ready` is set while there is a worker with an open door.
    """

    def __init__(
        self,
        log: Path,
        heard: Callable[[Opened | Moved | Report | Freed | Copied | Unable], None],
        lost: Callable[[str, float], None],
    ) -> None:
        self._log, self._heard, self._lost = log, heard, lost
        self._begin: Begin | None = None
        self._worker: WorkerProcess | None = None
        self._backoff = Backoff()
        self._restarting: asyncio.TimerHandle | None = None
        self.where = Whereabouts()
        self.is_ready, self._is_seen = asyncio.Event(), asyncio.Event()

    def start(self, begin: Begin) -> None:
        self._begin = begin
        self._worker = WorkerProcess(begin, self._log, self._said, self._ended)

    def tell(self, said: FromAgent) -> None:
        if self._worker is not None:
            self._worker.tell(said)

    async def wait_seen(self, patience_s: float) -> None:
        """Until the coordinator has seen the door, or it takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._is_seen.wait()

    def is_well(self) -> None:
        """It does its work: when it dies, that is a first time."""
        self._backoff.reset()

    async def end(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
        if self._worker is not None:
            await self._worker.end(_END_S)

    def kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()

    def _said(self, said: FromWorker) -> None:
        assert self._begin is not None, "nobody speaks before it was started"
        match said:
            case Opened(port=port):
                self._begin = msgspec.structs.replace(self._begin, port=port)
            case Moved(where=where):
                self.where = where
                self.is_ready.set()
                if where.observed is not None:
                    self._is_seen.set()
        self._heard(said)

    def _ended(self, reason: str) -> None:
        assert self._begin is not None, "nobody ends before it was started"
        self.is_ready.clear()
        wait_s = self._backoff.next_s()
        self._restarting = asyncio.get_running_loop().call_later(wait_s, self.start, self._begin)
        self._lost(reason, wait_s)
