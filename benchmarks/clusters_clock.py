"""One, two and four clusters of two PCs for as many seconds: who has learned the most?

Every PC of the testbed has a fifth of a core and a line of 50 Mbit/s; any two are 20 ms apart, one way. They join a
`ravnest train --listen` by its ticket, form clusters as the planner sees fit, train and average. When so many seconds
have passed since the first update could begin, Ctrl-C ends the run: the clusters average for the last time, and the
run's own evaluation gives the held-out loss of its model, which is that average.
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

from benchmarks.clusters_job import BATCH
from ravnest.testbed import HostSpec, Line, Process, Testbed, Topology

__all__ = ["Clocked", "train"]

PORT = 7700
REQUESTER = "requester"
CPU = 0.2  # cores of each PC: eight of them leave a fifth of two cores for wires and requester
RATE_BYTES_PER_S = 6.25e6  # 50 Mbit/s, up and down
DELAY_S = 0.01  # to the middle
MEMORY = "1GB"
PATIENCE_S = 300.0
MOST_APART = 0.01  # losses of clusters that have just averaged
AFTER_S = 60.0  # for the last round, the evaluation and the weights
_RAVNEST = (sys.executable, "-m", "ravnest")
_TICKET = re.compile(r"rav1-\S+(?=\s)")
_ROUND = re.compile(r"round \d+ is averaged, in (\S+) s")


@dataclass(frozen=True)
class Clocked:
    """What a run did: the held-out loss of its model, updates by cluster, and losses as (second, loss)."""

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
    """Two PCs for each cluster, and the requester in their middle, without limits."""
    line = Line(up_bytes_per_s=RATE_BYTES_PER_S, down_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S)
    pcs = (HostSpec(name=name, line=line, cpu=CPU) for name in _names(num_clusters))
    return Topology(hosts=(HostSpec(name=REQUESTER), *pcs))


def train(folder: Path, num_clusters: int, seconds: float, options: Sequence[str] = ()) -> Clocked:
    """Have the job trained for so long by so many clusters; `options` are those of `ravnest train`."""
    with Testbed(topology(num_clusters)) as bed:
        job, names = Path(__file__).with_name("clusters_job.py"), _names(num_clusters)
        command = ["train", str(job), "--listen", f"0.0.0.0:{PORT}", "--min-nodes", str(len(names)), "--wait", "1s"]
        command += ["--folder", str(folder / "run"), "--coordinator", str(folder / "coordinator"), *options]
        training = _start(bed, REQUESTER, command, folder)
        _wait_for(lambda: _TICKET.search(_said(folder)) is not None, training, folder)
        found = _TICKET.search(_said(folder))
        assert found is not None
        for name in names:
            lent = ["--name", name, "--memory", MEMORY, "--threads", "1", "--data-dir", str(folder / f"{name}-data")]
            _start(bed, name, ["join", found[0], *lent], folder)
        _wait_for(lambda: len(_trained(folder)) == num_clusters, training, folder)
        _wait_for(lambda: max(line["seconds"] for line in _lines(folder)) >= seconds, training, folder)
        training.send_signal(signal.SIGINT)
        if training.wait(AFTER_S) != 0:
            raise RuntimeError(f"the requester left with code {training.returncode}: {_said(folder)[-1500:]}")
    return account(_lines(folder), _said(folder))


def account(lines: Sequence[dict[str, Any]], said: str) -> Clocked:
    """From the log of a run and what it said."""
    steps = [line for line in lines if "step" in line]
    ends = {line["cluster"]: line["loss"] for line in lines if "evaluation" in line}
    clusters = sorted(ends)
    updates = tuple(sum(line["cluster"] == cluster for line in steps) for cluster in clusters)
    if max(ends.values()) - min(ends.values()) > MOST_APART:
        raise RuntimeError(f"the clusters did not end with one model: {ends}")
    return Clocked(
        clusters=len(clusters),
        loss=min(ends.values()),  # the run keeps the best, if a last round came to nothing
        updates=updates,
        seconds=steps[-1]["seconds"],
        round_s=tuple(float(text) for text in _ROUND.findall(said)),
        curve=tuple((line["seconds"], line["loss"]) for line in steps),
    )


def _names(num_clusters: int) -> tuple[str, ...]:
    return tuple(f"pc-{i}" for i in range(2 * num_clusters))


def _trained(folder: Path) -> set[str]:
    """Clusters that have made an update."""
    return {line["cluster"] for line in _lines(folder) if "step" in line}


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _said(folder: Path) -> str:
    return (folder / f"{REQUESTER}.log").read_text()


def _start(bed: Testbed, host: str, command: Sequence[str], folder: Path) -> Process:
    with (folder / f"{host}.log").open("w") as log:
        return bed.hosts[host].run([*_RAVNEST, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _wait_for(is_so: Callable[[], bool], training: Process, folder: Path) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if training.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"it did not come to that (code {training.poll()}): {_said(folder)[-1500:]}")
        time.sleep(0.2)
