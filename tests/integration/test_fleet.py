"""A whole run on PCs that join: real agents and workers over loopback, two clusters that average, and one that dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ravnest
from ravnest import events
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.run.metrics import Progress, ProgressView

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CONFIG = GPTConfig(vocab=256, context=32, layers=2, width=64, heads=2, dropout=0.0)


class Friends(ProgressView):
    """Starts agents when the run prints its ticket, and calls functions at given steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.ticket = ""
        self.devices: dict[str, str] = {}
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
            command += ["--device", self.devices.get(name, "auto")]
            with (self.folder / f"{name}.log").open("wb") as log:
                self.agents[name] = subprocess.Popen(
                    [*command, "--memory", "600MB", "--data-dir", str(self.folder / name)], stdout=log, stderr=log
                )

    def message(self, text: str) -> None:
        self.said.append(text)

    def update(self, progress: Progress) -> None:
        self.steps = progress.step
        for plan in [plan for plan in self._plans if plan[0] <= progress.step]:
            self._plans.remove(plan)
            plan[1]()

    def worker_of(self, name: str) -> psutil.Process:
        children = psutil.Process(self.agents[name].pid).children()
        return next(child for child in children if "ravnest.worker.process" in child.cmdline())

    def heard(self, words: str) -> bool:
        return any(words in sentence for sentence in self.said)


@pytest.fixture
def friends(tmp_path: Path) -> Iterator[Friends]:
    made = Friends(tmp_path)
    yield made
    workers: list[psutil.Process] = []
    for agent in made.agents.values():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            workers += psutil.Process(agent.pid).children()
    for name, agent in made.agents.items():  # they end with the run
        try:
            code = agent.wait(20)
        except subprocess.TimeoutExpired:
            agent.send_signal(signal.SIGINT)
            code = agent.wait(20)
        assert code == 0, (made.folder / f"{name}.log").read_text()
    assert psutil.wait_procs(workers, timeout=5)[1] == []


def slowly(data: Iterator[Any]) -> Iterator[Any]:
    """Batches no faster than from a disk, so that those who join meanwhile find a processor."""
    for batch in data:
        time.sleep(0.06)
        yield batch


def test_clusters_average_and_come_and_go(friends: Friends, tmp_path: Path) -> None:
    """A second cluster joins and starts from the state of the first. Then a worker of the first is killed, and the
    remaining PC forms another cluster with a new one. In the end all clusters have the same model."""
    began = time.monotonic()

    def when(words: str, do: Callable[[], None]) -> None:
        """As soon as it has been said."""
        if friends.heard(words) or time.monotonic() > began + 150:
            do()
        else:
            friends.at_step(friends.steps + 1, lambda: when(words, do))

    def kill() -> None:
        friends.worker_of("anna").kill()
        friends.join("emil")
        friends.at_step(friends.steps, lambda: when("emil connected", averaged_again))

    def averaged_again() -> None:
        """Wait for rings with the cluster that replaced the failed one."""
        when("of c2, c", lambda: friends.at_step(friends.steps + 40, end))

    def end() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    friends.at_step(10, lambda: friends.join("carl", "dora"))
    friends.at_step(11, lambda: when("round 2 committed", kill))
    text = library_text()
    job = ravnest.Job(
        lambda: GPT(CONFIG), next_token_loss, slowly(batches(text, 16, 32, seed=0)), optimizer=ravnest.AdamW(3e-3),
        validation=[next(batches(text, 64, 32, seed=1))],
    )  # fmt: skip
    recorder = Recorder()
    run = job.train(
        on="127.0.0.1:0", settle_time_s=1.0, average_every=64, averaging_compression="int8", show=friends,
        run_dir=tmp_path / "run", coordinator_dir=tmp_path / "keys", callbacks=[recorder],
    )  # fmt: skip

    _check_events(recorder, run)
    told = "\n".join(friends.said)
    assert friends.heard("cluster c1 failed"), told
    assert friends.heard("the average of its clusters"), told
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    late = [line["loss"] for line in lines if line.get("cluster") == "c2" and "step" in line]
    first = [line["loss"] for line in lines if line.get("cluster") == "c1" and "step" in line]
    assert late[0] < first[0] - 0.5  # it did not begin from the first weights
    assert friends.heard("resumed after"), told
    assert sum(run.losses[-5:]) / 5 < 3.3
    last = [found["loss"] for found in run.evaluations if found["step"] == run.evaluations[-1]["step"]]
    assert len(last) == 2, told
    assert last[0] == last[1]
    assert _held_out_loss(run.state_dict()) == pytest.approx(last[0], abs=1e-3)
    assert (tmp_path / "keys" / "journal").stat().st_mode & 0o077 == 0


class Recorder(ravnest.Callback):
    def __init__(self) -> None:
        self.events: list[events.TrainingEvent] = []

    def on_event(self, event: events.TrainingEvent) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def _check_events(recorder: Recorder, run: ravnest.Run) -> None:
    """The same events as of a run on one machine (`test_observe.py`)."""
    assert {event.node for event in recorder.of(events.NodeJoinedEvent)} == {"anna", "bela", "carl", "dora", "emil"}
    assert all(0 < event.memory_bytes <= 600 * 10**6 for event in recorder.of(events.NodeJoinedEvent))
    lost = {event.node: event for event in recorder.of(events.NodeLostEvent)}
    assert lost["anna"].is_connected, "only its worker was killed"
    assert {len(event.clusters) for event in recorder.of(events.RoundEvent) if not event.reason} == {2}
    assert [event.loss for event in recorder.of(events.StepEvent)] == run.losses
    assert {event.cluster for event in recorder.of(events.PlanEvent)} >= {"c1", "c2"}
    assert [event.loss for event in recorder.of(events.EvaluationEvent)] == [e["loss"] for e in run.evaluations]
    first, last = recorder.events[0], recorder.events[-1]
    assert isinstance(first, events.StartEvent)
    assert isinstance(last, events.EndEvent)
    assert (last.outcome, last.reason, last.model) == ("stopped", "Ctrl-C", run.folder / "model.safetensors")


def _held_out_loss(weights: dict[str, torch.Tensor]) -> float:
    model = GPT(CONFIG).eval()
    model.load_state_dict(weights)
    inputs, targets = next(batches(library_text(), 64, 32, seed=1))
    with torch.no_grad():
        return float(next_token_loss(model(inputs), targets))
