"""Starts the programs of `programs` on hosts and reads their output."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from testbed import Process, Testbed

PROGRAMS = Path(__file__).parent / "programs.py"


def start(testbed: Testbed, host: str, program: str, *args: object) -> Process:
    command = [sys.executable, "-I", "-S", str(PROGRAMS), program, *map(str, args)]
    return testbed.hosts[host].run(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1)


def receive(process: Process, timeout_s: float = 20.0) -> Any:
    """The next message of a program."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert ready, f"{process.host} printed nothing within {timeout_s:g} s"
    line = process.stdout.readline()
    assert line, f"{process.host} ended with code {process.wait()}"
    return json.loads(line)


def server(testbed: Testbed, host: str, program: str = "echo", *args: object) -> Process:
    """Start a program and wait until it is ready."""
    started = start(testbed, host, program, *args)
    assert receive(started) == "ready"
    return started


def ask(process: Process, timeout_s: float) -> float | None:
    """Seconds that an `ask` program waited for an answer; None if it timed out."""
    assert process.stdin is not None
    process.stdin.write(f"{timeout_s}\n")
    answer = receive(process)
    assert answer is None or isinstance(answer, float)
    return answer


def kill_all(testbed: Testbed) -> None:
    """Kill what a test left running on a testbed that it shares with other tests."""
    for host in testbed.hosts.values():
        testbed.kill(host.name)
        for process in host.processes:
            process.wait()
