"""Progress of the clusters of a run: notes of the coordinator become losses, progress and a log.

The coordinator's loop puts notes into a queue; the thread that iterates the user's data handles them whenever it waits.
"""

from __future__ import annotations

import json
import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ravnest.coordinator.event_log import describe
from ravnest.coordinator.events import (
    ClusterEnded,
    ConnectionRejected,
    Event,
    LeaseGranted,
    LeaseSettled,
    NodeReady,
    PlanCreated,
    RoundStarted,
)
from ravnest.core.metrics import StageMetrics, bubble
from ravnest.errors import FrameError, RavnestError, WorkerLost
from ravnest.protocol.commands import EvaluationReport, LossReport, Reports, StateSaved, StepReport
from ravnest.run.checkpoint.writer import RunCheckpoints
from ravnest.run.cluster_builder import ClusterBuilder
from ravnest.run.coordinator_thread import CoordinatorThread
from ravnest.run.data import BatchQueue
from ravnest.run.metrics import LossTracker, MetricsFile, Progress, ProgressView
from ravnest.run.plan import PipelinePlan
from ravnest.run.requester import (
    BatchFed,
    BatchSettled,
    ClusterStopped,
    EventOccurred,
    NodeMessage,
    Note,
    StageReported,
)

__all__ = ["ClusterProgress", "RunMonitor"]

_LATEST = 20  # steps whose mean loss ranks a cluster, where nothing is held out
_MAX_FAILURES = 3  # of a local cluster in a row, without a step in between


@dataclass
class ClusterProgress:
    """One cluster."""

    plan: PipelinePlan
    record: LossTracker
    samples: dict[int, int] = field(default_factory=dict)  # of steps in flight
    fed: int = 0
    done_samples: int = 0
    began_s: float = 0.0
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan
    saved: set[int] = field(default_factory=set)

    @property
    def samples_per_s(self) -> float:
        return self.done_samples / max(time.monotonic() - self.began_s, 1e-9) if self.began_s else 0.0

    @property
    def worth(self) -> float:
        """The smaller the better."""
        latest = self.losses[-_LATEST:]
        found = self.validation if not math.isnan(self.validation) else sum(latest) / max(len(latest), 1)
        return found if latest and not math.isnan(found) else math.inf

    def words(self) -> str:
        loss = f"loss {self.losses[-1]:.4f}, " if self.losses else ""
        idle = [f"{bubble(StageMetrics(), m):.0%}" for _, m in sorted(self.record.stages.items())]
        return f"{self.record.windows_done} updates, {loss}{self.samples_per_s:.1f} samples/s, bubbles {' '.join(idle)}"


_LOOK_S = 0.5


class RunMonitor:
    """Owned by the run's thread; only `notes` is for other threads. `labels` name the values of the loss function."""

    def __init__(
        self,
        labels: Sequence[str],
        maker: ClusterBuilder,
        keeping: RunCheckpoints,
        show: ProgressView,
        folder: Path,
        supply: BatchQueue,
        *,
        is_local: bool,
    ) -> None:
        self._labels, self._maker, self._keeping = list(labels), maker, keeping
        self._show, self._folder, self._supply, self._is_local = show, folder, supply, is_local
        self._failures: tuple[int, int] = (0, 0)  # in a row, and the step at the last
        self._last_failure = ""
        self.notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self.clusters: dict[str, ClusterProgress] = {}
        self.progress = Progress()
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self.settled = 0  # batches, in all lives of the run
        self.bad: tuple[str, int] | None = None  # cluster and window whose loss is not finite
        self.began_s = 0.0
        self._samples = 0
        self._is_log_full = False

    _serving: CoordinatorThread
    _log: MetricsFile

    def begin(self, serving: CoordinatorThread, log: MetricsFile) -> None:
        self._serving, self._log = serving, log

    def pump_until(self, predicate: Callable[[], bool], timeout_s: float = math.inf, what: str = "") -> None:
        """Handle the notes that are there, and more until the predicate holds."""
        until = time.monotonic() + timeout_s
        while not self.notes.empty() or not predicate():
            if time.monotonic() > until:
                raise RavnestError(f"{what} took longer than {timeout_s:g} s")
            try:
                note = self.notes.get(timeout=_LOOK_S)
            except queue.Empty:
                self._serving.check()
                continue
            try:
                self._handle(note)
            except FrameError as error:  # an impossible report
                assert isinstance(note, StageReported)
                self._quarantine(note, str(error))

    def _quarantine(self, note: StageReported, reason: str) -> None:
        self._serving.soon(lambda coordinator: coordinator.quarantine(note.cluster, note.stage, reason))

    def _handle(self, note: Note) -> None:
        match note:
            case EventOccurred(event=event):
                self._happened(event)
            case NodeMessage(text=text, is_failure=is_failure):
                self._last_failure = text if is_failure else self._last_failure
                self._show.told(text)
            case BatchSettled():
                self.settled += 1
                self.progress.step += not self.clusters  # trained while this coordinator was not there
            case ClusterStopped(cluster=cluster, reason=reason, is_lost=is_lost):
                self.clusters.pop(cluster, None)
                self._keeping.ended(cluster)
                if is_lost and self._is_local:
                    self._count_failure(reason)
            case BatchFed(cluster=cluster, window=window, pieces=pieces) if cluster in self.clusters:
                training = self.clusters[cluster]
                training.fed = window + 1
                training.samples[window] = sum(piece.samples for piece in pieces if piece.share)
                for i, piece in enumerate(pieces):
                    training.record.fed(window * training.record.accumulate + i, piece.share)
            case StageReported(cluster=cluster, stage=stage, report=report) if cluster in self.clusters:
                self._reported(cluster, stage, report)

    def _count_failure(self, reason: str) -> None:
        """End a local run whose workers fail again and again without training a step."""
        count, step = self._failures
        count = count + 1 if step == self.progress.step else 1
        self._failures = count, self.progress.step
        if count >= _MAX_FAILURES:
            raise WorkerLost(
                f"{self._last_failure or reason}. It failed {count} times without a step in between; the logs are in "
                f"{self._folder}"
            )

    def _is_shown(self, event: Event) -> bool:
        if isinstance(event, LeaseGranted | LeaseSettled | ConnectionRejected):
            return False
        if self._is_local:
            return (isinstance(event, ClusterEnded) and event.is_lost) or (
                isinstance(event, PlanCreated) and event.generation > 1
            )
        return True

    def _happened(self, event: Event) -> None:
        if isinstance(event, LeaseGranted | LeaseSettled):
            return
        if self._is_shown(event) and (text := describe(event)) is not None:
            self._show.told(text)
        if isinstance(event, PlanCreated):
            for cluster in event.clusters:
                plan = self._maker.plans[cluster.id]
                record = LossTracker(self._labels, cluster.accumulate, len(cluster.members), first=cluster.first_update)
                self.clusters[cluster.id] = ClusterProgress(plan, record, fed=cluster.first_update)
                if not self._is_local or event.generation == 1:
                    self._show.planned(plan, cluster.id if len(event.clusters) > 1 or not self._is_local else "")
            self._supply.lead = max(4, 2 * len(self.clusters))
            self._write_plans()
        elif isinstance(event, RoundStarted):
            self._write({"round": event.number, "attempt": event.attempt, "seconds": self._seconds()})
        elif isinstance(event, NodeReady) and self._serving.call(lambda c: c.state.is_training(event.cluster)):
            training = self.clusters.get(event.cluster)
            if training is not None and not training.began_s:
                training.began_s = time.monotonic()
                self.began_s = self.began_s or training.began_s

    def _reported(self, cluster: str, stage: int, report: Reports) -> None:
        training = self.clusters[cluster]
        record = training.record
        match report:
            case LossReport(values=values):
                window = record.lost(values)
                if window is not None and self.bad is None:
                    self.bad = bad = cluster, window
                    self._serving.soon(lambda c: c.running.end_after(*bad))
            case StepReport(metrics=metrics):
                if metrics.stage != stage:
                    raise FrameError(f"stage {stage} calls itself {metrics.stage}")
                for window, means in record.updated(metrics):
                    self._window_done(cluster, training, window, means)
            case EvaluationReport(number=number, batch=batch, values=values):
                found = record.evaluated(number, batch, values)
                if found is not None:
                    self._evaluated(cluster, training, found)
            case StateSaved(updates=updates, failure=failure, is_state=True):
                keeping = self._keeping
                keeping.saved(cluster, stage, updates, failure)
                if not keeping.is_waiting:
                    self._maker.checkpoint = keeping.newest() or self._maker.checkpoint
            case StateSaved():
                training.saved.add(stage)

    def _window_done(self, cluster: str, training: ClusterProgress, window: int, means: list[float]) -> None:
        samples = training.samples.pop(window)
        training.losses.append(means[0])
        training.done_samples += samples
        self._samples += samples
        self.losses.append(means[0])
        progress = self.progress
        progress.step += 1
        progress.loss, progress.metrics = means[0], dict(zip(self._labels[1:], means[1:], strict=True))
        progress.samples_per_s = self._samples / max(time.monotonic() - self.began_s, 1e-9)
        if len(self.clusters) > 1 or not self._is_local:
            progress.clusters = {c: t.words() for c, t in self.clusters.items()}
        else:
            progress.stages = training.record.stages
        self._write({"step": progress.step, "cluster": cluster, "loss": means[0], **progress.metrics,
                     "seconds": self._seconds(),
                     "stages": [msgspec.structs.asdict(m) for m in training.record.stages.values()]})  # fmt: skip
        self._show.update(progress)

    def _evaluated(self, cluster: str, training: ClusterProgress, found: dict[str, float]) -> None:
        training.validation = found[self._labels[0]]
        self.progress.validation = {name: value for name, value in found.items() if name != "step"}
        self.evaluations.append(found)
        self._write({"evaluation": found["step"], "cluster": cluster, **self.progress.validation,
                     "seconds": self._seconds()})  # fmt: skip
        self._show.update(self.progress)

    def _seconds(self) -> float:
        return round(self._log.seconds + time.monotonic() - self.began_s, 3)

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._log.write(line)
        except OSError as error:
            if not self._is_log_full:
                self._show.told(f"cannot write metrics.jsonl, training continues: {error}")
            self._is_log_full = True

    def _write_plans(self) -> None:
        content = {c: t.plan.content() for c, t in self.clusters.items()}
        (self._folder / "plan.json").write_text(json.dumps({"clusters": content}, indent=1) + "\n")
