"""Drives a run, local or on a fleet: feeds batches to the coordinator, writes checkpoints, assembles the model.

The model is the last average of the clusters. If they did not average, it is that of the best cluster: by the held-out
loss where there is one, else by its latest training losses.

This thread iterates the user's data and shows progress; the coordinator's loop has a thread of its own
(`CoordinatorThread`). Its events arrive here as notes in a queue (`RunMonitor`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ravnest import __version__
from ravnest.config import num_cores
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.events import Event
from ravnest.coordinator.policy.averaging import AveragingPolicy
from ravnest.coordinator.policy.leases import Leases
from ravnest.coordinator.requester import Microbatch
from ravnest.coordinator.service import CoordinatorConfig, CoordinatorServer
from ravnest.coordinator.status import RuntimeStatus
from ravnest.core.metrics import StageMetrics
from ravnest.dashboard.contributions import NodeContribution
from ravnest.errors import NotFinite, RavnestError, WorkerLost
from ravnest.run.checkpoint.start import gather
from ravnest.run.cluster_builder import ClusterBuilder
from ravnest.run.cluster_progress import ClusterProgress, RunMonitor
from ravnest.run.control import RunControl
from ravnest.run.coordinator_thread import CoordinatorThread
from ravnest.run.dashboard_feed import DashboardFeed
from ravnest.run.data import Batches, BatchQueue
from ravnest.run.event_feed import EventFeed
from ravnest.run.fleet import fleet_builder, fleet_coordinator
from ravnest.run.local import LocalNodes, local_builder, local_coordinator, local_nodes
from ravnest.run.local_devices import local_devices
from ravnest.run.metrics import MetricsFile, Progress, ProgressView
from ravnest.run.plan import PipelinePlan
from ravnest.run.requester import EventOccurred, NodeMessage, RunRequester, part_path
from ravnest.run.result import Run
from ravnest.run.stop import Interrupt, StopRequest
from ravnest.run.traced_job import TracedJob

__all__ = ["train"]


_TIMEOUT_S = 600.0
_AVERAGE_S = 180.0
_REPAIR_S = 120.0
_AVERAGE_BATCHES = 4  # of each cluster between two rounds: `benchmarks.clusters` shows why

Validate = Callable[[], Sequence[Any]]


def train(
    job: TracedJob, batches: Batches, validate: Validate | None, view: ProgressView, feed: EventFeed, stop: StopRequest
) -> Run:
    """Train a job to its end, on this machine or on PCs that join."""
    try:
        with _prepared(job, view) as prepared:
            driver = RunDriver(job, prepared, view, feed, stop)
            driver.run(batches, validate)
    except BaseException as error:
        feed.end("failed", str(error) or type(error).__name__)
        raise
    assert driver.result is not None
    feed.end("stopped" if stop.is_requested else "finished", stop.reason or "")
    return Run(
        job.folder, driver.result, driver.losses, driver.evaluations, driver.stages, driver.progress.samples_per_s,
        steps=driver.progress.step, contributions=driver.contributions,
    )  # fmt: skip


@dataclass(frozen=True)
class _Prepared:
    """The parts of a run that differ between this machine and a fleet."""

    builder: ClusterBuilder
    coordinator: CoordinatorConfig
    nodes: LocalNodes | None = None


@contextlib.contextmanager
def _prepared(job: TracedJob, view: ProgressView) -> Iterator[_Prepared]:
    config = job.config
    every = _AVERAGE_BATCHES * job.batch_size if config.average_every is None else config.average_every
    averaging = AveragingPolicy(
        average_every=every, codec=config.averaging_compression,
        outer="plain" if config.outer_optimizer == "none" else config.outer_optimizer,
    )  # fmt: skip
    if config.listens:
        yield _Prepared(fleet_builder(job, view), fleet_coordinator(job, averaging))
        return
    builder: ClusterBuilder
    devices = local_devices(config)
    if config.clusters == 0:
        builder = planner = fleet_builder(job, view)
        nodes_of_job = local_nodes(job, devices, planner.gflops)
    else:
        builder, nodes_of_job = local_builder(job, view, num_cores(), devices), local_nodes(job, devices)
    with nodes_of_job as nodes:
        yield _Prepared(builder, local_coordinator(job, averaging, nodes.sockets), nodes)


class RunDriver:
    """One run, from the first batch to the saved model."""

    def __init__(
        self, job: TracedJob, prepared: _Prepared, view: ProgressView, feed: EventFeed, stop: StopRequest
    ) -> None:
        self._job, self._prepared, self._view, self._feed, self._stop = job, prepared, view, feed, stop
        self._queue = BatchQueue(
            job.program, batch_size=job.batch_size, max_batch=prepared.builder.microbatch, weight=job.weight
        )
        self._checkpoints = job.checkpoints()
        self._monitor = RunMonitor(
            [v.name for v in job.program.outputs], prepared.builder, self._checkpoints, view, job.folder, self._queue,
            feed, is_local=prepared.nodes is not None,
        )  # fmt: skip
        self._clusters = self._monitor.clusters
        if prepared.nodes is not None:
            prepared.nodes.on_message = lambda text, is_failure: self._monitor.notes.put(NodeMessage(text, is_failure))
        self._dashboard = DashboardFeed(job, prepared.builder)
        self._monitor.on_line = self._dashboard.add_line
        self._monitor.on_wait = stop.check
        self._checkpoints.on_complete = feed.checkpoint_done
        self._first_batch = 0
        self._ordered = ("", 0)  # the last checkpoint ordered from a cluster that trains alone: cluster, step
        self.result: PipelinePlan | None = None
        self.stages: dict[int, StageMetrics] = {}
        self.contributions: dict[str, NodeContribution] = {}

    _thread: CoordinatorThread
    _has_coordinator = False

    @property
    def progress(self) -> Progress:
        return self._monitor.progress

    @property
    def losses(self) -> list[float]:
        return self._monitor.losses

    @property
    def evaluations(self) -> list[dict[str, float]]:
        return self._monitor.evaluations

    def run(self, batches: Batches, validate: Validate | None) -> None:
        """Train for the configured steps, or until the data end.

        Ctrl-C ends the run early and saves the model; a second Ctrl-C ends it at once.
        """
        job, monitor, coordinator = self._job, self._monitor, self._prepared.coordinator
        (job.folder / "coordinator.txt").write_text(f"{coordinator.directory.resolve()}\n")  # for `ravnest status`
        data_error: Exception | None = None
        try:
            thread = CoordinatorThread(coordinator.directory, self._make_server, self._prepared.nodes)
            with thread as self._thread, Interrupt(self._stop), self._open_log() as log:
                self._has_coordinator = True
                monitor.begin(thread, log)
                self._feed.start(job, step=self.progress.step, samples=log.samples, seconds=log.seconds)
                self._dashboard.begin(thread, self._view)
                self._view.started(RunControl(thread, self._prepared.nodes, self._stop.request))
                if thread.ticket:
                    self._view.invited(thread.ticket)
                self._skip(batches)
                data_error = self._feed_all(batches, validate)
                self._finish(None if data_error else validate)
                self.contributions = thread.call(self._dashboard.contributions)
        finally:
            self._checkpoints.close()
            for path in job.folder.glob(".*.safetensors*"):
                path.unlink(missing_ok=True)
        if data_error is not None:
            data_error.add_note(f"The model after the {monitor.settled} steps before the error is in {self._model}.")
            raise data_error
        if monitor.bad is not None:
            cluster, step = monitor.bad
            is_alone = self._prepared.nodes is not None and job.config.clusters == 1
            where = f"step {step + 1}, batch {step}" if is_alone else f"step {step + 1} of cluster {cluster}"
            raise NotFinite(
                f"the loss is not finite in {where}: the weights before that step are in "
                f"{self._model}. Try a smaller learning rate, warm-up or clip_norm, and check that batch"
            )

    def _make_server(self) -> CoordinatorServer:
        job, prepared = self._job, self._prepared
        requester = RunRequester(prepared.builder, self._queue, job.folder, self._monitor.notes, self._checkpoints)
        server = CoordinatorServer(
            prepared.coordinator, requester, run=job.folder.name, steps=job.config.steps, release=__version__,
            first=0 if job.start is None else job.start.manifest.batches,
            resume=job.config.resume is not None and prepared.nodes is None,
            on_event=self._handle_event, live=self._runtime_status, extend=self._dashboard.dashboard.attach,
            contribution_of=self._dashboard.contribution_of,
        )  # fmt: skip
        self._resume(server.coordinator.state.leases)
        return server

    def _handle_event(self, event: Event) -> None:
        """Called in the coordinator's loop."""
        self._dashboard.handle_event(event)
        self._monitor.notes.put(EventOccurred(event))

    def _open_log(self) -> MetricsFile:
        return MetricsFile(self._job.folder / "metrics.jsonl", after=self.progress.step)

    def _resume(self, leases: Leases) -> None:
        """Set where the data continue. Called before any node can connect."""
        self._first_batch = leases.settled_below
        self._queue.resume(leases.settled_below, leases.next_new, leases.unsettled)
        self._monitor.settled = self.progress.step = leases.next_new - len(leases.unsettled)

    def _skip(self, batches: Batches) -> None:
        if self._first_batch:
            self._view.message(f"skipping {self._first_batch} batches of the data, which are trained already")
            batches.skip(self._first_batch)

    @property
    def _model(self) -> str:
        return str(self._job.folder / "model.safetensors")

    def _runtime_status(self) -> RuntimeStatus:
        """Called in the coordinator's loop: copies first, because this thread may change them."""
        if not self._has_coordinator:
            return RuntimeStatus()
        clusters, coordinator = dict(self._clusters), self._thread.service.coordinator
        return RuntimeStatus(
            metrics={(c, i): m for c, t in clusters.items() for i, m in dict(t.tracker.stages).items()},
            losses={c: t.losses[-1] for c, t in clusters.items() if t.losses},
            samples_per_s={c: t.samples_per_s for c, t in clusters.items()},
            averages=dict(coordinator.averaging.latest_averages),
            relay=coordinator.relay.stats(),
            policy=self._prepared.coordinator.membership,
        )

    # feeding

    def _feed_all(self, batches: Batches, validate: Validate | None) -> Exception | None:
        """Feed until the end; returns the error of the user's data, if there was one."""
        config, number = self._job.config, self._first_batch
        if self._prepared.nodes is not None:  # so that the first checkpoints and evaluations find their cluster
            self._monitor.pump_until(lambda: bool(self._clusters) or self._is_over())
        while (config.steps is None or number < config.steps) and not self._is_over():
            self._monitor.pump_until(lambda: self._queue.has_room or self._is_over())
            if self._is_over():
                break
            try:
                if validate is not None and config.validate_every and number and number % config.validate_every == 0:
                    self._evaluate(
                        self._leading(is_started=self._prepared.nodes is None), validate(), step=number, fresh=False
                    )
                is_first_pass = batches.epochs == 0
                batch = batches.next()
                if batch is None:
                    break
                if is_first_pass and batches.epochs:
                    self._report_restart(number)
                self._order_checkpoint(number)
                self._queue.offer(batch)
            except RavnestError:
                raise
            except Exception as error:  # of the user's iterator, or a batch that does not match the first ones
                if self._stop.is_requested:  # Ctrl-C also ended the worker processes of the user's loader
                    break
                return error
            number += 1
            self._thread.soon(lambda coordinator: coordinator.running.offer_batches())
            for text in self._checkpoints.messages():
                self._view.message(text)
        return None

    def _report_restart(self, number: int) -> None:
        config = self._job.config
        if config.epochs is None:
            end = "" if config.steps else "; --steps or --epochs ends the run, and so does Ctrl-C"
            self._view.message(f"the data ended after {number} batches and start over{end}")

    def _order_checkpoint(self, number: int) -> None:
        """Order the next checkpoint before batch `number` is offered: of a step that `checkpoint_every` divides.

        A cluster that trains alone writes it after exactly that many batches. Of several clusters, the one that has
        made the most progress writes it once that many batches are trained, one checkpoint at a time.
        """
        every, leading = self._checkpoints.config.every, self._leading(is_started=False)
        if not every or not leading:
            return
        if len(self._clusters) == 1:
            steps, target = self._job.config.steps, (number // every + 1) * every
            is_due = (steps is None or target <= steps) and self._ordered != (leading[0], target)
        else:
            target = self._monitor.settled // every * every
            is_due = target > max(self._checkpoints.last_step, self._first_batch) and not self._checkpoints.is_waiting
        if is_due and self._checkpoint(leading[0], target):
            self._ordered = leading[0], target

    def _checkpoint(self, cluster: str, target: int | None = None) -> bool:
        """Order a checkpoint of step `target` from a cluster, or of the last step that it was fed.

        Returns False if it cannot be ordered now: batches of a lost cluster wait, or earlier ones are still trained.
        """
        training, is_alone = self._clusters[cluster], len(self._clusters) == 1

        def position(coordinator: Coordinator) -> tuple[int, int] | None:
            live = coordinator.running.clusters.get(cluster)
            if live is None or live.retire_reason is not None:
                return None
            leases = coordinator.state.leases
            if is_alone and not leases.waiting:
                step = leases.next_new if target is None else target
                return live.feeder.steps + step - leases.next_new, step
            if target is not None and (is_alone or leases.settled_below < target):
                return None
            return live.feeder.steps, leases.settled_below if target is None else target

        at = self._thread.call(position)
        if at is None:
            return False
        updates, step = at
        if self._checkpoints.begin(cluster, training.plan, updates=updates, step=step):
            self._thread.call(lambda c: c.running.checkpoint(cluster, at=updates, whole=is_alone))
        return True

    def _is_over(self) -> bool:
        return self._monitor.bad is not None or self._stop.is_requested

    def _leading(self, *, is_started: bool = True) -> list[str]:
        """Return the cluster that has trained the most steps, if there is one."""
        training = [c for c, t in self._clusters.items() if t.began_s or not is_started]
        return [max(training, key=lambda c: self._clusters[c].tracker.steps_done)] if training else []

    def _evaluate(self, clusters: Sequence[str], batches: Sequence[Any], *, step: int, fresh: bool) -> None:
        """Send held-out batches through these clusters; through one alone, after exactly the batches offered so far."""
        microbatches = self._queue.held_out(batches) if clusters else []
        for cluster in clusters:
            evaluation = self._clusters[cluster].tracker.begin_evaluation(step)
            evaluation.sent, evaluation.is_all_sent = len(microbatches), True
            self._thread.call(
                partial(
                    _evaluate, cluster=cluster, first=evaluation.first, microbatches=microbatches, fresh=fresh,
                    offered=self._queue.produced if len(self._clusters) == 1 and not fresh else None,
                )
            )  # fmt: skip

    # ending

    def _finish(self, validate: Validate | None) -> None:
        """Finish the batches in flight, evaluate every cluster, and save the best weights."""
        monitor = self._monitor
        if self._is_over():
            self._queue.close()
        if not monitor.began_s and not self._queue.produced:
            raise RavnestError("no batch was trained: nothing is saved")
        if self._stop.is_requested and not monitor.began_s:
            raise RavnestError("stopped before any cluster trained: nothing is saved")
        if self._stop.is_requested:
            self._view.message(
                f"{self._stop.reason}: stopping after the batches in flight, then saving; Ctrl-C again ends at once"
            )
        monitor.pump_until(self._all_settled)
        self._thread.call(lambda coordinator: coordinator.running.end_training())
        monitor.pump_until(self._all_updated, _TIMEOUT_S, "the last updates")
        if monitor.bad is None:
            self._average()
        if validate is not None and monitor.bad is None:
            trained = [c for c, t in self._clusters.items() if t.losses]
            self._evaluate(trained, validate(), step=self.progress.step, fresh=True)
            monitor.pump_until(self._all_evaluated, _TIMEOUT_S, "the last evaluation")
        self._save_last_checkpoint()
        self._save()

    def _save_last_checkpoint(self) -> None:
        """Write the final state as a checkpoint too, if the run writes any, so that a finished run can be resumed."""
        checkpoints, leading = self._checkpoints, self._leading()
        if not checkpoints.config.every or not leading or self._monitor.bad is not None:
            return
        end = self._clusters[leading[0]].tracker.steps_done
        checkpoints.discard_after(end)
        self._monitor.pump_until(lambda: not checkpoints.is_waiting, _TIMEOUT_S, "the last checkpoint")
        checkpoints.join()
        is_last = len(self._clusters) == 1 or checkpoints.last_step >= self._monitor.settled
        if not (is_last and checkpoints.has(leading[0], end)):  # other clusters may have trained since
            self._checkpoint(leading[0])
            self._monitor.pump_until(lambda: not checkpoints.is_waiting, _TIMEOUT_S, "the last checkpoint")
            checkpoints.join()
        for text in checkpoints.messages():
            self._view.message(text)

    def _all_settled(self) -> bool:
        """Return whether no batch is leased that can still be trained; those of a cluster that stopped cannot."""
        outstanding = self._thread.call(lambda c: {x: c.state.leases.outstanding_of(x) for x in c.running.clusters})
        waiting = self._thread.call(lambda c: c.state.leases.waiting)
        bad = self._monitor.bad[0] if self._monitor.bad is not None else None
        if any(batches for cluster, batches in outstanding.items() if cluster != bad):
            return False
        return self._is_over() or (not waiting and self._monitor.settled >= self._queue.produced)

    def _average(self) -> None:
        """Average the weights once more; if that fails, each cluster keeps its own."""
        self._thread.call(Coordinator.start_final_averaging)
        try:
            self._monitor.pump_until(self._is_averaged, _AVERAGE_S, "the last averaging")
        except WorkerLost:
            raise
        except RavnestError as error:
            self._view.message(f"{error}: the clusters keep their own weights")

    def _is_averaged(self) -> bool:
        return self._thread.call(lambda coordinator: coordinator.averaging.is_settled)

    def _all_evaluated(self) -> bool:
        return not any(training.tracker.is_evaluating for training in self._clusters.values())

    def _all_updated(self) -> bool:
        bad = self._monitor.bad

        def end(cluster: str, training: ClusterProgress) -> int:
            return bad[1] if bad is not None and bad[0] == cluster else training.fed

        return all(
            training.tracker.updates_of(stage) >= end(cluster, training)
            for cluster, training in self._clusters.items()
            if training.began_s
            for stage in range(training.tracker.num_stages)
        )

    def _save(self) -> None:
        """Save the weights of the best cluster; a cluster that is lost now is repaired from its replicas."""
        self._monitor.pump_until(lambda: bool(self._clusters), _REPAIR_S, "repairing a cluster to save its weights")
        while self._clusters:
            best = min(self._clusters, key=lambda c: self._clusters[c].ranking_loss)
            if self._save_cluster(best):
                return
        raise RavnestError("every cluster was lost before its weights could be saved: nothing is saved")

    def _save_cluster(self, cluster: str) -> bool:
        training = self._clusters[cluster]
        if len(self._clusters) > 1:
            rounds = self._thread.call(lambda coordinator: coordinator.state.rounds_done)
            self._view.message(
                f"the model of this run is the average of its clusters, after {rounds} rounds"
                if rounds
                else f"the clusters did not average: the model of this run is that of cluster {cluster}, the best of "
                f"{len(self._clusters)} (loss {training.ranking_loss:.4f})"
            )
        self._thread.call(lambda coordinator: coordinator.running.save_weights(cluster))
        num_stages = training.tracker.num_stages
        self._monitor.pump_until(
            lambda: len(training.saved) == num_stages or cluster not in self._clusters,
            _TIMEOUT_S,
            "sending the weights",
        )
        if cluster not in self._clusters:
            return False
        job = self._job
        parts = [part_path(job.folder, cluster, i) for i in range(num_stages)]
        gather(
            job.program, training.plan.stages, parts, job.folder / "model.safetensors", job.start_weights,
            step=self.progress.step,
        )  # fmt: skip
        self.result, self.stages = training.plan, dict(training.tracker.stages)
        return True


def _evaluate(
    coordinator: Coordinator,
    cluster: str,
    first: int,
    microbatches: Sequence[Microbatch],
    offered: int | None,
    *,
    fresh: bool,
) -> None:
    coordinator.running.evaluate(cluster, first, microbatches, fresh=fresh, offered=offered)
