"""Workers of a local run are killed in every phase of training; the run repairs itself and accounts for every batch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from ravnest.coordinator.journal import replay
from ravnest.run.checkpoint.format import checkpoints_in
from testbed.fault_plan import Progress, Trigger
from testbed.run_monitor import RunFolderMonitor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOB = """
import ravnest
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text

config = GPTConfig(vocab=256, context=16, layers=2, width=32, heads=2, dropout=0.1, tied=True)
job = ravnest.Job(lambda: GPT(config), next_token_loss, batches(library_text(100_000), 12, 16, 0),
                  optimizer=ravnest.AdamW(3e-3))
"""
PHASES = ("forward", "update", "averaging", "checkpoint")
TIMEOUT_S = 120.0
STEPS_AFTER = 10


class LocalRun:
    """`ravnest train --local` in a process of its own, with the process ids of its nodes' workers."""

    def __init__(self, directory: Path, nodes: int, *options: str) -> None:
        (directory / "job.py").write_text(JOB)
        self.folder = directory / "run"
        command = [
            sys.executable,
            "-m",
            "ravnest",
            "train",
            "job.py",
            "--local",
            str(nodes),
            "--run-dir",
            "run",
            "--steps",
            "1000000",
            *options,
        ]
        self._log = directory / "output.txt"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, cwd=directory)
        self._monitor = RunFolderMonitor(self.folder)
        self.wait_until(lambda: self._has_trained(nodes), "training of all nodes")
        workers = sorted(self._workers(), key=lambda process: process.create_time())
        self._worker_of = dict(enumerate(workers))

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def progress(self) -> Progress:
        return self._monitor.poll()

    def wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not predicate():
            assert self._process.poll() is None, self.output[-4000:]
            assert time.monotonic() < deadline, f"{what} did not happen\n{self.output[-4000:]}"
            time.sleep(0.01)  # the files of another process give no events

    def _has_trained(self, nodes: int) -> bool:
        updates = self.progress().updates
        return all(updates.get(f"node-{i}", 0) > 1 for i in range(nodes))

    def kill_worker(self, node: int) -> None:
        """Kill the worker of a node, and wait until another has replaced it."""
        others = set(self._workers())
        os.kill(self._worker_of[node].pid, signal.SIGKILL)
        self.wait_until(lambda: bool(set(self._workers()) - others), f"another worker of node-{node}")
        (self._worker_of[node],) = set(self._workers()) - others

    def finish(self) -> None:
        self._process.send_signal(signal.SIGINT)
        assert self._process.wait(TIMEOUT_S) == 0, self.output[-4000:]

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _workers(self) -> list[psutil.Process]:
        (server,) = psutil.Process(self._process.pid).children()
        return [child for child in server.children() if child.status() != psutil.STATUS_ZOMBIE]


def trigger(phase: str, node: int, now: Progress) -> Trigger:
    """A moment of that phase, shortly after the present progress."""
    name = f"node-{node}"
    match phase:
        case "forward":
            return Trigger(counter="microbatch", number=now.microbatches[name] + 4)
        case "update":
            return Trigger(counter="update", number=now.updates[name] + 2)
        case "averaging":
            return Trigger(counter="round", number=now.rounds + 1)
        case _:
            return Trigger(counter="checkpoint", number=now.checkpoints + 1)


def kill_in_phase(run: LocalRun, phase: str, node: int) -> None:
    moment = trigger(phase, node, run.progress())
    run.wait_until(lambda: moment.is_reached(run.progress(), f"node-{node}"), f"{phase} of node-{node}")
    run.kill_worker(node)
    steps = run.progress().updates[f"node-{node}"]
    run.wait_until(lambda: run.progress().updates[f"node-{node}"] >= steps + STEPS_AFTER, f"training after a {phase}")


def check_end(run: LocalRun, num_kills: int) -> None:
    """The run saved its model, and every leased batch was settled exactly once."""
    run.finish()
    assert len(re.findall("killed by signal 9; starting another", run.output)) == num_kills
    state, problems = replay(run.folder / "coordinator" / "journal")
    counts = state.leases.counts
    assert problems == []
    assert (counts.outstanding, counts.repeated, counts.is_balanced) == (0, 0, True), counts
    assert counts.settled == state.leases.next_new - len(state.leases.unsettled)
    assert load_file(run.folder / "model.safetensors")


@pytest.mark.soak
def test_a_single_cluster_continues_after_a_kill(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, 3)
    try:
        kill_in_phase(run, "forward", 0)
        check_end(run, 1)
    finally:
        run.close()


@pytest.mark.parametrize("first", [0, *(pytest.param(i, marks=pytest.mark.soak) for i in (1, 2, 3))])
def test_two_clusters_continue_after_a_kill_in_each_phase(first: int, tmp_path: Path) -> None:
    """Another node is killed in each phase; from every `first`, each node is killed in each phase."""
    run = LocalRun(tmp_path, 4, "--clusters", "2", "--average-every", "36", "--checkpoint-every", "20")
    try:
        for i, phase in enumerate(PHASES):
            kill_in_phase(run, phase, (first + i) % 4)
        check_end(run, len(PHASES))
        *steps, end = [checkpoint.step for checkpoint in checkpoints_in(run.folder)]
        assert steps, "checkpoints besides that of the end"
        assert [step for step in steps if step % 20] == []
        assert end == replay(run.folder / "coordinator" / "journal")[0].leases.settled_below
    finally:
        run.close()
