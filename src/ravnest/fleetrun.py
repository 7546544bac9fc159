"""A training run on whoever joins: feeds batches to the coordinator, follows its clusters, keeps what they made.

Until clusters average their weights, each keeps its own: the run's model is that of the best cluster, by the held-out
loss where there is one, else by its latest training losses. The run says so.

This thread iterates the user's data and shows progress; the coordinator's loop has a thread of its own (`Serving`).
What happens there comes here as notes in a queue.
"""

from __future__ import annotations

import json
import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from . import __version__
from .checkpoints import Checkpoint
from .clusterplan import ClusterMaker
from .clusterrun import ClusterRun
from .coordinator.coordinator import Coordinator
from .coordinator.events import CallerRefused, Event, LeaseGranted, LeaseSettled, NodeReady, PlanMade
from .coordinator.leases import Leases
from .coordinator.requester import Piece
from .coordinator.sentences import sentence
from .coordinator.service import Service, ServiceConfig
from .coordinator.status import Live
from .core.errors import FrameError, NotFinite, RavnestError
from .core.metrics import StageMetrics
from .core.orders import Evaluated, Lost, Reports, Saved, Updated
from .data import Batches
from .fleetdesk import Desk, Ended, Fed, Happened, Note, Reported, Settled, part_path
from .fleetkeeping import FleetKeeping
from .graph import Program
from .interrupt import Interrupt
from .localplan import LocalPlan
from .modelfile import gather
from .progress import Progress, Show
from .record import Record
from .serving import Serving
from .supply import Supply

__all__ = ["FleetRun", "FleetWork"]

_PATIENCE_S = 600.0
_LOOK_S = 0.5
_AVERAGE_S = 180.0


@dataclass(frozen=True)
class FleetWork:
    """All that a run needs to know."""

    program: Program
    maker: ClusterMaker
    supply: Supply
    service: ServiceConfig
    folder: Path
    name: str
    seed: int
    keeping: FleetKeeping
    resume: bool = False
    start: Checkpoint | None = None  # to go on from, if the run cannot be taken up where it was


class FleetRun:
    """Feeds, follows, saves."""

    def __init__(self, work: FleetWork, show: Show) -> None:
        self.work, self.show = work, show
        self.progress = Progress()
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self.result: LocalPlan | None = None
        self.result_stages: dict[int, StageMetrics] = {}
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self._labels = [v.name for v in work.program.outputs]
        self._clusters: dict[str, ClusterRun] = {}
        self._settled = self._samples = self._number = 0
        self._bad: tuple[str, int] | None = None
        self._began = 0.0

    def run(
        self, batches: Batches, steps: int | None, validate: Callable[[], Sequence[Any]] | None, every: int
    ) -> None:
        """Train for `steps` batches, or until the data end. Ctrl-C ends early and saves; a second one at once."""
        work = self.work
        desk = Desk(work.maker, work.supply, work.folder, self._notes, work.keeping)
        work.maker.checkpoint = work.start

        def make() -> Service:
            service = Service(
                work.service, desk, run=work.name, steps=steps, release=__version__,
                first=0 if work.start is None else work.start.manifest.batches, resume=work.resume,
                on_event=lambda event: self._notes.put(Happened(event)), live=self._live,
            )  # fmt: skip
            self._take_up(service.coordinator.state.leases)
            return service

        try:
            listening = Serving(self.work.service.directory, make)
            with listening as serving, self._open_log() as log, Interrupt() as stop:
                self._serving, self._log, self._stop = serving, log, stop
                self.show.invited(serving.ticket)
                self._pass_over(batches)
                wrong = self._feed_all(batches, steps, validate, every)
                self._finish(None if wrong else validate)
        finally:
            work.keeping.close()
            for path in self.work.folder.glob(".*.safetensors*"):
                path.unlink(missing_ok=True)
        if wrong is not None:
            wrong.add_note(f"The {self._settled} steps before it are saved in {self._model}.")
            raise wrong
        if self._bad is not None:
            raise NotFinite(
                f"the loss of cluster {self._bad[0]} is not a finite number in its step {self._bad[1] + 1}: the "
                f"weights before that step are in {self._model}. Try a smaller learning rate, warm-up or clip_norm, "
                "and look at that batch"
            )

    def _open_log(self) -> IO[str]:
        return (self.work.folder / "metrics.jsonl").open("a" if self.work.resume else "w")

    def _take_up(self, leases: Leases) -> None:
        """Where the data go on, if the run had an earlier life. Called before anybody can come."""
        self._number = leases.settled_below
        self.work.supply.go_on(leases.settled_below, leases.next_new, leases.unsettled)
        self._settled = self.progress.step = leases.next_new - len(leases.unsettled)

    def _pass_over(self, batches: Batches) -> None:
        """What was trained in an earlier life of this run."""
        if self._number:
            self.show.told(f"passing over {self._number} batches of the data, which were trained before")
            batches.skip(self._number)

    _serving: Serving
    _log: IO[str]
    _stop: Interrupt

    @property
    def _model(self) -> Path:
        return self.work.folder / "model.safetensors"

    def _live(self) -> Live:
        """Called in the coordinator's loop: copies first, for this thread may be changing them."""
        clusters = dict(self._clusters)
        return Live(
            metrics={(c, i): m for c, t in clusters.items() for i, m in dict(t.record.stages).items()},
            losses={c: t.losses[-1] for c, t in clusters.items() if t.losses},
            samples_per_s={c: t.samples_per_s for c, t in clusters.items()},
            relay=self._serving.service.coordinator.hub.stats(),
            wishes=self.work.service.wishes,
        )

    # feeding

    def _feed_all(
        self, batches: Batches, steps: int | None, validate: Callable[[], Sequence[Any]] | None, every: int
    ) -> Exception | None:
        """Feed until the end; what went wrong with the user's data, if anything did."""
        supply = self.work.supply
        number = self._number
        while (steps is None or number < steps) and not self._is_over():
            self._until(lambda: supply.has_room or self._is_over())
            if self._is_over():
                break
            try:
                if validate is not None and every and number and number % every == 0:
                    self._evaluate(self._leading(), validate(), step=number, fresh=False)
                batch = batches.next()
                if batch is None:
                    break
                supply.offer(batch)
            except RavnestError:
                raise
            except Exception as error:  # the user's own iterator, or a batch that does not fit
                return error
            number += 1
            self._serving.soon(lambda coordinator: coordinator.running.more())
            self._checkpoint_if_due()
        return None

    def _checkpoint_if_due(self) -> None:
        """Ask the cluster that has come furthest for what it has learnt, after the last window that it was fed."""
        keeping, leading = self.work.keeping, self._leading()
        for news in keeping.news():
            self.show.told(news)
        if not leading or not keeping.is_due(self._settled):
            return
        cluster = leading[0]
        training = self._clusters[cluster]
        is_alone = len(self._clusters) == 1

        def look(coordinator: Coordinator) -> tuple[int, int] | None:
            live = coordinator.running.clusters.get(cluster)
            if live is None or live.retires is not None:
                return None
            leases = coordinator.state.leases
            is_in_order = is_alone and not leases.waiting
            return live.feeder.windows, leases.next_new if is_in_order else leases.settled_below

        found = self._serving.call(look)
        if found is None:
            return
        updates, batches = found
        if keeping.begin(cluster, training.plan, updates=updates, batches=batches, trained=self._settled):
            self._serving.call(lambda c: c.running.checkpoint(cluster, at=updates, whole=is_alone))

    def _is_over(self) -> bool:
        return self._bad is not None or self._stop.asked

    def _leading(self) -> list[str]:
        """The cluster that has trained the most, if any trains."""
        training = [c for c, t in self._clusters.items() if t.began_s]
        return [max(training, key=lambda c: self._clusters[c].record.windows_done)] if training else []

    def _evaluate(self, clusters: Sequence[str], batches: Sequence[Any], *, step: int, fresh: bool) -> None:
        """Send held-out batches through these clusters."""
        pieces = self.work.supply.held_out(batches) if clusters else []
        for cluster in clusters:
            evaluation = self._clusters[cluster].record.begin_evaluation(step)
            evaluation.sent, evaluation.is_all_sent = len(pieces), True
            self._serving.call(partial(_evaluate, cluster=cluster, first=evaluation.first, pieces=pieces, fresh=fresh))

    # following

    def _until(self, is_so: Callable[[], bool], timeout_s: float = math.inf, what: str = "") -> None:
        """Handle notes until something is so."""
        until = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > until:
                raise RavnestError(f"{what} took longer than {timeout_s:g} s")
            try:
                note = self._notes.get(timeout=_LOOK_S)
            except queue.Empty:
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
                self._settled += 1
                self.progress.step += not self._clusters  # trained while this coordinator was not there
            case Ended(cluster=cluster):
                self._clusters.pop(cluster, None)
                self.work.keeping.ended(cluster)
            case Fed(cluster=cluster, window=window, pieces=pieces) if cluster in self._clusters:
                training = self._clusters[cluster]
                training.fed = window + 1
                training.samples[window] = sum(piece.samples for piece in pieces if piece.share)
                for i, piece in enumerate(pieces):
                    training.record.fed(window * training.record.accumulate + i, piece.share)
            case Reported(cluster=cluster, stage=stage, report=report) if cluster in self._clusters:
                self._reported(cluster, stage, report)

    def _happened(self, event: Event) -> None:
        if isinstance(event, LeaseGranted | LeaseSettled):
            return
        text = sentence(event)
        if text is not None and not isinstance(event, CallerRefused):
            self.show.told(text)
        if isinstance(event, PlanMade):
            for cluster in event.clusters:
                plan = self.work.maker.plans[cluster.id]
                record = Record(self._labels, cluster.accumulate, len(cluster.members), first=cluster.begin)
                self._clusters[cluster.id] = ClusterRun(plan, record, fed=cluster.begin)
                self.show.planned(plan, cluster.id)
            self.work.supply.lead = max(4, 2 * len(self._clusters))
            self._write_plans()
        elif isinstance(event, NodeReady) and self._serving.call(lambda c: c.state.is_training(event.cluster)):
            training = self._clusters.get(event.cluster)
            if training is not None and not training.began_s:
                training.began_s = time.monotonic()
                self._began = self._began or training.began_s

    def _reported(self, cluster: str, stage: int, report: Reports) -> None:
        training = self._clusters[cluster]
        record = training.record
        match report:
            case Lost(microbatch=microbatch, values=values):
                if record.lost(microbatch, values) and self._bad is None:
                    self._bad = cluster, microbatch // record.accumulate
                    self._serving.soon(lambda c: c.running.end_after(cluster, microbatch // record.accumulate))
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
                keeping = self.work.keeping
                keeping.saved(cluster, stage, updates, failure)
                if not keeping.is_waiting:
                    self.work.maker.checkpoint = keeping.newest() or self.work.maker.checkpoint
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
        progress.samples_per_s = self._samples / max(time.monotonic() - self._began, 1e-9)
        progress.clusters = {c: t.words() for c, t in self._clusters.items()}
        self._write({"step": progress.step, "cluster": cluster, "loss": means[0], **progress.metrics,
                     "seconds": self._seconds(),
                     "stages": [msgspec.structs.asdict(m) for m in training.record.stages.values()]})  # fmt: skip
        self.show.update(progress)

    def _evaluated(self, cluster: str, training: ClusterRun, found: dict[str, float]) -> None:
        training.validation = found[self._labels[0]]
        self.progress.validation = {name: value for name, value in found.items() if name != "step"}
        self.evaluations.append(found)
        self._write({"evaluation": found["step"], "cluster": cluster, **self.progress.validation,
                     "seconds": self._seconds()})  # fmt: skip
        self.show.update(self.progress)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _write(self, line: dict[str, Any]) -> None:
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()

    def _write_plans(self) -> None:
        content = {c: t.plan.content() for c, t in self._clusters.items()}
        (self.work.folder / "plan.json").write_text(json.dumps({"clusters": content}, indent=1) + "\n")

    # ending

    def _finish(self, validate: Callable[[], Sequence[Any]] | None) -> None:
        """Let what was fed come to its end, evaluate every cluster, and gather the weights of the best."""
        if self._is_over():
            self.work.supply.close()
        if not self._began and not self.work.supply.produced:
            raise RavnestError("no batch was trained, so there is nothing to save")
        if self._stop.asked and not self._began:
            raise RavnestError("stopped before any cluster trained: nothing is saved")
        self._until(self._all_settled)
        self._serving.call(lambda coordinator: coordinator.running.end_training())
        self._until(self._all_updated, _PATIENCE_S, "the last updates")
        if self._bad is None:
            self._average()
        if validate is not None and self._bad is None:
            trained = [c for c, t in self._clusters.items() if t.losses]
            self._evaluate(trained, validate(), step=self.progress.step, fresh=True)
            self._until(self._all_evaluated, _PATIENCE_S, "the last evaluation")
        self._save()

    def _all_settled(self) -> bool:
        """Nothing is out that could still be trained; what a cluster stopped for is not."""
        outstanding = self._serving.call(lambda c: {x: c.state.leases.outstanding_of(x) for x in c.running.clusters})
        waiting = self._serving.call(lambda c: c.state.leases.waiting)
        bad = self._bad[0] if self._bad is not None else None
        if any(batches for cluster, batches in outstanding.items() if cluster != bad):
            return False
        return self._is_over() or (not waiting and self._settled >= self.work.supply.produced)

    def _average(self) -> None:
        """Once more over what was trained since the last round; if that cannot be, each cluster has its own model."""
        self._serving.call(Coordinator.average_for_the_last_time)
        try:
            self._until(self._is_averaged, _AVERAGE_S, "the last averaging")
        except RavnestError as error:
            self.show.told(f"{error}: the clusters keep what they have")

    def _is_averaged(self) -> bool:
        return self._serving.call(lambda coordinator: coordinator.averaging.is_settled)

    def _all_evaluated(self) -> bool:
        return not any(training.record.is_evaluating for training in self._clusters.values())

    def _all_updated(self) -> bool:
        def end(cluster: str, training: ClusterRun) -> int:
            return self._bad[1] if self._bad is not None and self._bad[0] == cluster else training.fed

        return all(
            training.record.updates_of(stage) >= end(cluster, training)
            for cluster, training in self._clusters.items()
            if training.began_s
            for stage in range(training.record.num_stages)
        )

    def _save(self) -> None:
        """The weights of the best cluster that is there."""
        while self._clusters:
            best = min(self._clusters, key=lambda c: self._clusters[c].worth)
            if self._save_cluster(best):
                return
        raise RavnestError("every cluster was lost before its weights could be saved: nothing is left of this run")

    def _save_cluster(self, cluster: str) -> bool:
        training = self._clusters[cluster]
        if len(self._clusters) > 1:
            rounds = self._serving.call(lambda coordinator: coordinator.state.rounds_done)
            self.show.told(
                f"the model of this run is the average of its clusters, of which there were {rounds} rounds"
                if rounds
                else f"the model of this run is that of cluster {cluster}, the best of {len(self._clusters)} "
                f"(loss {training.worth:.4f}): they did not average"
            )
        self._serving.call(lambda coordinator: coordinator.running.save(cluster))
        wanted = training.record.num_stages
        self._until(
            lambda: len(training.saved) == wanted or cluster not in self._clusters, _PATIENCE_S, "sending the weights"
        )
        if cluster not in self._clusters:
            return False
        parts = [part_path(self.work.folder, cluster, i) for i in range(wanted)]
        gather(self.work.program, training.plan.stages, parts, self._model, self.work.seed)
        self.result, self.result_stages = training.plan, dict(training.record.stages)
        return True


def _evaluate(coordinator: Coordinator, cluster: str, first: int, pieces: Sequence[Piece], *, fresh: bool) -> None:
    coordinator.running.evaluate(cluster, first, pieces, fresh=fresh)
