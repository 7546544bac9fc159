"""Callbacks, streams, trackers and metrics of real runs on this machine; `test_fleet.py` has those of a fleet."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ravnest
from ravnest.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    NodeJoinedEvent,
    NodeLostEvent,
    PlanEvent,
    RoundEvent,
    StartEvent,
    StepEvent,
    TrainingEvent,
)
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.run.metrics import ProgressView
from tests.unit.dashboard.test_prometheus import samples

pytestmark = pytest.mark.slow

CONFIG = GPTConfig(vocab=256, context=16, layers=2, width=32, heads=2, dropout=0.0)
GRAFANA = Path(__file__).parents[2] / "deploy/grafana/ravnest.json"


class Text:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        return batches(library_text(100_000), 12, CONFIG.context, self.seed)


def job(**changes: Any) -> ravnest.Job:
    given: dict[str, Any] = {
        "model": lambda: GPT(CONFIG), "loss": next_token_loss, "data": Text(0), "validation": Text(1),
        "optimizer": ravnest.AdamW(3e-3, schedule=ravnest.lr.linear(100, warmup_steps=10)), **changes,
    }  # fmt: skip
    return ravnest.Job(**given)


OPTIONS: dict[str, Any] = {"on": "local:2", "threads": 1, "validation_batches": 1, "verify": False}


class Recorder(ravnest.Callback):
    def __init__(self) -> None:
        self.events: list[TrainingEvent] = []

    def on_event(self, event: TrainingEvent) -> None:
        self.events.append(event)

    def of(self, *kinds: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]


def workers() -> list[psutil.Process]:
    return [p for server in psutil.Process().children() for p in server.children()]


def test_callbacks_get_what_the_run_reports(tmp_path: Path) -> None:
    recorder = Recorder()
    run = job(callbacks=[recorder]).train(
        **OPTIONS, steps=12, validate_every=5, checkpoint_every=6, run_dir=tmp_path / "run"
    )
    begin, end = recorder.events[0], recorder.events[-1]
    assert isinstance(begin, StartEvent)
    assert (begin.step, begin.folder, begin.batch_size, begin.is_resumed) == (0, run.folder, 12, False)
    assert (begin.config["steps"], begin.optimizer["name"]) == (12, "AdamW")
    assert [(e.node, e.memory_bytes) for e in recorder.of(NodeJoinedEvent)] == [("node-0", 0), ("node-1", 0)]
    (plan,) = recorder.of(PlanEvent)
    assert plan.nodes == ("node-0", "node-1")
    assert plan.plan["stages"][1]["node"] == "node-1"
    steps = recorder.of(StepEvent)
    assert [e.step for e in steps] == list(range(1, 13))
    assert [e.samples for e in steps] == list(range(12, 13 * 12, 12))
    assert [e.loss for e in steps] == run.losses
    assert [round(e.learning_rate, 9) for e in steps[:11]] == [round(3e-4 * k, 9) for k in range(1, 11)] + [3e-3]
    assert steps[-1].staleness == 1.0, "asynchronous with one step of delay"
    assert len(steps[-1].stages) == 2
    assert [(e.step, e.loss) for e in recorder.of(EvaluationEvent)] == [(e["step"], e["loss"]) for e in run.evaluations]
    saved = [(e.step, e.path.name) for e in recorder.of(CheckpointEvent)]
    assert saved == [(6, "step-000006"), (12, "step-000012")]
    assert isinstance(end, EndEvent)
    assert (end.step, end.outcome, end.model) == (12, "finished", run.folder / "model.safetensors")
    shown = run._repr_html_()
    assert "<polyline" in shown
    assert "node-1" in shown
    assert "<script" not in shown


def test_a_callback_stops_the_run_and_a_worker_comes_back(tmp_path: Path) -> None:
    class Patience(Recorder):
        """Kills a worker, and stops the run five steps after its node is back."""

        last = 0

        def on_event(self, event: TrainingEvent) -> None:
            super().on_event(event)
            if isinstance(event, StepEvent) and event.step == 3:
                workers()[0].kill()
            if isinstance(event, NodeJoinedEvent) and event.is_back:
                self.last = event.step + 5
            if self.last and isinstance(event, StepEvent) and event.step >= self.last:
                raise ravnest.StopTraining("enough")

    callback = Patience()
    run = job(validation=None).train(**OPTIONS, callbacks=[callback], run_dir=tmp_path / "run")
    assert run.state_dict().keys() == GPT(CONFIG).state_dict().keys()
    (lost,) = callback.of(NodeLostEvent)
    assert lost.is_connected
    assert not lost.is_voluntary
    assert [e.node for e in callback.of(NodeJoinedEvent) if e.is_back] == [lost.node]
    assert len(callback.of(PlanEvent)) == 2
    end = callback.events[-1]
    assert isinstance(end, EndEvent)
    assert (end.outcome, end.reason) == ("stopped", "Patience stopped the run: enough")
    assert end.step == len(run.losses) >= callback.last


def test_a_stream_is_left_and_resumed_in_the_same_tracker(tmp_path: Path) -> None:
    """Leaving the loop saves the run; resumed, the steps and the curve of the tracker continue."""
    before = {p.pid for p in workers()}
    stream = job().stream(**OPTIONS, checkpoint_every=2, run_dir=tmp_path / "run", track="tensorboard")
    for event in stream:
        if isinstance(event, StepEvent) and event.step == 5:
            assert "<polyline" in stream._repr_html_()
            break
    assert {p.pid for p in workers()} <= before
    assert ": stopped, step" in stream._repr_html_()
    done = len(stream.run.losses)
    assert done >= 5
    resumed = job().stream(**OPTIONS, resume=tmp_path / "run", steps=done + 4, track="tensorboard")
    events = list(resumed)
    begin = events[0]
    assert isinstance(begin, StartEvent)
    assert (begin.is_resumed, begin.step, begin.samples) == (True, done, 12 * done)
    assert [e.step for e in events if isinstance(e, StepEvent)] == list(range(done + 1, done + 5))
    assert events[-1].samples == 12 * (done + 4)
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    read = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [e.step for e in read.Scalars("loss")] == list(range(1, done + 5))
    losses = [*stream.run.losses, *resumed.run.losses]
    assert [e.value for e in read.Scalars("loss")] == pytest.approx(losses, rel=1e-6)


def test_ctrl_c_in_a_loop_saves_and_is_raised(tmp_path: Path) -> None:
    stream = job(validation=None).stream(**OPTIONS, run_dir=tmp_path / "run")

    def watch() -> None:
        for event in stream:
            if event.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        watch()
    assert len(stream.run.state_dict()) == len(GPT(CONFIG).state_dict())
    assert (tmp_path / "run" / "model.safetensors").exists()


class Scrape(Recorder):
    """Scrapes `/metrics` once there was a step, an evaluation and a round, and stops the run."""

    def __init__(self) -> None:
        super().__init__()
        self.link = self.text = ""

    def on_event(self, event: TrainingEvent) -> None:
        super().on_event(event)
        kinds = {type(seen) for seen in self.events}
        if isinstance(event, StepEvent) and kinds >= {EvaluationEvent, RoundEvent} and not self.text:
            origin, _, token = self.link.partition("/#token=")
            request = urllib.request.Request(f"{origin}/metrics", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                self.text = answer.read().decode()
            raise ravnest.StopTraining


class Link(ProgressView):
    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def dashboard(self, link: str) -> None:
        self._scrape.link = link


def test_the_grafana_dashboard_queries_metrics_that_exist(tmp_path: Path) -> None:
    scrape = Scrape()
    job().train(
        **{**OPTIONS, "on": "local:4"}, clusters=2, average_every=24, validate_every=3, steps=100_000,
        callbacks=[scrape], show=Link(scrape), run_dir=tmp_path / "run",
    )  # fmt: skip
    found = samples(scrape.text)
    names = {name.partition("{")[0] for name in found}
    panels = json.loads(GRAFANA.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queried = {name for query in queries for name in re.findall(r"ravnest_\w+", query)}
    assert len(queried) > 15
    assert queried <= names, f"not in a scrape: {queried - names}"
    assert found["ravnest_clusters"] == 2
    assert found["ravnest_rounds_total"] >= 1
    assert found["ravnest_steps_planned"] == 100_000
