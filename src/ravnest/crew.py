"""Worker processes on this machine: started with open sockets, watched by their control links, ended for certain.

The parent is the stage before the first: it feeds microbatches to the root over the same kind of link that stages use
among themselves, and gets each one's end acknowledged. All that happens becomes an event in one queue.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .core.errors import LinkError, RavnestError, WorkerLost
from .core.messages import Backward, Data, Evaluate, Forward
from .core.orders import Failed, Reports, Stop
from .net.link import LinkConfig
from .net.pump import Pump, PumpConfig
from .net.unix import unix_link
from .node.orders import Assign
from .runtime.freight import Freight, as_bytes

__all__ = ["Acknowledged", "Broken", "Crew", "Event", "Reported"]

_START_S = 120.0


@dataclass(frozen=True)
class Reported:
    """A worker told something."""

    worker: int
    report: Any


@dataclass(frozen=True)
class Acknowledged:
    """The root has finished a microbatch."""

    microbatch: int


@dataclass(frozen=True)
class Broken:
    """The link to a worker broke; -1 is the feeding link."""

    worker: int
    error: Exception


Event = Reported | Acknowledged | Broken


class Crew:
    """The processes of one local run. A context: whatever happens inside, none of them is left behind."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names = list(names)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._logs = [folder / f"{name}.log" for name in names]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[Pump] = []
        self._feed: Pump | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.end(patience_s=3.0 if kind is None else 0.0)

    def start(self, files: Sequence[bytes], assigns: Sequence[Assign]) -> None:
        """Start a worker for each stage file and tell it what to be."""
        pipes = [socket.socketpair() for _ in files]  # pipes[i] joins worker i with what is before it
        controls = [socket.socketpair() for _ in files]
        try:
            for i in range(len(files)):
                after = pipes[i + 1][0] if i + 1 < len(files) else None
                self._processes.append(self._spawn(i, controls[i][1], pipes[i][1], after))
        finally:
            for ours, theirs in controls:
                theirs.close()
                if len(self._processes) < len(files):
                    ours.close()
            for left, right in pipes[1:]:
                left.close()
                right.close()
            pipes[0][1].close()
        for i, (file, assign) in enumerate(zip(files, assigns, strict=True)):
            self._controls.append(self._control(i, controls[i][0]))
            self._controls[i].put(assign, [file], deadline_s=_START_S)
        self._feed = self._feeding(pipes[0][0])

    def _spawn(
        self, index: int, control: socket.socket, before: socket.socket, after: socket.socket | None
    ) -> subprocess.Popen[bytes]:
        sockets = {"control": control, "before": before, "after": after}
        given = {name: sock.fileno() for name, sock in sockets.items() if sock is not None}
        command = [sys.executable, "-m", "ravnest.node.worker"]
        for name, fd in given.items():
            command += [f"--{name}", str(fd)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._logs[index].open("wb") as log:
            return subprocess.Popen(
                command,
                pass_fds=list(given.values()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def _control(self, index: int, sock: socket.socket) -> Pump:
        link = unix_link(sock, LinkConfig(headers=Reports), peer=self.names[index])
        pump = Pump(
            link,
            lambda header, lengths: [],
            lambda header, _: self.events.put(Reported(index, header)),
            lambda error: self.events.put(Broken(index, error)),
            PumpConfig(capacity=64),
        )
        pump.start()
        return pump

    def _feeding(self, sock: socket.socket) -> Pump:
        def arrived(header: Any, _: Any) -> None:
            if isinstance(header, Backward):
                self.events.put(Acknowledged(header.microbatch))

        link = unix_link(sock, LinkConfig(headers=Data), peer=self.names[0])
        failed = lambda error: self.events.put(Broken(-1, error))  # noqa: E731
        pump = Pump(link, lambda header, lengths: [], arrived, failed, PumpConfig(capacity=64))
        pump.start()
        return pump

    def feed(self, header: Forward | Evaluate, freight: Freight, leaves: Sequence[Tensor]) -> None:
        """Send a microbatch to the root."""
        assert self._feed is not None
        with contextlib.suppress(LinkError):  # a broken link is an event of its own
            self._feed.put(header, [as_bytes(t) for t in freight.pack(leaves)], deadline_s=600.0)

    def tell(self, order: Any) -> None:
        """The same order to every worker."""
        for index in range(len(self._controls)):
            self.tell_one(index, order)

    def tell_one(self, index: int, order: Any) -> None:
        with contextlib.suppress(LinkError):  # a broken link is an event of its own
            self._controls[index].put(order, deadline_s=60.0)

    def next(self, timeout_s: float) -> Event:
        """The next event; `WorkerLost` if one says that a worker is gone."""
        try:
            event = self.events.get(timeout=timeout_s)
        except queue.Empty:
            raise RavnestError(f"nothing was heard from any worker for {timeout_s:g} s") from None
        match event:
            case Broken() | Reported(report=Failed(is_consequence=True)):
                raise self._lost()
            case Reported(worker=worker, report=Failed(reason=reason)):
                raise WorkerLost(f"{self._name(worker)} failed: {reason}. Its log: {self._logs[worker]}")
        return event

    def _lost(self) -> WorkerLost:
        """Who was first to go: of those that ended, one that a signal ended, else the first that failed."""
        ended = self._wait_for_the_ended()
        failed = sorted(ended, key=lambda i: (ended[i] > 0, ended[i] == 0, i))
        guilty = failed[0] if failed else 0
        code = ended.get(guilty)
        how = (
            "stopped answering"
            if code is None
            else f"was ended by signal {-code}"
            if code < 0
            else f"left with code {code}"
        )
        why = f": {self._last_words(guilty)}" if code is not None and code > 0 else ""
        return WorkerLost(f"{self._name(guilty)} {how}{why}. Its log: {self._logs[guilty]}")

    def _name(self, worker: int) -> str:
        return f"{self.names[worker]} (stage {worker})"

    def _wait_for_the_ended(self) -> dict[int, int]:
        """Exit codes of processes that ended; a broken link is often seen a moment before the end."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until and all(p.poll() is None for p in self._processes):
            time.sleep(0.01)
        return {i: code for i, p in enumerate(self._processes) if (code := p.poll()) is not None}

    def _last_words(self, index: int) -> str:
        lines = self._logs[index].read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else ""

    def end(self, *, patience_s: float) -> None:
        """Ask all to leave, kill whoever is still there, and close the links."""
        if patience_s:
            self.tell(Stop())
        for process in self._processes:
            try:
                process.wait(timeout=patience_s)
            except subprocess.TimeoutExpired:
                patience_s = 0.0
                process.kill()
                process.wait(timeout=10.0)
        for pump in (*self._controls, *([self._feed] if self._feed else [])):
            pump.close()
