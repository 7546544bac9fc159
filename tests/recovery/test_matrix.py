"""Everybody who could fail, in every way, at every moment, in real processes on the testbed: training goes on.

    who       the root, a middle stage, the leaf, the spare, the coordinator
    how       kill -9, SIGSTOP for 10 s, the link cut for 5 s, the link cut for good
    when      during a forward, an update, an averaging, a checkpoint

One training of two clusters of three PCs and a spare goes through many such cells: after each it is brought back to
full strength before the next. `make test` has a quarter of the matrix, `make test-soak` all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from benchmarks.recovery_fleet import HUB, PCS, Fleet, topology
from benchmarks.recovery_job import Task
from ravnest.coordinator.journalfile import replay
from ravnest.testbed import Testbed, missing
from ravnest.testbed.faultplan import Progress

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

IS_SOAK = bool(os.environ.get("RAVNEST_SOAK"))
WHO = ("root", "middle", "leaf", "spare", "coordinator")
HOW = ("kill", "stop 10 s", "cut 5 s", "cut for good")
WHEN = ("forward", "update", "averaging", "checkpoint")
PATIENCE_S = 120.0
# Three undisturbed seeds: 2.30, 2.31 and 2.38 after 400 steps, and 2.24 to 2.26 after 500; the mean of 30 each.
LEAST_STEPS, MOST_LOSS = 400, 2.5
MOST_GROWTH_BYTES = {"coordinator": 200_000_000, "agent": 40_000_000}


class Cell(NamedTuple):
    who: str
    how: str
    when: str


# The coordinator first, because a new one passes over the data so far. The quarter has everybody in every way.
QUICK = [Cell(who, how, WHEN[(i + j) % len(WHEN)]) for j, how in enumerate(HOW) for i, who in enumerate(reversed(WHO))]
ALL = [[Cell(who, how, when) for who, when in product(reversed(WHO), WHEN)] for how in HOW]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    lacking = missing()
    if lacking:
        pytest.skip(f"this machine cannot have a testbed, it lacks {'; '.join(lacking)}")
    with Testbed(topology()) as bed:
        made = Fleet(bed, tmp_path, Task(every_s=0.1), ["--average-every", "64", "--checkpoint-every", "20"])
        try:
            made.join(*PCS)
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("cells", ALL if IS_SOAK else [QUICK], ids=HOW if IS_SOAK else ["a quarter"])
def test_training_goes_on(fleet: Fleet, cells: list[Cell], tmp_path: Path) -> None:
    fleet.goes_on(20, PATIENCE_S)
    before = {pid: _memory_bytes(pid) for pid in _pids(fleet).values()}
    for number, cell in enumerate(cells):
        _befall(fleet, cell, number)
    after = {(name, pid): _memory_bytes(pid) for name, pid in _pids(fleet).items() if pid in before}
    fleet.wait_until(lambda: fleet.watch.look().steps >= LEAST_STEPS, PATIENCE_S, "the last step")
    assert fleet.finish(PATIENCE_S) == 0, fleet.said()[-4000:]

    assert fleet.problems == []
    counts = replay(fleet.keys / "journal")[0].leases.counts
    produced = int((tmp_path / "batches").read_text())
    assert (counts.settled, counts.outstanding, counts.is_balanced) == (produced, 0, True), counts
    losses = [line["loss"] for line in fleet.watch.lines if "step" in line]
    assert sum(losses[-30:]) / 30 < MOST_LOSS, losses[-30:]
    for (name, pid), num_bytes in after.items():
        most = MOST_GROWTH_BYTES["coordinator" if name == HUB else "agent"]
        assert num_bytes - before[pid] < most, f"{name} grew from {before[pid]} to {num_bytes}"
    assert fleet.leave() == []


def _befall(fleet: Fleet, cell: Cell, number: int) -> None:
    """Have it happen, and have all well again."""
    host = _host(fleet, cell.who, number)
    injector = fleet.strike(f"{_blow(cell, host)} {_moment(cell, host, fleet.watch.look())}")
    if cell.how == "kill" and cell.who == "coordinator":
        fleet.coordinator.wait(10)
        said = len(fleet.said())
        fleet.start_coordinator("--resume", str(fleet.run))
        fleet.wait_until(lambda: "the run goes on" in fleet.said()[said:], PATIENCE_S, "the run's going on")
        fleet.wait_until(lambda: "which goes on after" in fleet.said()[said:], PATIENCE_S, "a plan from copies")
    elif cell.how == "kill":
        fleet.agents[host].wait(10)
        fleet.join(host)
    fleet.wait_until(lambda: injector.is_over, 30.0, "the end of the fault", injector)
    steps = fleet.watch.look().steps
    fleet.wait_until(lambda: fleet.watch.look().steps >= steps + 10, PATIENCE_S, f"another step after {cell}")
    if cell.how == "cut for good" and cell.who != "coordinator":
        fleet.bed.restore(host)
    fleet.goes_on(10, PATIENCE_S)


def _blow(cell: Cell, host: str) -> str:
    match cell.how:
        case "kill":
            return f"kill {host}"
        case "stop 10 s":
            return f"stop {host} for 10 s"
        case "cut 5 s":
            return f"cut {host} for 5 s"
        case _:  # without a coordinator nothing can go on for good
            return f"cut {host} for {'20 s' if cell.who == 'coordinator' else 'good'}"


def _host(fleet: Fleet, who: str, number: int) -> str:
    clusters = fleet.clusters()
    stages = [stage.name for stage in clusters[number % len(clusters)].stages]
    match who:
        case "coordinator":
            return HUB
        case "spare":
            return fleet.free()[0]
        case _:
            return stages[("root", "middle", "leaf").index(who)]


def _moment(cell: Cell, host: str, now: Progress) -> str:
    """A little after now; a spare has no updates of its own, or no more."""
    if cell.who == "spare" and cell.when in ("forward", "update"):
        return f"at step {now.steps + 2}"
    microbatches, updates = (counts.get(host, max(counts.values())) for counts in (now.microbatches, now.updates))
    return {
        "forward": f"at microbatch {microbatches + 12}",
        "update": f"at update {updates + 2}",
        "averaging": f"during round {now.rounds + 1}",
        "checkpoint": f"at checkpoint {now.checkpoints + 1}",
    }[cell.when]


def _pids(fleet: Fleet) -> dict[str, int]:
    """Of the coordinator and of all agents."""
    found = {host: agent.pid for host, agent in fleet.agents.items() if agent.poll() is None}
    return {HUB: fleet.coordinator.pid, **found}


def _memory_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)
