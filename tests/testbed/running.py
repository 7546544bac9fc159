"""Start the programs of `programs` on hosts, and read what they print."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from ravnest.testbed import Process, Testbed

PROGRAMS = Path(__file__).parent / "programs.py"


def start(bed: Testbed, host: str, program: str, *args: object) -> Process:
    command = [sys.executable, "-I", "-S", str(PROGRAMS), program, *map(str, args)]
    return bed.hosts[host].run(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1)


def heard(process: Process, timeout_s: float = 20.0) -> Any:
    """The next thing that a program says."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert ready, f"{process.host} says nothing"
    line = process.stdout.readline()
    assert line, f"{process.host} ended with code {process.wait()}"
    return json.loads(line)


def server(bed: Testbed, host: str, program: str = "echo", *args: object) -> Process:
    """Start a program that serves and wait until it does."""
    started = start(bed, host, program, *args)
    assert heard(started) == "ready"
    return started


def asked(process: Process, patience_s: float) -> float | None:
    """How long an `ask` program waited for an answer; None: there was none."""
    assert process.stdin is not None
    process.stdin.write(f"{patience_s}\n")
    answer = heard(process)
    assert answer is None or isinstance(answer, float)
    return answer


def kill_all(bed: Testbed) -> None:
    """End what a test left running on a bed that it shares with other tests."""
    for host in bed.hosts.values():
        bed.kill(host.name)
        for process in host.processes:
            process.wait()
