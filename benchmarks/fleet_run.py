"""Trains on a testbed as users do: `ravnest train --listen` on one host, `ravnest join TICKET` on the others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed import Process, Testbed

__all__ = ["read_metrics", "train"]

_PORT = 7700
_TICKET_S = 300.0
_TICKET = re.compile(r"rav1-\S+(?=\s)")  # complete only with the white space after it
_RAVNEST = (sys.executable, "-m", "ravnest")


def train(
    testbed: Testbed,
    folder: Path,
    job: str,
    requester: str,
    hosts: Sequence[str],
    *,
    memory: str,
    options: Sequence[str] = (),
    timeout_s: float = 300.0,
) -> Path:
    """Train a job file of this text in one cluster of all hosts; return the run's directory.

    The agents run until the testbed ends. Raises `RuntimeError` with the end of the requester's log if the run fails.
    """
    run = folder / "run"
    (folder / "job.py").write_text(job)
    count = str(len(hosts))
    command = [*_RAVNEST, "train", str(folder / "job.py"), "--listen", f"0.0.0.0:{_PORT}", "--min-nodes", count,
               "--wait", "1s", "--min-stages", count, "--folder", str(run), "--coordinator",
               str(folder / "coordinator"), *options]  # fmt: skip
    training = _start(testbed, requester, command, folder)
    ticket = _ticket(training, folder / f"{requester}.log")
    for host in hosts:
        limits = ["--memory", memory, "--threads", "1", "--data-dir", str(folder / f"{host}-data")]
        _start(testbed, host, [*_RAVNEST, "join", ticket, "--name", host, *limits], folder)
    try:
        code: int | None = training.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    if code != 0:
        end = f"did not end within {timeout_s:g} s" if code is None else f"exited with code {code}"
        raise RuntimeError(f"the requester {end}: {(folder / f'{requester}.log').read_text()[-1500:]}")
    return run


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics that describe a step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "stages" in line]


def _start(testbed: Testbed, host: str, command: Sequence[str], folder: Path) -> Process:
    with (folder / f"{host}.log").open("w") as log:
        return testbed.hosts[host].run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _ticket(training: Process, log: Path) -> str:
    """The ticket that the requester prints."""
    end_s = time.monotonic() + _TICKET_S
    while time.monotonic() < end_s and training.poll() is None:
        if found := _TICKET.search(log.read_text()):
            return found[0]
        time.sleep(0.1)
    raise RuntimeError(f"the requester printed no ticket (code {training.poll()}): {log.read_text()[-1500:]}")
