"""Reconciles the worker with the desired assignment: fetches its files, assigns the stage, releases it.

    desired g, held g   nothing to do, however often it is repeated
    desired g, held h   the worker releases h; g is fetched and assigned
    desired none        the worker releases what it holds

A stage that failed is not retried: it is reported to the coordinator, which sets another target.

Files are fetched in chunks. A file must have the announced length, which is checked before the request, and the
announced digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import IO, Any

import msgspec

from ravnest.core.clock import Backoff
from ravnest.errors import LinkError, ProgramError, RavnestError, RequestRejected
from ravnest.graph.limits import StageLimits
from ravnest.node.client import Client, LocalClient
from ravnest.node.storage import NodeStorage
from ravnest.protocol.commands import Command, SaveState, StageFailed, StateSaved
from ravnest.protocol.control import (
    FILE_HEADER,
    Assignment,
    AssignmentReleased,
    Blob,
    ReplicaInfo,
    StageCommand,
    StageReport,
)
from ravnest.protocol.worker import AssignStage, FromAgent, ReleaseStage

__all__ = ["Reconciler", "fetch"]

_MAX_CONFIG_BYTES = 4 * 2**20
_STATE_FACTOR = 2  # a whole state on disk may be larger than the part of it in memory
_CHUNK_BYTES = 2**18
_DIGEST = re.compile(r"[0-9a-f]{64}")


async def fetch_stage(
    client: Client, assignment: Assignment, directory: Path, *, max_weights_bytes: int
) -> AssignStage:
    """Fetch all files of an assignment; return the message that assigns it to the worker."""
    file, config, weights = directory / "stage", directory / "config", directory / "weights"
    await fetch(client, assignment.file, file, max_bytes=StageLimits().text_bytes)
    await fetch(client, assignment.config, config, max_bytes=_MAX_CONFIG_BYTES)
    if assignment.weights is not None:
        await fetch(client, assignment.weights, weights, max_bytes=max_weights_bytes)
    states = tuple(directory / f"state-{i}" for i in range(len(assignment.states)))
    for blob, path in zip(assignment.states, states, strict=True):
        await fetch(client, blob, path, max_bytes=_STATE_FACTOR * max_weights_bytes)
    return AssignStage(
        assignment=assignment, coordinator=client.address, file=str(file), config=str(config),
        weights="" if assignment.weights is None else str(weights), states=tuple(map(str, states)),
    )  # fmt: skip


async def fetch(client: Client, blob: Blob, path: Path, *, max_bytes: int) -> None:
    """Fetch a file to `path`; raises `ProgramError` unless it is as announced, `LinkError` if it is incomplete."""
    if not _DIGEST.fullmatch(blob.digest):
        raise ProgramError(f"{blob.digest!r:.80} is not a SHA-256 digest")
    if not 0 <= blob.num_bytes <= max_bytes:
        raise ProgramError(f"a file may have at most {max_bytes} bytes, got {blob.num_bytes}")
    digest, remaining_bytes = hashlib.sha256(), blob.num_bytes
    try:
        with path.open("wb") as file:
            async with client.request("GET", f"/v1/blobs/{blob.digest}") as response:
                if isinstance(client, LocalClient) and FILE_HEADER in response.headers:
                    file.close()
                    await asyncio.to_thread(_link, Path(response.headers[FILE_HEADER]), path)
                    return  # written and hashed by the same user on this host
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    remaining_bytes -= len(chunk)
                    if remaining_bytes < 0:
                        raise ProgramError(f"the file is longer than the announced {blob.num_bytes} bytes")
                    digest.update(chunk)
                    await asyncio.to_thread(_write, file, chunk)
    except OSError as error:
        raise _disk_error(error) from error
    if remaining_bytes:
        raise LinkError(f"the file ended {remaining_bytes} bytes early")
    if digest.hexdigest() != blob.digest:
        raise ProgramError(f"the digest of the file differs from the announced {blob.digest}")


def _write(file: IO[bytes], chunk: bytes) -> None:
    """Write a chunk; an error of the disk becomes a `ProgramError`, which is not retried like one of the connection."""
    try:
        file.write(chunk)
    except OSError as error:
        raise _disk_error(error) from error


def _disk_error(error: OSError) -> ProgramError:
    return ProgramError(f"cannot write the files of the stage: {error.strerror or error}")


def _link(source: Path, path: Path) -> None:
    """Hard-link a file of this host; copy it where that is impossible."""
    path.unlink(missing_ok=True)
    try:
        path.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, path)


async def upload_saved(client: Client, path: Path, generation: int, saved: StateSaved) -> None:
    """Upload the weights of a stage, or its whole state."""
    target = f"weights/{generation}/{saved.stage}"
    if saved.is_state:
        target = f"states/{generation}/{saved.stage}/{saved.updates}"
    if isinstance(client, LocalClient):
        await client.ask("PUT", f"/v1/{target}", headers={FILE_HEADER: str(path)})
        return
    with path.open("rb") as file:
        await client.ask("PUT", f"/v1/{target}", data=file)


# reconciliation

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
        self._early: list[Command] = []
        self._unreleased: set[int] = set()  # generations that the worker was assigned and has not released
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

    def command(self, generation: int, command: Command) -> None:
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
        """Report that the worker is free; the coordinator waits for this before it assigns another stage."""
        if generation == self.holding:
            self.holding = 0
        self._unreleased.discard(generation)
        self._home.remove_stage_files(generation)
        self._report(AssignmentReleased(generation, replica))

    def worker_lost(self, reason: str) -> None:
        """Report the failure and the release of all that the worker had, also if it was already told to release it."""
        for generation in sorted(self._unreleased):
            self._fail(generation, reason)
            self._report(AssignmentReleased(generation))
        self._unreleased.clear()

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
        self._unreleased.add(generation)
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
