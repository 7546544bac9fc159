"""What the coordinator's clusters do, as the requester sees it: notes in a queue become losses, progress, a log.

The coordinator's loop puts notes; the thread that iterates the user's data takes them out whenever it waits.
"""

from __future__ import annotations

import json
import math
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .clusterplan import ClusterMaker
from .clusterrun import ClusterRun
from .coordinator.events import (
    CallerRefused,
    Event,
    LeaseGranted,
    LeaseSettled,
    NodeReady,
    PlanMade,
    RoundOpened,
)
from .coordinator.sentences import sentence
from .core.errors import FrameError, RavnestError
from .core.orders import Evaluated, Lost, Reports, Saved, Updated
from .fleetdesk import Ended, Fed, Happened, Note, Reported, Settled
from .fleetkeeping import FleetKeeping
from .metricsfile import MetricsFile
from .progress import Progress, Show
from .record import Record
from .serving import Serving
from .supply import Supply

__all__ = ["Following"]

_LOOK_S = 0.5


class Following:
    """Owned by the thread of the run; only `notes` is for others too. `labels` name what the loss function reports."""

    def __init__(
        self,
        labels: Sequence[str],
        maker: ClusterMaker,
        keeping: FleetKeeping,
        show: Show,
        folder: Path,
        supply: Supply,
    ) -> None:
        self._labels, self._maker, self._keeping = list(labels), maker, keeping
        self._show, self._folder, self._supply = show, folder, supply
        self.notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self.clusters: dict[str, ClusterRun] = {}
        self.progress = Progress()
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self.settled = 0  # batches, in all lives of the run
        self.bad: tuple[str, int] | None = None  # cluster and window whose loss is not finite
        self.began_s = 0.0
        self._samples = 0
        self._is_log_full = False

    _serving: Serving
    _log: MetricsFile

    def begin(self, serving: Serving, log: MetricsFile) -> None:
        self._serving, self._log = serving, log

    def until(self, is_so: Callable[[], bool], timeout_s: float = math.inf, what: str = "") -> None:
        """Handle the notes that are there, and more until something is so."""
        until = time.monotonic() + timeout_s
        while not self.notes.empty() or not is_so():
            if time.monotonic() > until:
                raise RavnestError(f"{what} took longer than {timeout_s:g} s")
            try:
                note = self.notes.get(timeout=_LOOK_S)
            except queue.Empty:
                self._serving.check()
                continue
            try:
                self._handle(note)
            except FrameError as error:  # a node says what cannot be
                assert isinstance(note, Reported)
                self._blame(note, str(error))

    def _blame(self, note: Reported, reason: str) -> None:
        self._serving.soon(lambda coordinator: coordinator.blame(note.cluster, note.stage, reason))

    def _handle(self, note: Note) -> None:
        match note:
            case Happened(event=event):
                self._happened(event)
            case Settled():
                self.settled += 1
                self.progress.step += not self.clusters  # trained while this coordinator was not there
            case Ended(cluster=cluster):
                self.clusters.pop(cluster, None)
                self._keeping.ended(cluster)
            case Fed(cluster=cluster, window=window, pieces=pieces) if cluster in self.clusters:
                training = self.clusters[cluster]
                training.fed = window + 1
                training.samples[window] = sum(piece.samples for piece in pieces if piece.share)
                for i, piece in enumerate(pieces):
                    training.record.fed(window * training.record.accumulate + i, piece.share)
            case Reported(cluster=cluster, stage=stage, report=report) if cluster in self.clusters:
                self._reported(cluster, stage, report)

    def _happened(self, event: Event) -> None:
        if isinstance(event, LeaseGranted | LeaseSettled):
            return
        text = sentence(event)
        if text is not None and not isinstance(event, CallerRefused):
            self._show.told(text)
        if isinstance(event, PlanMade):
            for cluster in event.clusters:
                plan = self._maker.plans[cluster.id]
                record = Record(self._labels, cluster.accumulate, len(cluster.members), first=cluster.begin)
                self.clusters[cluster.id] = ClusterRun(plan, record, fed=cluster.begin)
                self._show.planned(plan, cluster.id)
            self._supply.lead = max(4, 2 * len(self.clusters))
            self._write_plans()
        elif isinstance(event, RoundOpened):
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
            case Lost(values=values):
                window = record.lost(values)
                if window is not None and self.bad is None:
                    self.bad = bad = cluster, window
                    self._serving.soon(lambda c: c.running.end_after(*bad))
            case Updated(metrics=metrics):
                if metrics.stage != stage:
                    raise FrameError(f"stage {stage} calls itself {metrics.stage}")
                for window, means in record.updated(metrics):
                    self._window_done(cluster, training, window, means)
            case Evaluated(number=number, batch=batch, values=values):
                found = record.evaluated(number, batch, values)
                if found is not None:
                    self._evaluated(cluster, training, found)
            case Saved(updates=updates, failure=failure, is_state=True):
                keeping = self._keeping
                keeping.saved(cluster, stage, updates, failure)
                if not keeping.is_waiting:
                    self._maker.checkpoint = keeping.newest() or self._maker.checkpoint
            case Saved():
                training.saved.add(stage)

    def _window_done(self, cluster: str, training: ClusterRun, window: int, means: list[float]) -> None:
        samples = training.samples.pop(window)
        training.losses.append(means[0])
        training.done_samples += samples
        self._samples += samples
        self.losses.append(means[0])
        progress = self.progress
        progress.step += 1
        progress.loss, progress.metrics = means[0], dict(zip(self._labels[1:], means[1:], strict=True))
        progress.samples_per_s = self._samples / max(time.monotonic() - self.began_s, 1e-9)
        progress.clusters = {c: t.words() for c, t in self.clusters.items()}
        self._write({"step": progress.step, "cluster": cluster, "loss": means[0], **progress.metrics,
                     "seconds": self._seconds(),
                     "stages": [msgspec.structs.asdict(m) for m in training.record.stages.values()]})  # fmt: skip
        self._show.update(progress)

    def _evaluated(self, cluster: str, training: ClusterRun, found: dict[str, float]) -> None:
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
                self._show.told(f"metrics.jsonl cannot be written, training goes on: {error}")
            self._is_log_full = True

    def _write_plans(self) -> None:
        content = {c: t.plan.content() for c, t in self.clusters.items()}
        (self._folder / "plan.json").write_text(json.dumps({"clusters": content}, indent=1) + "\n")
