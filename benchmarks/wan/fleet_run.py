"""Trains by Ravnest over home lines: `ravnest train --listen` on one host, `ravnest join TICKET` on the others.

The rate is that of the run's own log, after the pipeline has filled and before it drains.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.wan.task import MICROBATCHES, REQUESTER, Point, hosts
from testbed import Process, Testbed

PORT = 7700
WARM_UP = 2  # updates that do not count
MEMORY = "1GB"
TIMEOUT_S = 300.0
_TICKET = re.compile(r"rav1-\S+(?=\s)")  # complete only with the white space after it
_RAVNEST = (sys.executable, "-m", "ravnest")


@dataclass(frozen=True)
class RunResult:
    """Samples per second of a run, and the idle share of each stage."""

    samples_per_s: float
    bubbles: tuple[float, ...]


def train(testbed: Testbed, folder: Path, point: Point, stages: int, steps: int) -> RunResult:
    """Train the job with all hosts; their agents run until the testbed ends."""
    run, job = folder / "run", folder / "job.py"
    job.write_text(f"from benchmarks.wan.task import make_job\n\njob = make_job({point.limit!r}, stages={stages})\n")
    command = [*_RAVNEST, "train", str(job), "--listen", f"0.0.0.0:{PORT}", "--min-nodes", str(stages), "--wait", "1s"]
    command += ["--min-stages", str(stages)]
    command += ["--steps", str(steps), "--folder", str(run), "--coordinator", str(folder / "coordinator")]
    training = _start(testbed, REQUESTER, command, folder)
    ticket = _ticket(training, folder)
    for host in hosts(stages):
        _join(testbed, host, MEMORY, ticket, folder)
    try:
        code = training.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"the run did not end within {TIMEOUT_S:g} s: {_log_text(folder, REQUESTER)[-1500:]}"
        ) from None
    if code != 0:
        raise RuntimeError(f"the requester exited with code {code}: {_log_text(folder, REQUESTER)[-1500:]}")
    return summarize(point, stages, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])


def summarize(point: Point, stages: int, lines: Sequence[dict[str, Any]]) -> RunResult:
    """Measure between the warm-up and the last step but one (then the pipeline drains)."""
    updates = [line for line in lines if "stages" in line]
    first, last = updates[WARM_UP - 1], updates[-2]
    samples = (last["step"] - first["step"]) * MICROBATCHES * point.sequences
    early, late = ({m["stage"]: m for m in line["stages"]} for line in (first, last))
    if len(late) != stages:
        raise RuntimeError(f"the model was trained in {len(late)} stages, not {stages}")
    bubbles = []
    for stage, now in sorted(late.items()):
        busy_s, idle_s = (now[name] - early[stage][name] for name in ("steady_busy_s", "idle_s"))
        bubbles.append(idle_s / (busy_s + idle_s))
    return RunResult(samples / (last["seconds"] - first["seconds"]), tuple(bubbles))


def _join(testbed: Testbed, host: str, memory: str, ticket: str, folder: Path) -> None:
    options = ["--name", host, "--memory", memory, "--threads", "1", "--data-dir", str(folder / f"{host}-data")]
    _start(testbed, host, [*_RAVNEST, "join", ticket, *options], folder)


def _start(testbed: Testbed, host: str, command: Sequence[str], folder: Path) -> Process:
    with _log_path(folder, host).open("w") as log:
        return testbed.hosts[host].run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _ticket(training: Process, folder: Path) -> str:
    """The ticket that the requester prints."""
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s and training.poll() is None:
        if found := _TICKET.search(_log_text(folder, REQUESTER)):
            return found[0]
        time.sleep(0.1)
    raise RuntimeError(
        f"the requester printed no ticket (code {training.poll()}): {_log_text(folder, REQUESTER)[-1500:]}"
    )


def _log_text(folder: Path, host: str) -> str:
    return _log_path(folder, host).read_text()


def _log_path(folder: Path, host: str) -> Path:
    return folder / f"{host}.log"
