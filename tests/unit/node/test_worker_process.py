"""Workers that are forked from a server: their exit codes, how they are killed, and what is left afterwards."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ravnest.node import worker_process
from ravnest.node.worker_process import SpawnWorker, fork_server

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks workers"),
]

TIMEOUT_S = 30.0


@pytest.fixture
def spawn() -> Iterator[SpawnWorker]:
    with fork_server() as spawn:
        yield spawn


@pytest.fixture
def control() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def server() -> psutil.Process:
    (found,) = (p for p in psutil.Process().children() if "ravnest.worker.fork_server" in p.cmdline())
    return found


def workers() -> list[psutil.Process]:
    children: list[psutil.Process] = server().children()
    return children


def test_a_worker_ends_with_its_agent(
    spawn: SpawnWorker, control: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    ours, theirs = control
    worker = spawn(theirs, tmp_path / "log")
    theirs.close()
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.0)
    ours.close()  # the agent is gone before it has sent its first message
    assert worker.wait(TIMEOUT_S) == 1
    assert worker.wait(0.0) == 1, "the code is kept"
    assert "the agent" in (tmp_path / "log").read_text()
    worker.kill()  # of a process that has ended: nothing happens


def test_a_worker_is_killed_and_others_go_on(
    spawn: SpawnWorker, control: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    killed, other = spawn(control[1], tmp_path / "a"), spawn(control[1], tmp_path / "b")
    killed.kill()
    assert killed.wait(TIMEOUT_S) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.2)
    other.kill()
    assert other.wait(TIMEOUT_S) == -signal.SIGKILL
    assert not workers()


def test_a_killed_server_takes_its_workers_along_and_another_is_started(
    spawn: SpawnWorker, control: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    first = spawn(control[1], tmp_path / "a")
    second = spawn(control[1], tmp_path / "b")
    second.kill()
    second.wait(TIMEOUT_S)  # so the first has been forked
    (left,) = workers()
    server().kill()
    assert first.wait(TIMEOUT_S) == -signal.SIGKILL
    assert not psutil.wait_procs([left], timeout=TIMEOUT_S)[1]
    third = spawn(control[1], tmp_path / "c")
    third.kill()
    assert third.wait(TIMEOUT_S) == -signal.SIGKILL


def test_the_server_is_shared_and_ends_when_nobody_uses_it(
    control: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_KEPT_S", 0.05)
    with fork_server() as spawn, fork_server() as same:
        for start in (spawn, same):
            worker = start(control[1], tmp_path / "log")
            worker.kill()
            worker.wait(TIMEOUT_S)
        running = server()
    running.wait(TIMEOUT_S)


def test_files_of_the_working_directory_replace_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`struct.py` next to a job broke its workers, and its code ran in them."""
    (tmp_path / "struct.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    ours, theirs = socket.socketpair()
    with theirs:
        worker = worker_process.spawn_worker(theirs, tmp_path / "log")
    ours.close()
    assert worker.wait(TIMEOUT_S) == 1
