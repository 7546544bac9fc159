"""Tracks the progress of the clusters of a run: turns notes of the coordinator into losses, messages and metrics.

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
from ravnest.coordinator.policy.waiting import waiting_for
from ravnest.core.metrics import StageMetrics, bubble
from ravnest.core.units import format_throughput
from ravnest.errors import FrameError, RavnestError, WorkerLost
from ravnest.protocol.commands import EvaluationReport, LossReport, Report, StateSaved, StepReport
from ravnest.run.checkpoint.writer import RunCheckpoints
from ravnest.run.cluster_builder import ClusterBuilder
from ravnest.run.coordinator_thread import CoordinatorThread
from ravnest.run.data import BatchQueue
from ravnest.run.event_feed import EventFeed
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

_LATEST = 20  # steps whose mean loss ranks a cluster without held-out data
_MAX_FAILURES = 3  # of a local cluster in a row, without a step in between
_POLL_S = 0.5


@dataclass
class ClusterProgress:
    """Progress of one cluster."""

    plan: PipelinePlan
    tracker: LossTracker
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
    def ranking_loss(self) -> float:
        """The held-out loss, else the mean of the latest training losses; infinite without any."""
        latest = self.losses[-_LATEST:]
        loss = self.validation if not math.isnan(self.validation) else sum(latest) / max(len(latest), 1)
        return loss if latest and not math.isnan(loss) else math.inf

    def summary(self) -> str:
        loss = f"loss {self.losses[-1]:.4f}, " if self.losses else ""
        idle = [f"{bubble(StageMetrics(), m):.0%}" for _, m in sorted(self.tracker.stages.items())]
        speed = format_throughput(self.samples_per_s)
        return f"{self.tracker.steps_done} updates, {loss}{speed}, bubbles {' '.join(idle)}"


class RunMonitor:
    """Handles the notes of a run. Owned by the run's thread; only `notes` is for other threads.

    `labels` name the values of the loss function.
    """

    def __init__(
        self,
        labels: Sequence[str],
        builder: ClusterBuilder,
        checkpoints: RunCheckpoints,
        view: ProgressView,
        folder: Path,
        batch_queue: BatchQueue,
        feed: EventFeed,
        *,
        is_local: bool,
    ) -> None:
        self._labels, self._builder, self._checkpoints = list(labels), builder, checkpoints
        self._view, self._folder, self._batch_queue, self._is_local = view, folder, batch_queue, is_local
        self._feed = feed
        self._failures: tuple[int, int] = (0, 0)  # failures in a row, and the step at the last one
        self._last_failure = ""
        self.notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self.clusters: dict[str, ClusterProgress] = {}
        self.progress = Progress()
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self.settled = 0  # batches, including those before a restart
        self.bad: tuple[str, int] | None = None  # cluster and step whose loss is not finite
        self.began_s = 0.0
        self._samples = 0
        self._is_log_full = False
        self._waiting = ""
        self.on_line: Callable[[dict[str, Any]], None] = lambda line: None  # a line of metrics
        self.on_wait: Callable[[], None] = lambda: None  # before every note

    _thread: CoordinatorThread
    _log: MetricsFile

    def begin(self, thread: CoordinatorThread, log: MetricsFile) -> None:
        self._thread, self._log = thread, log

    def pump_until(self, predicate: Callable[[], bool], timeout_s: float = math.inf, what: str = "") -> None:
        """Handle all waiting notes, and further ones until the predicate holds; raises `RavnestError` on timeout."""
        until = time.monotonic() + timeout_s
        while not self.notes.empty() or not predicate():
            self.on_wait()
            if time.monotonic() > until:
                raise RavnestError(f"{what} took longer than {timeout_s:g} s")
            try:
                note = self.notes.get(timeout=_POLL_S)
            except queue.Empty:
                self._thread.check()
                self._show_waiting()
                continue
            try:
                self._handle(note)
            except FrameError as error:  # an impossible report
                assert isinstance(note, StageReported)
                self._quarantine(note, str(error))

    def _quarantine(self, note: StageReported, reason: str) -> None:
        self._thread.soon(lambda coordinator: coordinator.quarantine(note.cluster, note.stage, reason))

    def _handle(self, note: Note) -> None:
        match note:
            case EventOccurred(event=event):
                self._handle_event(event)
            case NodeMessage(text=text, is_failure=is_failure):
                self._last_failure = text if is_failure else self._last_failure
                self._view.message(text)
            case BatchSettled():
                self.settled += 1
                self.progress.step += not self.clusters  # trained while this coordinator was not running
            case ClusterStopped(cluster=cluster, reason=reason, is_lost=is_lost):
                self.clusters.pop(cluster, None)
                self._checkpoints.cluster_ended(cluster)
                self._show_waiting()
                if is_lost and self._is_local:
                    self._count_failure(reason)
            case BatchFed(cluster=cluster, step=step, microbatches=microbatches) if cluster in self.clusters:
                training = self.clusters[cluster]
                training.fed = step + 1
                training.samples[step] = sum(microbatch.samples for microbatch in microbatches if microbatch.share)
                for i, microbatch in enumerate(microbatches):
                    training.tracker.add_microbatch(step * training.tracker.accumulate + i, microbatch.share)
            case StageReported(cluster=cluster, stage=stage, report=report) if cluster in self.clusters:
                self._handle_report(cluster, stage, report)

    def _count_failure(self, reason: str) -> None:
        """End a local run whose workers fail again and again without training a step."""
        count, step = self._failures
        count = count + 1 if step == self.progress.step else 1
        self._failures = count, self.progress.step
        if count >= _MAX_FAILURES:
            raise WorkerLost(
                f"{self._last_failure or reason}. The cluster failed {count} times without a step in between; "
                f"the logs are in {self._folder}"
            )

    def _is_visible(self, event: Event) -> bool:
        if isinstance(event, LeaseGranted | LeaseSettled | ConnectionRejected):
            return False
        if self._is_local:
            return (isinstance(event, ClusterEnded) and event.is_lost) or (
                isinstance(event, PlanCreated) and event.generation > 1
            )
        return True

    def _handle_event(self, event: Event) -> None:
        self._view.handle_event(event)
        if isinstance(event, LeaseGranted | LeaseSettled):
            return
        self._feed.handle_event(event)
        if self._is_visible(event) and (text := describe(event)) is not None:
            self._view.event(type(event).__name__, text)
        if isinstance(event, PlanCreated):
            for cluster in event.clusters:
                plan = self._builder.plans[cluster.id]
                tracker = LossTracker(
                    self._labels, cluster.accumulate, len(cluster.members), first=cluster.first_update
                )
                self.clusters[cluster.id] = ClusterProgress(plan, tracker, fed=cluster.first_update)
                self._feed.plan_created(cluster, plan)
                if not self._is_local or event.generation == 1:
                    self._view.planned(plan, cluster.id if len(event.clusters) > 1 or not self._is_local else "")
            self._batch_queue.lead = max(4, 2 * len(self.clusters))
            self._write_plans()
        elif isinstance(event, RoundStarted):
            self._write({"round": event.number, "attempt": event.attempt, "seconds": self._seconds()})
        elif isinstance(event, NodeReady) and self._thread.call(lambda c: c.state.is_training(event.cluster)):
            training = self.clusters.get(event.cluster)
            if training is not None and not training.began_s:
                training.began_s = time.monotonic()
                self.began_s = self.began_s or training.began_s
        if self._waiting:
            self._show_waiting()

    def _show_waiting(self) -> None:
        """Show what the run waits for, when that changes; local runs are shown to wait only after a failure."""
        if any(training.began_s for training in self.clusters.values()):
            reason = ""
        elif self._is_local and not self.began_s:
            return
        else:
            policy = self._thread.service.config.membership
            reason = self._thread.call(lambda c: waiting_for(c.state, c.now_s(), policy))
        if reason != self._waiting:
            self._waiting = reason
            self._view.waiting(reason)

    def _handle_report(self, cluster: str, stage: int, report: Report) -> None:
        training = self.clusters[cluster]
        tracker = training.tracker
        match report:
            case LossReport(values=values):
                step = tracker.add_losses(values)
                if step is not None and self.bad is None:
                    self.bad = bad = cluster, step
                    self._thread.soon(lambda c: c.running.end_after(*bad))
            case StepReport(metrics=metrics):
                if metrics.stage != stage:
                    raise FrameError(f"stage {stage} sent metrics of stage {metrics.stage}")
                for step, means in tracker.updated(metrics):
                    self._step_done(cluster, training, step, means)
            case EvaluationReport(number=number, batch=batch, values=values):
                evaluation = tracker.evaluated(number, batch, values)
                if evaluation is not None:
                    self._evaluation_done(cluster, training, evaluation)
            case StateSaved(updates=updates, failure=failure, is_state=True):
                checkpoints = self._checkpoints
                checkpoints.saved(cluster, stage, updates, failure)
                if not checkpoints.is_waiting:
                    self._builder.checkpoint = checkpoints.newest() or self._builder.checkpoint
            case StateSaved():
                training.saved.add(stage)

    def _step_done(self, cluster: str, training: ClusterProgress, step: int, means: list[float]) -> None:
        samples = training.samples.pop(step)
        training.losses.append(means[0])
        training.done_samples += samples
        self._samples += samples
        self.losses.append(means[0])
        progress = self.progress
        progress.step += 1
        progress.loss, progress.metrics = means[0], dict(zip(self._labels[1:], means[1:], strict=True))
        progress.samples_per_s = self._samples / max(time.monotonic() - self.began_s, 1e-9)
        progress.samples, progress.clusters = self._samples, self.clusters
        progress.stages = training.tracker.stages if len(self.clusters) == 1 and self._is_local else {}
        seconds, stages = self._seconds(), list(training.tracker.stages.values())
        self._write({"step": progress.step, "cluster": cluster, "loss": means[0], **progress.metrics,
                     "seconds": seconds, "samples": samples,
                     "stages": [msgspec.structs.asdict(m) for m in stages]})  # fmt: skip
        self._feed.step_done(
            cluster, step, dict(zip(self._labels, means, strict=True)), step=progress.step, samples=samples,
            seconds=seconds, samples_per_s=progress.samples_per_s, stages=stages,
        )  # fmt: skip
        self._view.update(progress)

    def _evaluation_done(self, cluster: str, training: ClusterProgress, evaluation: dict[str, float]) -> None:
        training.validation = evaluation[self._labels[0]]
        self.progress.validation = {name: value for name, value in evaluation.items() if name != "step"}
        self.progress.validation_step = int(evaluation["step"])
        self.evaluations.append(evaluation)
        self._write({"evaluation": evaluation["step"], "cluster": cluster, **self.progress.validation,
                     "seconds": self._seconds()})  # fmt: skip
        self._feed.evaluation_done(cluster, int(evaluation["step"]), self.progress.validation)
        self._view.update(self.progress)

    def _seconds(self) -> float:
        return round(self._log.seconds + time.monotonic() - self.began_s, 3)

    def _write(self, line: dict[str, Any]) -> None:
        self.on_line(line)
        try:
            self._log.write(line)
        except OSError as error:
            if not self._is_log_full:
                self._view.message(f"cannot write metrics.jsonl, training continues: {error}")
            self._is_log_full = True

    def _write_plans(self) -> None:
        content = {c: t.plan.content() for c, t in self.clusters.items()}
        (self._folder / "plan.json").write_text(json.dumps({"clusters": content}, indent=1) + "\n")
