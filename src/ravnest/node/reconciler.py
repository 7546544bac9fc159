"""Reconciles the worker with the desired assignment: fetches its files, assigns the stage, releases it.

    desired g, held g   nothing to do, however often it is repeated
    desired g, held h   the worker releases h; g is fetched and assigned
    desired none        the worker releases what it holds

A stage that failed is not retried: it is reported to the coordinator, which sets another target.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from ravnest.core.backoff import Backoff
from ravnest.errors import LinkError, RavnestError, RequestRejected
from ravnest.node.client import Client
from ravnest.node.fetch import fetch_stage, upload_saved
from ravnest.node.storage import NodeStorage
from ravnest.protocol.commands import Order, SaveState, StageFailed, StateSaved
from ravnest.protocol.control import Assignment, AssignmentReleased, ReplicaInfo, StageCommand, StageReport
from ravnest.protocol.worker import FromAgent, ReleaseStage

__all__ = ["Reconciler"]

_SAVED, _STATE = "saved.safetensors", "state.safetensors"


class Reconciler:
    """Lives in the agent's loop. `connect` makes a client of the coordinator, `send_worker` sends to the worker."""

    def __init__(
        self,
        home: NodeStorage,
        connect: Callable[[], Client],
        send_worker: Callable[[FromAgent], None],
        report: Callable[[StageReport | AssignmentReleased], None],
        is_worker_ready: asyncio.Event,
    ) -> None:
        self._home, self._connect, self._send_worker, self._report = home, connect, send_worker, report
        self._is_worker_ready = is_worker_ready
        self._desired: Assignment | None = None
        self._tasks: dict[int, set[asyncio.Task[None]]] = {}  # by generation
        self._early: list[Order] = []
        self.holding = 0
        self.max_weights_bytes = 0

    def set_target(self, assignment: Assignment | None) -> bool:
        """Set the desired assignment; false if it is the present one."""
        present = 0 if self._desired is None else self._desired.generation
        if present == (0 if assignment is None else assignment.generation):
            return False
        self._cancel(present)
        if self.holding:
            self._send_worker(ReleaseStage(self.holding))
            self.holding = 0
        self._desired = assignment
        self._early.clear()
        if assignment is not None:
            self._start(assignment.generation, self._assign(assignment))
        return True

    def command(self, generation: int, command: Order) -> None:
        """Pass a command on to the stage; one that arrives before its assignment waits for it."""
        if self._desired is None or self._desired.generation != generation:
            return
        if self.holding != generation:
            self._early.append(command)
        elif isinstance(command, SaveState):
            path = self._home.stage_files(generation) / (_STATE if command.state else _SAVED)
            self._send_worker(StageCommand(generation, msgspec.structs.replace(command, path=str(path))))
        else:
            self._send_worker(StageCommand(generation, command))

    def stage_reported(self, report: StageReport) -> None:
        """Pass a report of the stage on."""
        generation = report.generation
        if isinstance(report.report, StateSaved) and not report.report.failure:
            self._start(generation, self._upload(generation, report.report))
            return
        if isinstance(report.report, StageFailed) and generation == self.holding:
            self.holding = 0
        self._report(report)

    def stage_released(self, generation: int, replica: ReplicaInfo | None = None) -> None:
        """The worker is free again, which the coordinator waits for before it assigns another stage."""
        if generation == self.holding:
            self.holding = 0
        self._home.remove_stage_files(generation)
        self._report(AssignmentReleased(generation, replica))

    def worker_lost(self, reason: str) -> None:
        if (generation := self.holding) != 0:
            self._fail(generation, reason)
            self._report(AssignmentReleased(generation))

    async def close(self) -> None:
        for generation in list(self._tasks):
            self._cancel(generation)
        await asyncio.gather(*(t for tasks in self._tasks.values() for t in tasks), return_exceptions=True)

    async def _assign(self, assignment: Assignment) -> None:
        """Fetch the files, retrying when the connection breaks, and assign the stage to the worker."""
        backoff, generation = Backoff(), assignment.generation
        directory = self._home.stage_files(generation)
        while True:
            try:
                async with self._connect() as client:
                    message = await fetch_stage(client, assignment, directory, max_weights_bytes=self.max_weights_bytes)
                break
            except LinkError:
                await asyncio.sleep(backoff.next_s())
            except RavnestError as error:
                self._fail(generation, str(error))
                return
        await self._is_worker_ready.wait()
        self._send_worker(message)
        self.holding = generation
        for command in self._early:
            self.command(generation, command)

    async def _upload(self, generation: int, saved: StateSaved) -> None:
        """Upload a saved file, retrying when the connection breaks, and report it.

        Weights of the final model must arrive; a checkpoint that does not is only reported.
        """
        backoff = Backoff()
        path = self._home.stage_files(generation) / (_STATE if saved.is_state else _SAVED)
        while True:
            try:
                async with self._connect() as client:
                    await upload_saved(client, path, generation, saved)
                break
            except LinkError:
                await asyncio.sleep(backoff.next_s())
            except (RequestRejected, OSError) as error:
                if not saved.is_state:
                    self._fail(generation, f"could not upload the weights of stage {saved.stage}: {error}")
                    return
                saved = msgspec.structs.replace(saved, failure=str(error)[:1000] or type(error).__name__)
                break
        with contextlib.suppress(OSError):
            path.unlink()
        self._report(StageReport(generation, saved))

    def _fail(self, generation: int, reason: str) -> None:
        if generation == self.holding:
            self._send_worker(ReleaseStage(generation))
            self.holding = 0
        self._home.remove_stage_files(generation)
        self._report(StageReport(generation, StageFailed(reason[:2000])))

    def _start(self, generation: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks = self._tasks.setdefault(generation, set())
        tasks.add(task)
        task.add_done_callback(lambda done: self._task_done(generation, done))

    def _task_done(self, generation: int, task: asyncio.Task[None]) -> None:
        self._tasks[generation].discard(task)
        if not self._tasks[generation]:
            del self._tasks[generation]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(generation, f"{type(error).__name__}: {error}")

    def _cancel(self, generation: int) -> None:
        for task in self._tasks.get(generation, ()):
            task.cancel()
