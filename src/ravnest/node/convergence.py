"""From what is desired to what is: a part is fetched, given to the worker, and taken back when another is desired.

    desired g, held g   nothing to do, however often it is said
    desired g, held h   the worker ends h; g is fetched and given to it
    desired none        the worker ends what it holds

A part that failed is not tried again: the coordinator is told, and desires something else next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from ..core.control import Copy, LetGo, Part, Report, Tell
from ..core.errors import LinkError, RavnestError
from ..core.orders import Failed, Order, Save, Saved
from .backoff import Backoff
from .client import Client, Refused
from .fetch import fetch_part, send_saved
from .home import Home
from .talk import Free, FromAgent

__all__ = ["Convergence"]

_SAVED, _STATE = "saved.safetensors", "state.safetensors"


class Convergence:
    """Lives in the agent's loop. `connect` makes a client to fetch with, `tell` is the worker's ear."""

    def __init__(
        self,
        home: Home,
        connect: Callable[[], Client],
        tell: Callable[[FromAgent], None],
        report: Callable[[Report | LetGo], None],
        is_worker_ready: asyncio.Event,
    ) -> None:
        self._home, self._connect, self._tell, self._report = home, connect, tell, report
        self._is_worker_ready = is_worker_ready
        self._desired: Part | None = None
        self._tasks: dict[int, set[asyncio.Task[None]]] = {}  # by generation
        self._early: list[Order] = []
        self.holding = 0
        self.max_weights_bytes = 0

    def desire(self, part: Part | None) -> bool:
        """Go for it; false if that is what we are at already."""
        before = 0 if self._desired is None else self._desired.generation
        if before == (0 if part is None else part.generation):
            return False
        self._cancel(before)
        if self.holding:
            self._tell(Free(self.holding))
            self.holding = 0
        self._desired = part
        self._early.clear()
        if part is not None:
            self._start(part.generation, self._take(part))
        return True

    def order(self, generation: int, order: Order) -> None:
        """An order of the coordinator; one that comes before its part waits for it."""
        if self._desired is None or self._desired.generation != generation:
            return
        if self.holding != generation:
            self._early.append(order)
        elif isinstance(order, Save):
            path = self._home.part(generation) / (_STATE if order.state else _SAVED)
            self._tell(Tell(generation, msgspec.structs.replace(order, path=str(path))))
        else:
            self._tell(Tell(generation, order))

    def reported(self, report: Report) -> None:
        """What the worker says of a part, to be passed on."""
        generation = report.generation
        if isinstance(report.report, Saved) and not report.report.failure:
            self._start(generation, self._send(generation, report.report))
            return
        if isinstance(report.report, Failed) and generation == self.holding:
            self.holding = 0
        self._report(report)

    def freed(self, generation: int, copy: Copy | None = None) -> None:
        """Nothing is left of a part: which the coordinator waits for, before it gives another."""
        if generation == self.holding:
            self.holding = 0
        self._home.forget_part(generation)
        self._report(LetGo(generation, copy))

    def worker_lost(self, reason: str) -> None:
        if (generation := self.holding) != 0:
            self._fail(generation, reason)
            self._report(LetGo(generation))

    async def close(self) -> None:
        for generation in list(self._tasks):
            self._cancel(generation)
        await asyncio.gather(*(t for tasks in self._tasks.values() for t in tasks), return_exceptions=True)

    async def _take(self, part: Part) -> None:
        """Fetch it, however often that breaks off, and hand it to the worker."""
        backoff, directory = Backoff(), self._home.part(part.generation)
        while True:
            try:
                async with self._connect() as client:
                    take = await fetch_part(client, part, directory, max_weights_bytes=self.max_weights_bytes)
                break
            except LinkError:
                await asyncio.sleep(backoff.next_s())
            except RavnestError as error:
                self._fail(part.generation, str(error))
                return
        await self._is_worker_ready.wait()
        self._tell(take)
        self.holding = part.generation
        for order in self._early:
            self.order(part.generation, order)

    async def _send(self, generation: int, saved: Saved) -> None:
        """What was saved to the coordinator, however often that breaks off; then it is saved.

        The model must come through; that a checkpoint does not is only told.
        """
        folder, backoff = self._home.part(generation), Backoff()
        path = folder / (_STATE if saved.is_state else _SAVED)
        while True:
            try:
                async with self._connect() as client:
                    await send_saved(client, path, generation, saved)
                break
            except LinkError:
                await asyncio.sleep(backoff.next_s())
            except (Refused, OSError) as error:
                if not saved.is_state:
                    self._fail(generation, f"the weights of stage {saved.stage} could not be sent: {error}")
                    return
                saved = msgspec.structs.replace(saved, failure=str(error)[:1000] or type(error).__name__)
                break
        _remove(path)
        self._report(Report(generation, saved))

    def _fail(self, generation: int, reason: str) -> None:
        if generation == self.holding:
            self._tell(Free(generation))
            self.holding = 0
        self._home.forget_part(generation)
        self._report(Report(generation, Failed(reason[:2000])))

    def _start(self, generation: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks = self._tasks.setdefault(generation, set())
        tasks.add(task)
        task.add_done_callback(lambda done: self._over(generation, done))

    def _over(self, generation: int, task: asyncio.Task[None]) -> None:
        self._tasks[generation].discard(task)
        if not self._tasks[generation]:
            del self._tasks[generation]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(generation, f"{type(error).__name__}: {error}")

    def _cancel(self, generation: int) -> None:
        for task in self._tasks.get(generation, ()):
            task.cancel()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
