"""Metrics of a run: its progress for a view, the file `metrics.jsonl`, and the losses of each cluster.

`metrics.jsonl` has a line of JSON per update and per evaluation; a resumed run appends to it. A line is written whole
or not at all. A full disk does not stop training: lines that could not be written are missing.

The loss of a step is the mean of the losses of its microbatches, weighted by their shares:

    loss of a step = sum of share * loss over its microbatches

Reports of different stages arrive in any order, and a few may be missing after a connection failed. A step is done when
every stage has made its update.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ravnest.coordinator.events import Event
from ravnest.core.metrics import StageMetrics
from ravnest.errors import FrameError
from ravnest.run.plan import PipelinePlan

if TYPE_CHECKING:
    from ravnest.run.cluster_progress import ClusterProgress
    from ravnest.run.control import RunControl

__all__ = ["Progress", "ProgressView", "MetricsFile", "LossTracker"]


@dataclass
class Progress:
    """Progress of a run, as a view shows it."""

    step: int = 0
    loss: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)  # further values of the loss function
    validation: dict[str, float] = field(default_factory=dict)
    validation_step: int = 0
    samples: int = 0  # trained by this process
    samples_per_s: float = 0.0  # since its first step
    stages: dict[int, StageMetrics] = field(default_factory=dict)  # of a local run with one cluster
    clusters: Mapping[str, ClusterProgress] = field(default_factory=dict)


class ProgressView:
    """Shows the progress of a run to the user. This one shows nothing."""

    def planned(self, plan: PipelinePlan, cluster: str = "") -> None:
        """Show the plan of a cluster; `cluster` is empty if it is the only one."""

    def invited(self, ticket: str) -> None:
        """Show the ticket with which PCs can join."""

    def dashboard(self, link: str) -> None:
        """Show the link to the dashboard."""

    def started(self, control: RunControl) -> None:
        """The coordinator runs; `control` changes the run while it trains."""

    def handle_event(self, event: Event) -> None:
        """Handle any event of the coordinator."""

    def message(self, text: str) -> None:
        """Show a message about the run."""

    def event(self, kind: str, text: str) -> None:
        """Show an event of the coordinator that concerns the user; `kind` is the name of its class."""
        self.message(text)

    def waiting(self, reason: str) -> None:
        """Show that no cluster trains, and what the run waits for; an empty reason: one trains again."""

    def update(self, progress: Progress) -> None:
        """Show the progress after an update or an evaluation."""

    def close(self) -> None:
        """End the display: the run is over."""


class MetricsFile:
    """The file `metrics.jsonl`.

    A run that is resumed after step `after` keeps the lines up to that step; later steps are trained again. `seconds`
    is the time of training that the kept lines cover, `samples` are their samples.
    """

    def __init__(self, path: Path, *, after: int = 0) -> None:
        kept = [line for line in _lines(path) if _step(line) <= after] if after else []
        self.seconds = max((float(line.get("seconds", 0.0)) for line in kept), default=0.0)
        self.samples = sum(int(line.get("samples", 0)) for line in kept)
        draft = path.with_name(f".{path.name}")
        draft.write_text("".join(json.dumps(line) + "\n" for line in kept))
        draft.replace(path)
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; raises `OSError` if the disk has no room for it, and writes nothing of it then."""
        text, before = json.dumps(line).encode() + b"\n", self._file.tell()
        try:
            if self._file.write(text) != len(text):
                raise OSError("the disk is full")
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
                self._file.seek(before)
            raise


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines; a run that was killed may have left an incomplete one."""
    lines = []
    with contextlib.suppress(FileNotFoundError):
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def _step(line: dict[str, Any]) -> int:
    return int(line.get("step", line.get("evaluation", 0)))


Values = tuple[float | None, ...]  # None: not finite

# losses of a cluster

_EVALUATION_BITS = 20  # low bits of a held-out microbatch's number; the bits above them number its evaluation


def _number(value: float | None) -> float:
    return math.nan if value is None else value


@dataclass
class _StepLosses:
    """The losses of one step, until it is done."""

    shares: dict[int, float] = field(default_factory=dict)
    values: dict[int, Values] = field(default_factory=dict)

    def means(self, count: int) -> list[float]:
        expected = {m: share for m, share in self.shares.items() if share}
        received = {m: share for m, share in expected.items() if m in self.values}
        if not received:
            return [math.nan] * count
        total = 1.0 if len(received) == len(expected) else sum(received.values())
        return [sum(share * _number(self.values[m][k]) for m, share in received.items()) / total for k in range(count)]


@dataclass
class Evaluation:
    """Held-out microbatches in flight, and the received results: (samples, values) of each."""

    step: int
    first: int  # the number of its first microbatch
    sent: int = 0
    is_all_sent: bool = False
    results: list[tuple[int, Values]] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        return self.sent - len(self.results)

    @property
    def is_done(self) -> bool:
        return self.is_all_sent and not self.num_waiting

    def means(self, count: int) -> list[float]:
        samples = sum(size for size, _ in self.results)
        return [sum(size * _number(values[k]) for size, values in self.results) / samples for k in range(count)]


class LossTracker:
    """Losses and evaluations of one cluster. `labels` name the values of the loss function, the loss first."""

    def __init__(self, labels: Sequence[str], accumulate: int, num_stages: int, *, first: int = 0) -> None:
        """`first` is the first step: a cluster may resume from the state of another."""
        self.labels, self.accumulate, self.num_stages = list(labels), accumulate, num_stages
        self.steps_done = self._first = first
        self.bad: int | None = None  # the first microbatch whose loss is not finite
        self.stages: dict[int, StageMetrics] = {}
        self.evaluations: list[dict[str, float]] = []
        self._steps: dict[int, _StepLosses] = {}
        self._evaluating: dict[int, Evaluation] = {}
        self._evaluations_begun = 0

    def add_microbatch(self, microbatch: int, share: float) -> None:
        """Expect the loss of a microbatch, which has this share of its step."""
        self._steps.setdefault(microbatch // self.accumulate, _StepLosses()).shares[microbatch] = share

    def add_losses(self, losses: Mapping[int, Values]) -> int | None:
        """Record losses of microbatches; return the step of the first one that is not finite, if these contain it."""
        was_good = self.bad is None
        for microbatch, values in losses.items():
            step = self._steps.get(microbatch // self.accumulate)
            if step is None or microbatch not in step.shares:
                raise FrameError(f"received a loss of microbatch {microbatch}, which is not in flight")
            if len(values) != len(self.labels):
                raise FrameError(
                    f"the loss of microbatch {microbatch} has {len(values)} values, expected {len(self.labels)}"
                )
            step.values[microbatch] = values
            if values[0] is None and self.bad is None:
                self.bad = microbatch
        return self.bad_step if was_good else None

    @property
    def bad_step(self) -> int | None:
        """The step of the first microbatch whose loss is not finite."""
        return None if self.bad is None else self.bad // self.accumulate

    def updated(self, metrics: StageMetrics) -> Iterator[tuple[int, list[float]]]:
        """Record the metrics of a stage; yield each step that is now done, with its mean values."""
        if not 0 <= metrics.stage < self.num_stages:
            raise FrameError(f"stage must be from 0 to {self.num_stages - 1}, got {metrics.stage}")
        self.stages[metrics.stage] = metrics
        done = min((self.updates_of(i) for i in range(self.num_stages)), default=0)
        while self.steps_done < done and self.steps_done in self._steps:
            step = self.steps_done
            self.steps_done += 1
            yield step, self._steps.pop(step).means(len(self.labels))

    def updates_of(self, stage: int) -> int:
        return self.stages[stage].updates if stage in self.stages else self._first

    def begin_evaluation(self, step: int) -> Evaluation:
        self._evaluations_begun += 1
        first = self._evaluations_begun << _EVALUATION_BITS
        evaluation = self._evaluating[self._evaluations_begun] = Evaluation(step, first)
        return evaluation

    def evaluated(self, number: int, batch: int, values: Values) -> dict[str, float] | None:
        """Record the result of a held-out microbatch; return that of its evaluation, if it is the last one."""
        evaluation = self._evaluating.get(number >> _EVALUATION_BITS)
        if evaluation is None or not evaluation.num_waiting or len(values) != len(self.labels):
            raise FrameError(f"unexpected result of held-out microbatch {number} with {len(values)} values")
        evaluation.results.append((batch, values))
        return self.conclude(evaluation)

    def conclude(self, evaluation: Evaluation) -> dict[str, float] | None:
        """Record and return the result of an evaluation once it is complete."""
        key = evaluation.first >> _EVALUATION_BITS
        if not evaluation.is_done or key not in self._evaluating:
            return None
        del self._evaluating[key]
        if not evaluation.results:
            return None
        means = dict(zip(self.labels, evaluation.means(len(self.labels)), strict=True))
        self.evaluations.append({"step": evaluation.step, **means})
        return self.evaluations[-1]

    @property
    def is_evaluating(self) -> bool:
        return bool(self._evaluating)
