"""A whole run on PCs that join: real agents and workers over loopback, two clusters that average, and one that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import ravnest
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.progress import Progress, Show

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CONFIG = GPTConfig(vocab=256, context=32, layers=2, width=64, heads=2, dropout=0.0)


class Friends(Show):
    """Those who join when they are invited, two by two, and what they do when."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.ticket = ""
        self.steps = 0
        self._plans: list[tuple[int, Callable[[], None]]] = []

    def at_step(self, step: int, do: Callable[[], None]) -> None:
        self._plans.append((step, do))

    def invited(self, ticket: str) -> None:
        self.ticket = ticket
        self.join("anna", "bela")

    def join(self, *names: str) -> None:
        for name in names:
            command = [sys.executable, "-m", "ravnest", "join", self.ticket, "--name", name, "--threads", "1"]
            with (self.folder / f"{name}.log").open("wb") as log:
                self.agents[name] = subprocess.Popen(
                    [*command, "--memory", "600MB", "--data-dir", str(self.folder / name)], stdout=log, stderr=log
                )

    def told(self, sentence: str) -> None:
        self.said.append(sentence)

    def update(self, progress: Progress) -> None:
        self.steps = progress.step
        for plan in [plan for plan in self._plans if plan[0] <= progress.step]:
            self._plans.remove(plan)
            plan[1]()

    def worker_of(self, name: str) -> psutil.Process:
        children = psutil.Process(self.agents[name].pid).children()
        return next(child for child in children if "ravnest.node.station" in child.cmdline())

    def heard(self, words: str) -> bool:
        return any(words in sentence for sentence in self.said)


@pytest.fixture
def friends(tmp_path: Path) -> Iterator[Friends]:
    made = Friends(tmp_path)
    yield made
    workers = [worker for name in made.agents for worker in psutil.Process(made.agents[name].pid).children()]
    for agent in made.agents.values():
        agent.send_signal(signal.SIGINT)
    for name, agent in made.agents.items():
        assert agent.wait(20) == 0, (made.folder / f"{name}.log").read_text()
    assert psutil.wait_procs(workers, timeout=5)[1] == []


def job(**how: object) -> ravnest.Job:
    text = library_text()
    data, held_out = batches(text, 16, 32, seed=0), [next(batches(text, 64, 32, seed=1))]
    training = ravnest.Training(on="127.0.0.1:0", wait_s=1.0, average_every=64, **how)  # type: ignore[arg-type]
    return ravnest.Job(
        lambda: GPT(CONFIG), next_token_loss, data, optimizer=ravnest.AdamW(3e-3), validation=held_out,
        training=training,
    )  # fmt: skip


def test_two_clusters_average_and_survive_the_death_of_a_worker(friends: Friends, tmp_path: Path) -> None:
    """The second cluster comes later and is a ghost at first; then a worker of the first is killed."""
    stop = threading.Event()

    def kill() -> None:
        if not friends.heard("round 3 is averaged"):
            friends.at_step(friends.steps + 1, kill)
            return
        friends.worker_of("anna").kill()
        friends.at_step(friends.steps + 30, interrupt)

    def interrupt() -> None:
        stop.set()
        os.kill(os.getpid(), signal.SIGINT)

    friends.at_step(10, lambda: friends.join("carl", "dora"))
    friends.at_step(11, kill)
    run = job(folder=tmp_path / "run", coordinator=tmp_path / "keys").train(show=friends)

    assert stop.is_set()
    assert friends.heard("cluster c1 is lost")
    assert friends.heard("anna")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    late = [line["loss"] for line in lines if line.get("cluster", "").startswith("c2") and "step" in line]
    assert late[0] > 5.0  # it began from the first weights
    assert min(late[8:14]) < 4.0  # and got the others' with the first average
    assert sum(run.losses[-5:]) / 5 < 3.3
    model = GPT(CONFIG)
    model.load_state_dict(run.state_dict())
    with torch.no_grad():
        inputs, targets = next(batches(library_text(), 64, 32, seed=1))
        loss = float(next_token_loss(model(inputs), targets))
    assert loss == pytest.approx(run.evaluations[-1]["loss"], abs=1e-3)


def test_all_clusters_end_with_the_same_model(friends: Friends, tmp_path: Path) -> None:
    friends.at_step(5, lambda: friends.join("carl", "dora"))
    began = time.monotonic()

    def interrupt() -> None:
        if not friends.heard("round 2 is averaged") and time.monotonic() < began + 120:
            friends.at_step(friends.steps + 1, interrupt)
        else:
            os.kill(os.getpid(), signal.SIGINT)

    friends.at_step(20, interrupt)
    run = job(folder=tmp_path / "run", coordinator=tmp_path / "keys", codec="int8").train(show=friends)
    assert friends.heard("the average of its clusters")
    last = [found["loss"] for found in run.evaluations if found["step"] == run.evaluations[-1]["step"]]
    assert len(last) == 2
    assert last[0] == last[1]
    assert (tmp_path / "keys" / "journal").stat().st_mode & 0o077 == 0
