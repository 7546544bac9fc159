"""Supervises the worker process of an agent: starts it, restarts it when it dies, and ends it.

Two threads serve the link to the process; messages and the end of the process are handled in the agent's asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from ravnest.core.clock import Backoff
from ravnest.errors import LinkError
from ravnest.node.worker_process import SpawnWorker
from ravnest.protocol.commands import StopStage
from ravnest.protocol.control import AddressChanged, NodeProfile, ReplicaStored, StageReport
from ravnest.protocol.peer import PeerAddresses
from ravnest.protocol.worker import (
    EndpointOpened,
    FromAgent,
    FromWorker,
    LimitWorker,
    StageReleased,
    StartWorker,
    WorkerUnable,
)
from ravnest.transport.link import LinkConfig
from ravnest.transport.local import unix_link
from ravnest.transport.pump import Pump, PumpConfig

__all__ = ["WorkerSupervisor"]

_SEND_S = 5.0
_END_S = 5.0
_TAIL_LETTERS = 300


class WorkerProcess:
    """One worker process. `on_message` gets its messages; `on_end` gets the reason, once, when it ends by itself."""

    def __init__(
        self,
        start: StartWorker,
        spawn: SpawnWorker,
        log: Path,
        on_message: Callable[[FromWorker], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._log, self._on_end = log, on_end
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawn(theirs, log)
        self._pump = Pump(
            unix_link(ours, LinkConfig(headers=FromWorker), peer="the worker"),
            lambda header, lengths: [],
            lambda header, _: self._in_loop(lambda: on_message(cast("FromWorker", header))),
            lambda error: self._in_loop(self._link_broken),
            PumpConfig(capacity=256),
        )
        self._pump.start()
        self.send(start)

    def send(self, message: FromAgent) -> None:
        with contextlib.suppress(LinkError):  # the end of the process is handled separately
            self._pump.put(message, deadline_s=_SEND_S)

    async def end(self, timeout_s: float) -> None:
        """Stop the process; kill it after the timeout."""
        self._is_over = True
        self.send(StopStage())
        await asyncio.to_thread(self._wait, timeout_s)
        self._pump.close()

    def kill(self) -> None:
        self._is_over = True
        self._process.kill()

    def _wait(self, timeout_s: float) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(_END_S)

    def _in_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def _link_broken(self) -> None:
        """Determine the reason, without blocking the loop."""
        if not self._is_over:
            self._is_over = True
            threading.Thread(target=self._reap, name="reap worker", daemon=True).start()

    def _reap(self) -> None:
        code = self._wait(_END_S)
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        tail = f": {self._log_tail()}" if code > 0 and self._log_tail() else ""
        self._in_loop(lambda: self._on_end(f"the worker process {how}{tail}"))

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            return lines[-1][-_TAIL_LETTERS:] if lines else ""
        return ""


# supervision

_STOP_S = 2.5


class WorkerSupervisor:
    """Lives in the agent's loop. Messages of the worker go to `on_message`, its death to `on_lost`.

    `is_ready` is set while there is a worker with open endpoints.
    """

    def __init__(
        self,
        spawn: SpawnWorker,
        log: Path,
        on_message: Callable[
            [EndpointOpened | AddressChanged | StageReport | StageReleased | ReplicaStored | WorkerUnable], None
        ],
        on_lost: Callable[[str, float], None],
    ) -> None:
        self._spawn, self._log, self._on_message, self._on_lost = spawn, log, on_message, on_lost
        self._start: StartWorker | None = None
        self._worker: WorkerProcess | None = None
        self._backoff = Backoff()
        self._restarting: asyncio.TimerHandle | None = None
        self.addresses = PeerAddresses()
        self.is_ready, self._is_observed = asyncio.Event(), asyncio.Event()

    def start(self, start: StartWorker) -> None:
        self._start = start
        self._worker = WorkerProcess(start, self._spawn, self._log, self._handle, self._ended)

    def send(self, message: FromAgent) -> None:
        if self._worker is not None:
            self._worker.send(message)

    def set_profile(self, profile: NodeProfile) -> None:
        """Change the resources of this worker and of those that replace it."""
        assert self._start is not None, "the worker was started before"
        self._start = msgspec.structs.replace(self._start, profile=profile)
        self.send(LimitWorker(profile.memory_bytes, profile.threads))

    async def wait_observed(self, timeout_s: float) -> None:
        """Wait until the coordinator has seen the endpoint, or the timeout is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_observed.wait()

    def reset_backoff(self) -> None:
        """Restart without delay after the next failure: the worker has run a stage."""
        self._backoff.reset()

    async def stop(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
        if self._worker is not None:
            await self._worker.end(_STOP_S)

    def kill(self) -> None:
        if self._worker is not None:
            self._worker.kill()

    def _handle(self, message: FromWorker) -> None:
        assert self._start is not None
        match message:
            case EndpointOpened(port=port):
                self._start = msgspec.structs.replace(self._start, port=port)
            case AddressChanged(addresses=addresses):
                self.addresses = addresses
                self.is_ready.set()
                if addresses.observed is not None:
                    self._is_observed.set()
        self._on_message(message)

    def _ended(self, reason: str) -> None:
        assert self._start is not None
        self.is_ready.clear()
        wait_s = self._backoff.next_s()
        self._restarting = asyncio.get_running_loop().call_later(wait_s, self.start, self._start)
        self._on_lost(reason, wait_s)
