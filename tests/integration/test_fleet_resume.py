"""Everybody is killed at once, and others go on with the run: as a user does it, with real processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ravnest.coordinator.journal import replay
from ravnest.run.checkpoint.format import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PATIENCE_S = 120.0
MANY_STEPS, FURTHER_STEPS = 1_000_000, 30
JOB = """
import time

import ravnest
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text


class Slowly:
    def __iter__(self):
        for batch in batches(library_text(), 8, 32, seed=0):
            time.sleep(0.04)
            yield batch


config = GPTConfig(vocab=256, context=32, layers=2, width=32, heads=2, dropout=0.0)
job = ravnest.Job(lambda: GPT(config), next_token_loss, Slowly(), optimizer=ravnest.AdamW(3e-3))
"""


class Scene:
    """A requester's machine and the PCs of friends, all on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.ticket = ""
        (folder / "job.py").write_text(JOB)

    def train(self, log: str, steps: int, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ravnest", "train", str(self.folder / "job.py"), "--listen", "127.0.0.1:0"]
        command += [
            "--steps",
            str(steps),
            "--settle-time",
            "1s",
            "--checkpoint-every",
            "20",
            "--coordinator-dir",
            "keys",
        ]
        with (self.folder / log).open("wb") as file:
            train = subprocess.Popen([*command, *options], stdout=file, stderr=file, cwd=self.folder)
        self.until(lambda: "rav1-" in self.read(log), log)
        found = re.search(r"rav1-[A-Za-z0-9_-]+", self.read(log))
        assert found is not None
        self.ticket = found[0]
        return train

    def join(self, *names: str) -> None:
        for name in names:
            command = [sys.executable, "-m", "ravnest", "join", self.ticket, "--name", name, "--threads", "1"]
            command += ["--memory", "600MB", "--data-dir", str(self.folder / "nodes")]
            with (self.folder / f"{name}.log").open("wb") as log:
                self.agents[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """As the power does."""
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        for one in family:
            one.kill()
        process.wait(10)

    def steps(self) -> list[int]:
        try:
            lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line["step"] for line in map(json.loads, lines) if "step" in line]

    def read(self, log: str) -> str:
        return (self.folder / log).read_text(errors="replace")

    def until(self, is_so: Callable[[], bool], log: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, self.read(log)
            time.sleep(0.05)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for agent in made.agents.values():
        agent.send_signal(signal.SIGINT)
    for name, agent in made.agents.items():
        assert agent.wait(30) == 0, made.read(f"{name}.log")
    mine = psutil.Process().children(recursive=True)
    assert [p.cmdline() for p in mine if "ravnest" in " ".join(p.cmdline())] == []


def test_a_run_outlives_its_coordinator_and_all_of_its_nodes(scene: Scene) -> None:
    """`tests/soak` shows that a run outlives its coordinator alone."""
    first = scene.train("first.log", MANY_STEPS, "--run-dir", "run")
    scene.join("anna", "bela")
    scene.until(lambda: bool(checkpoints_in(scene.folder / "run")), "first.log")
    scene.kill(first)
    for name in ("anna", "bela"):
        scene.kill(scene.agents.pop(name))
    state, problems = replay(scene.folder / "keys" / "journal")
    assert problems == []
    assert state.leases.counts.is_balanced

    steps = state.leases.next_new + FURTHER_STEPS
    second = scene.train("second.log", steps, "--resume", "run", "--min-nodes", "2")
    scene.join("carl", "dora")
    assert second.wait(PATIENCE_S) == 0, scene.read("second.log")
    assert "run resumed" in scene.read("second.log")
    assert "no complete replica" in scene.read("second.log")
    losses = [line["loss"] for line in map(json.loads, (scene.folder / "run/metrics.jsonl").read_text().splitlines())]
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 1.0
    state, _ = replay(scene.folder / "keys" / "journal")
    assert state.leases.counts.is_balanced
    assert state.leases.settled_below == steps
    assert (scene.folder / "run" / "model.safetensors").exists()
