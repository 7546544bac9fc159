"""Compares the held-out loss of one, two and four clusters of two PCs after the same number of seconds.

Every PC of the testbed has a fifth of a core and a line of 50 Mbit/s; any two are 20 ms apart, one way. They join a
`ravnest train --listen` by its ticket, form the clusters that the planner chooses, train and average. After the given
seconds of training, Ctrl-C ends the run: the clusters average for the last time, and the run's own evaluation gives the
held-out loss of its model, which is that average.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clusters.job import BATCH
from testbed import HostSpec, Line, Process, Testbed, Topology

__all__ = ["WallClockResult", "train"]

PORT = 7700
REQUESTER = "requester"
CPU = 0.2  # cores of each PC: eight PCs leave a fifth of two cores for the forwarder and the requester
RATE_BYTES_PER_S = 6.25e6  # 50 Mbit/s, up and down
DELAY_S = 0.01  # to the middle
MEMORY = "1GB"
TIMEOUT_S = 300.0
MAX_DIFFERENCE = 0.01  # between losses of clusters that have just averaged
FINISH_S = 60.0  # for the last round, the evaluation and the weights
_RAVNEST = (sys.executable, "-m", "ravnest")
_TICKET = re.compile(r"rav1-\S+(?=\s)")
_ROUND = re.compile(r"round \d+ committed in (\S+) s")


@dataclass(frozen=True)
class WallClockResult:
    """The held-out loss of a run's model, the updates of each cluster, and training losses as (second, loss)."""

    clusters: int
    loss: float
    updates: tuple[int, ...]
    seconds: float
    round_s: tuple[float, ...]
    curve: tuple[tuple[float, float], ...] = field(repr=False)

    @property
    def samples_per_s(self) -> float:
        return sum(self.updates) * BATCH / self.seconds


def topology(num_clusters: int) -> Topology:
    """Two PCs for each cluster, and the requester without limits."""
    line = Line(up_bytes_per_s=RATE_BYTES_PER_S, down_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S)
    pcs = (HostSpec(name=name, line=line, cpu=CPU) for name in _names(num_clusters))
    return Topology(hosts=(HostSpec(name=REQUESTER), *pcs))


def train(folder: Path, num_clusters: int, seconds: float, options: Sequence[str] = ()) -> WallClockResult:
    """Train the job with `num_clusters` clusters for `seconds`; `options` are those of `ravnest train`."""
    with Testbed(topology(num_clusters)) as testbed:
        job, names = Path(__file__).with_name("job.py"), _names(num_clusters)
        command = ["train", str(job), "--listen", f"0.0.0.0:{PORT}", "--min-nodes", str(len(names)), "--wait", "1s"]
        command += ["--folder", str(folder / "run"), "--coordinator", str(folder / "coordinator"), *options]
        training = _start(testbed, REQUESTER, command, folder)
        _wait_for(lambda: _TICKET.search(_log_text(folder)) is not None, training, folder)
        ticket = _TICKET.search(_log_text(folder))
        assert ticket is not None
        for name in names:
            limits = ["--name", name, "--memory", MEMORY, "--threads", "1", "--data-dir", str(folder / f"{name}-data")]
            _start(testbed, name, ["join", ticket[0], *limits], folder)
        _wait_for(lambda: len(_trained(folder)) == num_clusters, training, folder)
        _wait_for(lambda: max(line["seconds"] for line in _lines(folder)) >= seconds, training, folder)
        training.send_signal(signal.SIGINT)
        if training.wait(FINISH_S) != 0:
            raise RuntimeError(f"the requester exited with code {training.returncode}: {_log_text(folder)[-1500:]}")
    return summarize(_lines(folder), _log_text(folder))


def summarize(lines: Sequence[dict[str, Any]], log: str) -> WallClockResult:
    """The result of a run, from its metrics and its log."""
    steps = [line for line in lines if "step" in line]
    ends = {line["cluster"]: line["loss"] for line in lines if "evaluation" in line}
    clusters = sorted(ends)
    updates = tuple(sum(line["cluster"] == cluster for line in steps) for cluster in clusters)
    if max(ends.values()) - min(ends.values()) > MAX_DIFFERENCE:
        raise RuntimeError(f"the clusters ended with different models: {ends}")
    return WallClockResult(
        clusters=len(clusters),
        loss=min(ends.values()),  # the run keeps the best model if its last round failed
        updates=updates,
        seconds=steps[-1]["seconds"],
        round_s=tuple(float(text) for text in _ROUND.findall(log)),
        curve=tuple((line["seconds"], line["loss"]) for line in steps),
    )


def _names(num_clusters: int) -> tuple[str, ...]:
    return tuple(f"pc-{i}" for i in range(2 * num_clusters))


def _trained(folder: Path) -> set[str]:
    """The clusters that have made an update."""
    return {line["cluster"] for line in _lines(folder) if "step" in line}


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _log_text(folder: Path) -> str:
    return (folder / f"{REQUESTER}.log").read_text()


def _start(testbed: Testbed, host: str, command: Sequence[str], folder: Path) -> Process:
    with (folder / f"{host}.log").open("w") as log:
        return testbed.hosts[host].run([*_RAVNEST, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _wait_for(predicate: Callable[[], bool], training: Process, folder: Path) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not predicate():
        if training.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(
                f"not reached within {TIMEOUT_S:g} s (exit code {training.poll()}): {_log_text(folder)[-1500:]}"
            )
        time.sleep(0.2)
