"""Starts worker processes: each by itself, or forked from a server that this process keeps for local runs.

The fork server (`ravnest.worker.fork_server`) starts a worker in milliseconds, instead of the 1.6 s of processor time
that it takes to import torch. It needs Linux. Elsewhere, and in fleets, where an agent has one worker, each worker is
a Python process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

__all__ = ["SpawnWorker", "fork_server", "spawn_worker"]


class StartedProcess(Protocol):
    """A worker process that this one started."""

    def wait(self, timeout: float) -> int:
        """Return its exit code, negative for a signal; raises `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """Kill it; does nothing if it has ended."""


SpawnWorker = Callable[[socket.socket, Path], StartedProcess]


def spawn_worker(control: socket.socket, log: Path) -> StartedProcess:
    """Start a worker with this control link; its output is appended to `log`."""
    with log.open("ab") as output:
        return _start("ravnest.worker.process", control, output.fileno())


def _start(module: str, control: socket.socket, output: int) -> subprocess.Popen[bytes]:
    """Start a module; with -P, files in the working directory cannot replace the modules that it imports."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, "--control", str(control.fileno())],
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for the agent alone
    )


@contextlib.contextmanager
def fork_server() -> Iterator[SpawnWorker]:
    """Use this process's fork server while the block runs; it stays a few seconds longer, for the next local run."""
    if sys.platform != "linux":
        yield spawn_worker
        return
    _server.acquire()
    try:
        yield _server.spawn
    finally:
        _server.release()


_KEPT_S = 10.0


class _ForkServerProcess:
    """The fork server of this process: started with the first worker, ended some seconds after its last user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._users = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closing: threading.Timer | None = None

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._closing is not None:
                self._closing.cancel()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._closing = threading.Timer(_KEPT_S, self.close_unused)
                self._closing.daemon = True
                self._closing.start()

    def spawn(self, control: socket.socket, log: Path) -> StartedProcess:
        """Request a worker; it may start after this returns."""
        ours, theirs = socket.socketpair()
        with log.open("ab") as output, theirs, self._lock:
            descriptors = [control.fileno(), output.fileno(), theirs.fileno()]
            try:
                socket.send_fds(self._open(output.fileno()), [b"w"], descriptors)
            except OSError:  # the server was killed
                self._close()
                socket.send_fds(self._open(output.fileno()), [b"w"], descriptors)
        return _ForkedWorker(ours)

    def _open(self, output: int) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = _start("ravnest.worker.fork_server", theirs, output)
        return self._control

    def close_unused(self) -> None:
        """End the server unless a run uses it."""
        with self._lock:
            if self._users == 0:
                self._close()

    def _close(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:  # it is still importing torch
                self._process.kill()
                self._process.wait()
        self._control = self._process = None


_server = _ForkServerProcess()
atexit.register(_server.close_unused)


class _ForkedWorker:
    """A worker of the fork server; `status` receives its exit code, and kills it when shut down."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self._lock = threading.Lock()  # guards the code
        self._code: int | None = None

    def wait(self, timeout: float) -> int:
        with self._lock:
            if self._code is None:
                if not select.select([self._status], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a worker", timeout)
                received = self._status.recv(4)
                self._status.close()
                self._code = struct.unpack("!i", received)[0] if len(received) == 4 else -signal.SIGKILL
            return self._code

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._status.shutdown(socket.SHUT_WR)
