"""What a cluster's training came to, gathered from what its stages report: losses by window, evaluations, accounts.

The loss of a window is the mean of its microbatches by their shares. Reports come in any order between stages, and a
few may be missing after a connection broke; a window is through when every stage has made its update.

A run while it goes on: where it stands, and who wants to see that.

`metrics.jsonl`: a line of JSON per update and per evaluation. A run that goes on from a checkpoint goes on with it.

A line is written whole or not at all, and a disk that is full stops nobody: what could not be written is missing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ravnest.core.metrics import StageMetrics
from ravnest.errors import FrameError
from ravnest.run.plan import PipelinePlan

__all__ = ["Progress", "ProgressView", "MetricsFile", "LossTracker"]


@dataclass
class Progress:
    """Where a run stands: what a display shows."""

    step: int = 0
    loss: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)  # what else the loss function reports
    validation: dict[str, float] = field(default_factory=dict)
    samples_per_s: float = 0.0
    stages: dict[int, StageMetrics] = field(default_factory=dict)
    clusters: dict[str, str] = field(default_factory=dict)  # how each does, in words, where there are several


class ProgressView:
    """Follows a run for a person. This one shows nothing."""

    def planned(self, plan: PipelinePlan, cluster: str = "") -> None:
        """This is how the model is split, in the only cluster or in one of several."""

    def invited(self, ticket: str) -> None:
        """Whoever has this ticket may join."""

    def told(self, sentence: str) -> None:
        """Something happened."""

    def update(self, progress: Progress) -> None:
        """An update was made, or an evaluation."""

    def close(self) -> None:
        """The run is over."""


class MetricsFile:
    """`after` is the step to go on after: lines of later ones, which are trained again, go. `seconds` were before."""

    def __init__(self, path: Path, *, after: int = 0) -> None:
        kept = [line for line in _lines(path) if _step(line) <= after] if after else []
        self.seconds = max((float(line.get("seconds", 0.0)) for line in kept), default=0.0)
        draft = path.with_name(f".{path.name}")
        draft.write_text("".join(json.dumps(line) + "\n" for line in kept))
        draft.replace(path)
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        """Raises `OSError` if there is no room for the line; then nothing of it is there."""
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
    """Those that are whole: a run that was killed may have left half of one."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(text))
    return [line for line in found if isinstance(line, dict)]


def _step(line: dict[str, Any]) -> int:
    return int(line.get("step", line.get("evaluation", 0)))


Values = tuple[float | None, ...]  # None for what is not finite

_EVALUATION_BITS = 20  # of a held-out microbatch's number; above them is its evaluation's


def _number(value: float | None) -> float:
    return math.nan if value is None else value


@dataclass
class _Window:
    """The losses of one window, until all are there."""

    shares: dict[int, float] = field(default_factory=dict)
    values: dict[int, Values] = field(default_factory=dict)

    def means(self, count: int) -> list[float]:
        wanted = {m: share for m, share in self.shares.items() if share}
        there = {m: share for m, share in wanted.items() if m in self.values}
        if not there:
            return [math.nan] * count
        total = 1.0 if len(there) == len(wanted) else sum(there.values())
        return [sum(share * _number(self.values[m][k]) for m, share in there.items()) / total for k in range(count)]


@dataclass
class Evaluation:
    """Held-out microbatches on their way, and what came back: (samples, values) of each."""

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
    """Of one cluster. `labels` name what the loss function reports, the loss first."""

    def __init__(self, labels: Sequence[str], accumulate: int, num_stages: int, *, first: int = 0) -> None:
        """`first` is its first window: a cluster may go on from what others have learnt."""
        self.labels, self.accumulate, self.num_stages = list(labels), accumulate, num_stages
        self.windows_done = self._first = first
        self.bad: int | None = None  # the first microbatch whose loss is not finite
        self.stages: dict[int, StageMetrics] = {}
        self.evaluations: list[dict[str, float]] = []
        self._windows: dict[int, _Window] = {}
        self._evaluating: dict[int, Evaluation] = {}
        self._evaluations_begun = 0

    def fed(self, microbatch: int, share: float) -> None:
        """A microbatch is on its way; `share` is its part of its window."""
        self._windows.setdefault(microbatch // self.accumulate, _Window()).shares[microbatch] = share

    def lost(self, values: Mapping[int, Values]) -> int | None:
        """The losses of microbatches; the window of the first that is not finite, if that is among them."""
        was_good = self.bad is None
        for microbatch, found in values.items():
            window = self._windows.get(microbatch // self.accumulate)
            if window is None or microbatch not in window.shares or len(found) != len(self.labels):
                raise FrameError(f"a loss of microbatch {microbatch} with {len(found)} values is not expected")
            window.values[microbatch] = found
            if found[0] is None and self.bad is None:
                self.bad = microbatch
        return self.bad_window if was_good else None

    @property
    def bad_window(self) -> int | None:
        """Of the first microbatch whose loss is not finite."""
        return None if self.bad is None else self.bad // self.accumulate

    def updated(self, metrics: StageMetrics) -> Iterator[tuple[int, list[float]]]:
        """A stage's account; yields each window that is through by it, with what was reported in it."""
        if not 0 <= metrics.stage < self.num_stages:
            raise FrameError(f"there is no stage {metrics.stage}")
        self.stages[metrics.stage] = metrics
        done = min((self.updates_of(i) for i in range(self.num_stages)), default=0)
        while self.windows_done < done and self.windows_done in self._windows:
            window = self.windows_done
            self.windows_done += 1
            yield window, self._windows.pop(window).means(len(self.labels))

    def updates_of(self, stage: int) -> int:
        return self.stages[stage].updates if stage in self.stages else self._first

    def begin_evaluation(self, step: int) -> Evaluation:
        self._evaluations_begun += 1
        first = self._evaluations_begun << _EVALUATION_BITS
        evaluation = self._evaluating[self._evaluations_begun] = Evaluation(step, first)
        return evaluation

    def evaluated(self, number: int, batch: int, values: Values) -> dict[str, float] | None:
        """The result of a held-out microbatch; of its evaluation, if that is through."""
        evaluation = self._evaluating.get(number >> _EVALUATION_BITS)
        if evaluation is None or not evaluation.num_waiting or len(values) != len(self.labels):
            raise FrameError(f"a result of held-out microbatch {number} is not expected")
        evaluation.results.append((batch, values))
        return self.conclude(evaluation)

    def conclude(self, evaluation: Evaluation) -> dict[str, float] | None:
        """Note the result of an evaluation if all of it is there."""
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
