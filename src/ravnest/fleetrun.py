"""A training run on whoever joins: feeds batches to the coordinator, keeps checkpoints, and puts the model together.

The model is the last average of the clusters. If they did not average, it is that of the best cluster, by the held-out
loss where there is one, else by its latest training losses; the run says so.

This thread iterates the user's data and shows progress; the coordinator's loop has a thread of its own (`Serving`).
What happens there comes here as notes in a queue (`Following`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import __version__
from .checkpoints import Checkpoint
from .clusterplan import ClusterMaker
from .clusterrun import ClusterRun
from .coordinator.coordinator import Coordinator
from .coordinator.leases import Leases
from .coordinator.requester import Piece
from .coordinator.service import Service, ServiceConfig
from .coordinator.status import Live
from .core.errors import NotFinite, RavnestError
from .core.metrics import StageMetrics
from .data import Batches
from .fleetdesk import Desk, Happened, part_path
from .fleetfollow import Following
from .fleetkeeping import FleetKeeping
from .graph import Program
from .interrupt import Interrupt
from .localplan import LocalPlan
from .metricsfile import MetricsFile
from .modelfile import gather
from .progress import Progress, Show
from .serving import Serving
from .supply import Supply

__all__ = ["FleetRun", "FleetWork"]

_PATIENCE_S = 600.0
_AVERAGE_S = 180.0
_MEND_S = 120.0


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
    """Feeds, saves."""

    def __init__(self, work: FleetWork, show: Show) -> None:
        self.work, self.show = work, show
        self.result: LocalPlan | None = None
        self.result_stages: dict[int, StageMetrics] = {}
        labels = [v.name for v in work.program.outputs]
        self._following = Following(labels, work.maker, work.keeping, show, work.folder, work.supply)
        self._clusters = self._following.clusters
        self._number = 0

    @property
    def progress(self) -> Progress:
        return self._following.progress

    @property
    def losses(self) -> list[float]:
        return self._following.losses

    @property
    def evaluations(self) -> list[dict[str, float]]:
        return self._following.evaluations

    def run(
        self, batches: Batches, steps: int | None, validate: Callable[[], Sequence[Any]] | None, every: int
    ) -> None:
        """Train for `steps` batches, or until the data end. Ctrl-C ends early and saves; a second one at once."""
        work, following = self.work, self._following
        desk = Desk(work.maker, work.supply, work.folder, following.notes, work.keeping)
        work.maker.checkpoint = work.start

        def make() -> Service:
            service = Service(
                work.service, desk, run=work.name, steps=steps, release=__version__,
                first=0 if work.start is None else work.start.manifest.batches, resume=work.resume,
                on_event=lambda event: following.notes.put(Happened(event)), live=self._live,
            )  # fmt: skip
            self._take_up(service.coordinator.state.leases)
            return service

        try:
            listening = Serving(work.service.directory, make)
            with listening as serving, Interrupt() as stop, self._open_log() as log:
                self._serving, self._stop = serving, stop
                following.begin(serving, log)
                self.show.invited(serving.ticket)
                self._pass_over(batches)
                wrong = self._feed_all(batches, steps, validate, every)
                self._finish(None if wrong else validate)
        finally:
            work.keeping.close()
            for path in work.folder.glob(".*.safetensors*"):
                path.unlink(missing_ok=True)
        if wrong is not None:
            wrong.add_note(f"The {following.settled} steps before it are saved in {self._model}.")
            raise wrong
        if following.bad is not None:
            raise NotFinite(
                f"the loss of cluster {following.bad[0]} is not a finite number in its step {following.bad[1] + 1}: "
                f"the weights before that step are in {self._model}. Try a smaller learning rate, warm-up or "
                "clip_norm, and look at that batch"
            )

    _serving: Serving
    _stop: Interrupt

    def _open_log(self) -> MetricsFile:
        return MetricsFile(self.work.folder / "metrics.jsonl", after=self.progress.step)

    def _take_up(self, leases: Leases) -> None:
        """Where the data go on, if the run had an earlier life. Called before anybody can come."""
        self._number = leases.settled_below
        self.work.supply.go_on(leases.settled_below, leases.next_new, leases.unsettled)
        self._following.settled = self.progress.step = leases.next_new - len(leases.unsettled)

    def _pass_over(self, batches: Batches) -> None:
        """What was trained in an earlier life of this run."""
        if self._number:
            self.show.told(f"passing over {self._number} batches of the data, which were trained before")
            batches.skip(self._number)

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
            averaged=dict(self._serving.service.coordinator.averaging.averaged),
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
            self._following.until(lambda: supply.has_room or self._is_over())
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
        """Of the cluster that has come furthest."""
        keeping, leading = self.work.keeping, self._leading()
        for news in keeping.news():
            self.show.told(news)
        if leading and keeping.is_due(self._following.settled):
            self._checkpoint(leading[0])

    def _checkpoint(self, cluster: str) -> None:
        """Ask a cluster for what it has learnt, after the last window that it was fed."""
        keeping, training = self.work.keeping, self._clusters[cluster]
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
        if keeping.begin(cluster, training.plan, updates=updates, batches=batches, trained=self._following.settled):
            self._serving.call(lambda c: c.running.checkpoint(cluster, at=updates, whole=is_alone))

    def _is_over(self) -> bool:
        return self._following.bad is not None or self._stop.asked

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

    # ending

    def _finish(self, validate: Callable[[], Sequence[Any]] | None) -> None:
        """Let what was fed come to its end, evaluate every cluster, and gather the weights of the best."""
        if self._is_over():
            self.work.supply.close()
        if not self._following.began_s and not self.work.supply.produced:
            raise RavnestError("no batch was trained, so there is nothing to save")
        if self._stop.asked and not self._following.began_s:
            raise RavnestError("stopped before any cluster trained: nothing is saved")
        self._following.until(self._all_settled)
        self._serving.call(lambda coordinator: coordinator.running.end_training())
        self._following.until(self._all_updated, _PATIENCE_S, "the last updates")
        if self._following.bad is None:
            self._average()
        if validate is not None and self._following.bad is None:
            trained = [c for c, t in self._clusters.items() if t.losses]
            self._evaluate(trained, validate(), step=self.progress.step, fresh=True)
            self._following.until(self._all_evaluated, _PATIENCE_S, "the last evaluation")
        self._keep_the_last()
        self._save()

    def _keep_the_last(self) -> None:
        """What was learnt in the end is a checkpoint too, if there are any: a run that is over can be gone on with."""
        keeping, leading = self.work.keeping, self._leading()
        if not keeping.wishes.every or not leading or self._following.bad is not None:
            return
        self._following.until(lambda: not keeping.is_waiting, _PATIENCE_S, "the last checkpoint")
        self._checkpoint(leading[0])
        self._following.until(lambda: not keeping.is_waiting, _PATIENCE_S, "the last checkpoint")

    def _all_settled(self) -> bool:
        """Nothing is out that could still be trained; what a cluster stopped for is not."""
        outstanding = self._serving.call(lambda c: {x: c.state.leases.outstanding_of(x) for x in c.running.clusters})
        waiting = self._serving.call(lambda c: c.state.leases.waiting)
        bad = self._following.bad[0] if self._following.bad is not None else None
        if any(batches for cluster, batches in outstanding.items() if cluster != bad):
            return False
        return self._is_over() or (not waiting and self._following.settled >= self.work.supply.produced)

    def _average(self) -> None:
        """Once more over what was trained since the last round; if that cannot be, each cluster has its own model."""
        self._serving.call(Coordinator.average_for_the_last_time)
        try:
            self._following.until(self._is_averaged, _AVERAGE_S, "the last averaging")
        except RavnestError as error:
            self.show.told(f"{error}: the clusters keep what they have")

    def _is_averaged(self) -> bool:
        return self._serving.call(lambda coordinator: coordinator.averaging.is_settled)

    def _all_evaluated(self) -> bool:
        return not any(training.record.is_evaluating for training in self._clusters.values())

    def _all_updated(self) -> bool:
        def end(cluster: str, training: ClusterRun) -> int:
            return (
                self._following.bad[1]
                if self._following.bad is not None and self._following.bad[0] == cluster
                else training.fed
            )

        return all(
            training.record.updates_of(stage) >= end(cluster, training)
            for cluster, training in self._clusters.items()
            if training.began_s
            for stage in range(training.record.num_stages)
        )

    def _save(self) -> None:
        """The weights of the best cluster that is there; one that is lost now is mended from its copies."""
        self._following.until(lambda: bool(self._clusters), _MEND_S, "mending a cluster to save its weights")
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
        self._following.until(
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
