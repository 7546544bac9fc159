"""Runs clusters: starts and ends them, leases batches to them, and sends commands to their members.

A cluster can be retired: it gets no further batches, and ends when it has trained those it has. Its members then form
another cluster, which continues from their state; no batch is trained twice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ravnest.coordinator.context import CoordinatorContext
from ravnest.coordinator.events import (
    ClusterEnded,
    ClusterSpec,
    LeaseGranted,
    LeaseReturned,
    LeaseSettled,
    NodeQuarantined,
)
from ravnest.coordinator.http.feed import FeedConnection
from ravnest.coordinator.policy.feed import FeedController
from ravnest.coordinator.policy.replication import RestorePlan
from ravnest.coordinator.requester import Microbatch, StageFiles
from ravnest.core.metrics import StageMetrics
from ravnest.errors import FrameError
from ravnest.protocol.commands import MAX_CANDIDATES, Command, EndAfter, PredictionReport, SaveState
from ravnest.protocol.control import Assignment, DesiredAssignment, ReplicaSource, StageCommand
from ravnest.protocol.peer import Peer
from ravnest.protocol.pipeline import feed_purpose
from ravnest.transport.introduction import Introduction

__all__ = ["ActiveCluster", "ClusterService", "PreparedCluster"]

_RETIRE_TIMEOUT_S = 30.0  # for a retired cluster to train the batches it has

Prediction = tuple[tuple[int, ...], tuple[float | None, ...]]  # tokens, the most probable first, and their scores


class ActiveCluster:
    """A forming or training cluster: its assignments, its feed, its commands and its metrics.

    Calls `lease` for the next batch and its microbatches, `settle` when a batch is trained, and `fail` with the
    members at fault when the cluster cannot continue.
    """

    def __init__(
        self,
        plan: ClusterSpec,
        assignments: Sequence[Assignment],
        feeder: FeedController,
        lease: Callable[[ActiveCluster], tuple[int, Sequence[Microbatch]] | None],
        settle: Callable[[ActiveCluster, int, int], None],
        fail: Callable[[ActiveCluster, str, tuple[str, ...]], None],
    ) -> None:
        self.plan, self.assignments, self.feeder = plan, list(assignments), feeder
        self.id, self.generation = plan.id, plan.generation
        self.is_training = False
        self.is_over = False
        self.retire_reason: str | None = None  # if set, the cluster gets no further batches
        self.retire_deadline_s = 0.0
        self.relay_tokens: list[str] = []
        self.max_weights_bytes: list[int] = []
        self.metrics: dict[int, StageMetrics] = {}
        self.commands: list[Command] = []  # to all members
        self._member_commands: dict[str, list[Command]] = {}  # to one member
        self._lease, self._settle, self._fail = lease, settle, fail
        self._feed: FeedConnection | None = None

    def assignment_of(self, name: str) -> Assignment | None:
        stage = self.stage_of(name)
        return None if stage is None else self.assignments[stage]

    def stage_of(self, name: str) -> int | None:
        return self.plan.members.index(name) if name in self.plan.members else None

    @property
    def min_updates(self) -> int:
        """Updates that every stage has made, according to its reports."""
        first, stages = self.plan.first_update, range(len(self.assignments))
        return min(self.metrics[i].updates if i in self.metrics else first for i in stages)

    def commands_for(self, name: str) -> list[StageCommand]:
        """All valid commands to a member, to repeat them when it reconnects."""
        commands = (*self.commands, *self._member_commands.get(name, ()))
        return [StageCommand(self.generation, command) for command in commands]

    def command_member(self, name: str, command: Command) -> StageCommand:
        """Add a command to one member; it replaces an older one of its type."""
        older = self._member_commands.get(name, [])
        self._member_commands[name] = [c for c in older if type(c) is not type(command)] + [command]
        return StageCommand(self.generation, command)

    def end_after(self, updates: int) -> StageCommand:
        return self.command_all(EndAfter(updates))

    def save(self) -> StageCommand:
        return self.command_all(SaveState())

    def command_all(self, command: Command) -> StageCommand:
        """Add a command to all members; it replaces an older one of its type."""
        self.commands = [c for c in self.commands if type(c) is not type(command)] + [command]
        return StageCommand(self.generation, command)

    def start(self) -> None:
        """Start training: all members are ready."""
        self.is_training = True
        self.pump()

    def pump(self) -> None:
        """Send messages while the feed has room."""
        feed = self._feed
        while feed is not None and feed.has_room and self.is_training and not self.is_over:
            if self.retire_reason is None and self.feeder.wants_batch and (leased := self._lease(self)) is not None:
                self.feeder.load(*leased)
            message = self.feeder.next_message()
            if message is None:
                return
            feed.send(message)

    @property
    def has_active_feed(self) -> bool:
        """Whether microbatches were sent on a connected feed: a new feed would miss them."""
        return self._feed is not None and self.feeder.has_sent

    def close(self) -> None:
        self.is_over = True
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    # FeedHandler

    def attached(self, connection: FeedConnection) -> None:
        older, self._feed = self._feed, connection
        if older is not None:
            older.close()
        self.pump()

    def acknowledged(self, microbatch: int) -> None:
        settled = self.feeder.acknowledge(microbatch)
        if settled is not None:
            self._settle(self, *settled)
        self.pump()

    def room(self) -> None:
        self.pump()

    def detached(self, connection: FeedConnection, reason: str, *, is_fault: bool) -> None:
        if self._feed is connection:
            self._feed = None
            first = self.plan.members[0]
            self._fail(self, f"the feed to {first} failed: {reason}", (first,) if is_fault else ())


@dataclass(frozen=True)
class PreparedCluster:
    """A planned cluster, the files of its stages, and the replicas it is restored from."""

    spec: ClusterSpec
    files: Sequence[StageFiles]
    restore: RestorePlan


class ClusterService:
    """All active clusters; runs in the coordinator's loop."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self.clusters: dict[str, ActiveCluster] = {}  # the one that got the last batch is last
        self.is_ending = False
        self._member_of: dict[str, ActiveCluster] = {}
        self._predictions: dict[int, tuple[str, asyncio.Future[Prediction]]] = {}  # by number: cluster and answer
        self._next_prediction = 0

    def cluster_of(self, name: str) -> ActiveCluster | None:
        """The cluster of a node."""
        return self._member_of.get(name)

    @property
    def members(self) -> list[str]:
        """All nodes in a cluster."""
        return list(self._member_of)

    @property
    def updates(self) -> dict[tuple[str, int], int]:
        """Updates of all stages, by cluster and stage."""
        return {(c, i): m.updates for c, active in self.clusters.items() for i, m in active.metrics.items()}

    # start and end

    def start_cluster(self, prepared: PreparedCluster, sources: Sequence[tuple[ReplicaSource, ...]]) -> None:
        """Start a planned cluster: its members get their assignments."""
        context, cluster = self._context, prepared.spec
        names = cluster.members
        tokens = [secrets.token_urlsafe(24) for _ in names[1:]]
        for token, pair in zip(tokens, pairwise(names), strict=True):
            context.relay.open(token, pair)
        feeder = FeedController(
            accumulate=cluster.accumulate, depth=cluster.depths[0], samples_per_s=cluster.samples_per_s,
            round_trip_s=2 * context.state.nodes[names[0]].profile.latency_s, first_step=cluster.first_update,
        )  # fmt: skip
        assignments = self._assignments(prepared, tokens, sources)
        active = ActiveCluster(cluster, assignments, feeder, self._lease, self._settle, self.fail_cluster)
        active.relay_tokens = tokens
        active.max_weights_bytes = [files.max_bytes for files in prepared.files]
        self.clusters[cluster.id] = active
        self._member_of |= dict.fromkeys(names, active)
        if self.is_ending:
            active.end_after(cluster.first_update)
        for name in names:
            self.send_assignment(name)

    def _assignments(
        self, prepared: PreparedCluster, tokens: Sequence[str], sources: Sequence[tuple[ReplicaSource, ...]]
    ) -> list[Assignment]:
        cluster, blobs, nodes = prepared.spec, self._context.blobs, self._context.state.nodes
        names = cluster.members

        def peer(stage: int, token: str) -> Peer:
            return Peer(name=names[stage], addresses=nodes[names[stage]].peer_addresses, relay_token=token)

        return [
            Assignment(
                generation=cluster.generation, cluster=cluster.id, stage=i, count=len(names),
                file=blobs.put(files.file), config=blobs.put(files.config),
                weights=None if files.weights is None else blobs.put(files.weights),
                before=peer(i - 1, tokens[i - 1]) if i else None,
                after=peer(i + 1, tokens[i]) if i + 1 < len(names) else None,
                first_update=cluster.first_update, sources=sources[i], states=tuple(map(blobs.put, files.states)),
            )
            for i, files in enumerate(prepared.files)
        ]  # fmt: skip

    def fail_cluster(self, active: ActiveCluster, reason: str, at_fault: tuple[str, ...] = ()) -> None:
        """End a cluster that cannot continue, and quarantine the members at fault."""
        for name in at_fault:
            self._context.record(NodeQuarantined(self._context.now_s(), name, reason))
        self.end_cluster(active.id, reason, is_lost=True)

    def end_cluster(self, cluster: str, reason: str, *, is_lost: bool, is_replanned: bool = False) -> None:
        context, active = self._context, self.clusters.pop(cluster, None)
        if active is None:
            return
        active.close()
        for asked, answer in self._predictions.values():
            if asked == cluster and not answer.done():
                answer.set_exception(ValueError(f"cluster {cluster} ended before it answered: try again"))
        for name in active.plan.members:
            del self._member_of[name]
        for token in active.relay_tokens:
            context.relay.close(token)
        for assignment in active.assignments:
            for blob in (assignment.file, assignment.config, assignment.weights, *assignment.states):
                if blob is not None:
                    context.blobs.drop(blob)
        for batch in sorted(context.state.leases.outstanding_of(cluster)):
            context.record(LeaseReturned(context.now_s(), cluster, batch, reason))
        context.record(ClusterEnded(context.now_s(), cluster, reason, is_lost, is_replanned))
        context.requester.cluster_ended(cluster, reason, is_lost=is_lost)
        for name in active.plan.members:
            self.send_assignment(name)
        self.offer_batches()

    def retire(self, cluster: str, reason: str, within_s: float = _RETIRE_TIMEOUT_S) -> None:
        """Lease it no further batches, and end it when it has trained those it has, or after `within_s`."""
        if (active := self.clusters.get(cluster)) is None:
            return
        deadline_s = self._context.now_s() + within_s
        if active.retire_reason is None:
            active.retire_reason, active.retire_deadline_s = reason, deadline_s
        active.retire_deadline_s = min(active.retire_deadline_s, deadline_s)
        self.end_retired()

    def end_retired(self) -> None:
        """End retired clusters in which every stage has trained all batches, or that take too long."""
        for active in list(self.clusters.values()):
            if active.retire_reason is not None:
                is_late = self._context.now_s() >= active.retire_deadline_s
                outstanding = self._context.state.leases.outstanding_of(active.id)
                if is_late or (not outstanding and active.min_updates >= active.feeder.steps):
                    self.end_cluster(active.id, active.retire_reason, is_lost=False, is_replanned=True)

    # leases

    def offer_batches(self) -> None:
        """Lease available batches, to the clusters in turn."""
        for active in list(self.clusters.values()):
            active.pump()

    def _lease(self, active: ActiveCluster) -> tuple[int, Sequence[Microbatch]] | None:
        context = self._context
        batch = context.state.leases.next_batch(active.id, context.requester.available())
        if batch is None:
            return None
        microbatches = context.requester.microbatches(batch, active.feeder.accumulate)
        samples = sum(microbatch.samples for microbatch in microbatches if microbatch.share)
        context.record(LeaseGranted(context.now_s(), active.id, batch, samples))
        context.requester.batch_started(active.id, active.feeder.steps, batch, microbatches)
        self.clusters[active.id] = self.clusters.pop(active.id)
        return batch, microbatches

    def _settle(self, active: ActiveCluster, batch: int, samples: int) -> None:
        self._context.record(LeaseSettled(self._context.now_s(), active.id, batch, samples))
        self._context.requester.batch_settled(batch)

    def feed_for(self, name: str, introduction: Introduction) -> ActiveCluster:
        """The cluster whose first stage connects its feed; raises `FrameError` for any other node."""
        active = self.cluster_of(name)
        if active is None or active.stage_of(name) != 0:
            raise FrameError(f"{name} is not the first stage of a cluster")
        if introduction != Introduction.of(active.generation, feed_purpose(active.id)):
            raise FrameError(f"{name} introduced itself for another cluster or generation than {active.generation}")
        if active.has_active_feed:
            raise FrameError(f"{name} opened a second feed while its cluster is being fed")
        return active

    # commands

    def send_assignment(self, name: str) -> None:
        active = self.cluster_of(name)
        if active is None:
            self._context.send(name, DesiredAssignment(None, self._context.state.idle_reason(name)))
            return
        self._context.send(name, DesiredAssignment(active.assignment_of(name), active.plan.reason))
        for command in active.commands_for(name):
            self._context.send(name, command)

    def send_command(self, name: str, command: Command) -> None:
        """Send a command to one member, and again when it reconnects."""
        if (active := self.cluster_of(name)) is not None:
            self._context.send(name, active.command_member(name, command))

    def _send_to_all(self, active: ActiveCluster, command: StageCommand) -> None:
        for name in active.plan.members:
            self._context.send(name, command)

    def end_training(self) -> None:
        """Lease no further batches: each cluster trains those it has."""
        self.is_ending = True
        for active in self.clusters.values():
            self._send_to_all(active, active.end_after(active.feeder.steps))
            active.feeder.release_evaluations()
            active.pump()

    def end_after(self, cluster: str, updates: int) -> None:
        if (active := self.clusters.get(cluster)) is not None:
            self._send_to_all(active, active.end_after(updates))

    def evaluate(
        self, cluster: str, first: int, microbatches: Sequence[Microbatch], *, fresh: bool, offered: int | None = None
    ) -> None:
        """Send held-out microbatches through a cluster: now, or after it was fed the first `offered` batches."""
        if (active := self.clusters.get(cluster)) is not None:
            leases = self._context.state.leases
            ahead = 0 if offered is None else max(0, offered - leases.next_new) + len(leases.waiting)
            active.feeder.evaluate(first, microbatches, fresh=fresh, after_batches=ahead)
            active.pump()

    async def predict(self, tokens: Sequence[int], timeout_s: float) -> Prediction:
        """Send a prompt through a training cluster; returns its most probable next tokens.

        Raises `ValueError` if the prompt is invalid or no cluster answers within the timeout.
        """
        prompt, position = self._context.requester.prompt(tokens)
        active = next((one for one in self.clusters.values() if one.is_training and not one.is_over), None)
        if active is None:
            raise ValueError("no cluster is training: wait for one, or generate from a checkpoint of the run")
        number, self._next_prediction = self._next_prediction, self._next_prediction + 1
        answer: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        self._predictions[number] = active.id, answer
        try:
            active.feeder.predict(number, prompt, (position,))
            active.pump()
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise ValueError(f"cluster {active.id} did not answer within {timeout_s:g} s") from None
        finally:
            del self._predictions[number]

    def handle_prediction(self, report: PredictionReport) -> None:
        """Answer the request that a prediction belongs to; it may have timed out."""
        sizes = [len(row) for row in (*report.tokens, *report.scores)]
        if len(report.tokens) != 1 or len(sizes) != 2 or not 1 <= sizes[0] == sizes[1] <= MAX_CANDIDATES:
            raise FrameError("the prediction does not belong to one prompt")
        _, answer = self._predictions.get(report.number, ("", None))
        if answer is not None and not answer.done():
            answer.set_result((report.tokens[0], report.scores[0]))

    def checkpoint(self, cluster: str, at: int, *, whole: bool) -> None:
        """Have each stage upload its whole state after `at` updates."""
        if (active := self.clusters.get(cluster)) is not None:
            self._send_to_all(active, active.command_all(SaveState(state="whole" if whole else "light", at=at)))

    def save_weights(self, cluster: str) -> None:
        """Have each stage upload its weights."""
        if (active := self.clusters.get(cluster)) is not None:
            self._send_to_all(active, active.save())
