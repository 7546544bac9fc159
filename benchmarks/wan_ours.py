"""Ours over home lines, as people use it: `ravnest train --listen` on one host, `ravnest join TICKET` on the others.

The rate is that of the run's own log, after the pipe has filled and before it drains.
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

from benchmarks.wan_task import MICROBATCHES, REQUESTER, Point, hosts
from ravnest.testbed import Process, Testbed

PORT = 7700
WARM_UP = 2  # updates that do not count
MEMORY = "1GB"
PATIENCE_S = 300.0
_TICKET = re.compile(r"rav1-\S+(?=\s)")  # whole, with what comes after it
_RAVNEST = (sys.executable, "-m", "ravnest")


@dataclass(frozen=True)
class Ours:
    """What a run of ours did: samples per second, and the idle part of each stage's time."""

    samples_per_s: float
    bubbles: tuple[float, ...]


def train(bed: Testbed, folder: Path, point: Point, stages: int, steps: int) -> Ours:
    """Have the requester's job trained by those who join; they stay until the bed ends."""
    run, job = folder / "run", folder / "job.py"
    job.write_text(f"from benchmarks.wan_task import make_job\n\njob = make_job({point.limit!r}, stages={stages})\n")
    command = [*_RAVNEST, "train", str(job), "--listen", f"0.0.0.0:{PORT}", "--min-nodes", str(stages), "--wait", "1s"]
    command += ["--min-stages", str(stages)]
    command += ["--steps", str(steps), "--folder", str(run), "--coordinator", str(folder / "coordinator")]
    training = _start(bed, REQUESTER, command, folder)
    ticket = _ticket(training, folder)
    for host in hosts(stages):
        _join(bed, host, MEMORY, ticket, folder)
    try:
        code = training.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end within {PATIENCE_S:g} s: {_said(folder, REQUESTER)[-1500:]}") from None
    if code != 0:
        raise RuntimeError(f"the requester left with code {code}: {_said(folder, REQUESTER)[-1500:]}")
    return account(point, stages, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])


def account(point: Point, stages: int, lines: Sequence[dict[str, Any]]) -> Ours:
    """Between the warm-up and the last window but one (then the pipe drains)."""
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
    return Ours(samples / (last["seconds"] - first["seconds"]), tuple(bubbles))


def _join(bed: Testbed, host: str, memory: str, ticket: str, folder: Path) -> None:
    options = ["--name", host, "--memory", memory, "--threads", "1", "--data-dir", str(folder / f"{host}-data")]
    _start(bed, host, [*_RAVNEST, "join", ticket, *options], folder)


def _start(bed: Testbed, host: str, command: Sequence[str], folder: Path) -> Process:
    with _log(folder, host).open("w") as log:
        return bed.hosts[host].run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _ticket(training: Process, folder: Path) -> str:
    """The word that the requester prints for others to join with."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and training.poll() is None:
        if found := _TICKET.search(_said(folder, REQUESTER)):
            return found[0]
        time.sleep(0.1)
    raise RuntimeError(f"the requester printed no ticket (code {training.poll()}): {_said(folder, REQUESTER)[-1500:]}")


def _said(folder: Path, host: str) -> str:
    return _log(folder, host).read_text()


def _log(folder: Path, host: str) -> Path:
    return folder / f"{host}.log"
