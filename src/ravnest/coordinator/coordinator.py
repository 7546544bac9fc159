"""The coordinator: holds the state, carries out decisions, and handles messages of nodes.

Every change is an event, which is applied to the state and persisted. Everything runs in one asyncio loop. Services do
the work: `ClusterService` for running clusters, `PlanningService` for plans, `AveragingService` for averages,
`ReplicationService` for replicas, and `ResumeService` for clusters of an earlier process.

A cluster that was training when the coordinator stopped trains the batches it has; then each member stores the state of
its stage. The updates in the replica of the first stage are the steps that were trained: their leases are settled, the
others are returned. Such a cluster ends when all its members have reconnected and released their stages, or when
members that try to reconnect would have done so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ravnest.coordinator.apply import apply
from ravnest.coordinator.averaging import AveragingService
from ravnest.coordinator.clusters import ActiveCluster, ClusterService
from ravnest.coordinator.context import CoordinatorContext
from ravnest.coordinator.events import (
    ClusterEnded,
    ConnectionRejected,
    Event,
    LeaseGranted,
    LeaseReturned,
    LeaseSettled,
    LinkEstablished,
    NodeAddressChanged,
    NodeConnected,
    NodeKicked,
    NodeLeaving,
    NodeLost,
    NodeProfileChanged,
    NodeQuarantined,
    NodeReady,
    NodeReleased,
    NoteAdded,
    RoundClosed,
)
from ravnest.coordinator.http.limits import HttpTimeouts, RejectionLog
from ravnest.coordinator.http.session import Session
from ravnest.coordinator.notices import WaitNotices
from ravnest.coordinator.planning import PlanningService
from ravnest.coordinator.policy.averaging import AveragingPolicy
from ravnest.coordinator.policy.departure import can_take_over
from ravnest.coordinator.policy.membership import (
    ConsiderReplan,
    CreatePlan,
    Decision,
    EndCluster,
    LoseNode,
    MembershipPolicy,
    ReleaseNode,
    decide,
    next_decision_s,
)
from ravnest.coordinator.policy.replication import ReplicationPolicy
from ravnest.coordinator.replication import ReplicationService
from ravnest.coordinator.requester import Blobs, Requester
from ravnest.coordinator.state import ClusterRecord, CoordinatorState, LinkRecord
from ravnest.core.config import require
from ravnest.core.ids import COORDINATOR
from ravnest.errors import FrameError
from ravnest.protocol.commands import (
    AverageApplied,
    AverageReady,
    AveragingFailed,
    AveragingStarted,
    EvaluationReport,
    LinkReport,
    LossReport,
    PredictionReport,
    RingsReady,
    StageFailed,
    StageReady,
    StateSaved,
    StepReport,
)
from ravnest.protocol.control import (
    AddressChanged,
    AssignmentReleased,
    FromCoordinator,
    FromNode,
    Heartbeat,
    Hello,
    LeaveRequest,
    NodeWork,
    ProfileChanged,
    ReplicaStored,
    StageReport,
    Welcome,
    reconnect_interval_s,
)
from ravnest.protocol.peer import PeerAddresses
from ravnest.transport.address import check_address
from ravnest.transport.p2p.relay_server import RelayServer, RelayServerConfig

__all__ = ["Coordinator"]

_RECONNECT_ATTEMPT_S = 10.0  # that one attempt of a node may take
_LEAVE_RETIRE_S = 1.5  # for the cluster of a leaving node to train the batches it has
_RESTARTED = "the coordinator was restarted"


class ResumeService:
    """Ends the clusters that were training when the coordinator stopped; calls `on_ended` for each."""

    def __init__(self, context: CoordinatorContext, away_s: float, on_ended: Callable[[ClusterRecord], None]) -> None:
        """`away_s`: seconds between the last event of the earlier process and the start of this one."""
        self._context, self._on_ended = context, on_ended
        self._due_s = context.now_s() + reconnect_interval_s(away_s) + _RECONNECT_ATTEMPT_S
        self._released: dict[str, set[str]] = {cluster.plan.id: set() for cluster in context.state.live_clusters()}

    def __bool__(self) -> bool:
        return bool(self._released)

    def handle_release(self, name: str, generation: int) -> None:
        """A node has released its assignment of that generation."""
        for cluster, names in self._released.items():
            if self._context.state.clusters[cluster].plan.generation == generation:
                names.add(name)

    def tick(self) -> None:
        """End clusters whose members have all released their stages, or all of them when it is due."""
        is_late = self._context.now_s() >= self._due_s
        for cluster, names in list(self._released.items()):
            if is_late or names.issuperset(self._context.state.clusters[cluster].plan.members):
                self._end(self._context.state.clusters[cluster])

    def _end(self, cluster: ClusterRecord) -> None:
        context, now_s, plan = self._context, self._context.now_s(), cluster.plan
        del self._released[plan.id]
        trained = self._steps_trained(cluster) - plan.first_update - cluster.num_settled
        for batch, samples in list(cluster.fed_batches[: max(trained, 0)]):
            context.record(LeaseSettled(now_s, plan.id, batch, samples))
            context.requester.batch_settled(batch)
        for batch in context.state.leases.outstanding_of(plan.id):
            context.record(LeaseReturned(now_s, plan.id, batch, _RESTARTED))
        context.record(ClusterEnded(now_s, plan.id, _RESTARTED, is_lost=True))
        self._on_ended(cluster)

    def _steps_trained(self, cluster: ClusterRecord) -> int:
        """Updates in the first stage's own replica; reports of other nodes are not trusted."""
        held = self._context.state.nodes[cluster.plan.members[0]].replicas
        own = [one.replica.updates for one in held if (one.replica.cluster, one.replica.stage) == (cluster.plan.id, 0)]
        return max(own, default=0)


_TICK_INTERVAL_S = 0.05  # a tick visits all nodes, and events often concern many at once
_FREQUENT = LeaseGranted | LeaseSettled | ConnectionRejected  # no decision depends on these


class Coordinator:
    """Coordinates one run for a requester. `persist` is called with every event."""

    def __init__(
        self,
        state: CoordinatorState,
        requester: Requester,
        policy: MembershipPolicy,
        *,
        averaging: AveragingPolicy | None = None,
        replication: ReplicationPolicy | None = None,
        persist: Callable[[Event], None] = lambda event: None,
        clock: Callable[[], float] = time.time,
        timeouts: HttpTimeouts | None = None,
    ) -> None:
        self.state, self.requester, self.policy = state, requester, policy
        self.heartbeat_s = policy.heartbeat_s
        self._persist = persist
        self._start_s, self._started = clock(), time.monotonic()
        self._wake = asyncio.Event()
        self.rejections = RejectionLog(self.record, self.now_s, (timeouts or HttpTimeouts()).rejection_log_s)
        self.log_rejection = self.rejections.add
        self.relay = RelayServer(RelayServerConfig(on_rejected=self.log_rejection))
        self.blobs = Blobs()
        self.sessions: dict[str, Session] = {}
        self.running = ClusterService(self)
        self.averaging = AveragingService(self, averaging or AveragingPolicy())
        self.replication = ReplicationService(self, replication or ReplicationPolicy())
        self._planning = PlanningService(self)
        self._notices = WaitNotices(self)
        self.contribution_of: Callable[[str], NodeWork | None] = lambda name: None
        self._resuming: ResumeService | None = None
        self._late_failures: dict[str, int] = {}  # generation of the last one, by node

    def now_s(self) -> float:
        """Unix time, monotonic: not affected when the system clock is set."""
        return self._start_s + time.monotonic() - self._started

    def record(self, event: Event) -> None:
        apply(self.state, event)
        self._persist(event)
        if not isinstance(event, _FREQUENT):
            self._wake.set()

    def note(self, text: str) -> None:
        self.record(NoteAdded(self.now_s(), text))

    def send(self, name: str, message: FromCoordinator) -> None:
        """Send a message to a node, if it is connected."""
        if (session := self.sessions.get(name)) is not None:
            session.send(message)

    # decisions

    async def run(self) -> None:
        """Decide and act whenever the state has changed or a decision is due. Runs until cancelled."""
        last_tick_s = self.now_s()
        while True:
            self._wake.clear()
            now_s = self.now_s()  # one time for both calls: a decision due in between would be missed
            if now_s > last_tick_s + self.heartbeat_s:  # this process was suspended
                self.state.reset_liveness(now_s)
            last_tick_s = now_s
            self._tick(now_s)
            await asyncio.sleep(_TICK_INTERVAL_S)
            if self._wake.is_set():
                continue
            due_s = next_decision_s(self.state, now_s, self.policy)
            wait_s = min(max(due_s - self.now_s(), 0.0), self.heartbeat_s / 2)  # less than the check above allows
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _tick(self, now_s: float) -> None:
        for decision in decide(self.state, now_s, self.policy):
            self._execute(decision)
        self._notices.tick()
        if self._resuming:
            self._resuming.tick()
            return
        self.running.end_retired()
        self.averaging.tick()
        self.replication.tick()
        self._planning.tick()

    def _execute(self, decision: Decision) -> None:
        match decision:
            case LoseNode(name=name, reason=reason):
                self.remove_node(name, reason, is_voluntary=False)
            case ReleaseNode(name=name, reason=reason):
                self.remove_node(name, reason, is_voluntary=True)
            case EndCluster(cluster=cluster, reason=reason, at_fault=at_fault):
                if (active := self.running.clusters.get(cluster)) is not None:
                    self.running.fail_cluster(active, reason, at_fault)
            case CreatePlan() | ConsiderReplan():
                if not self._resuming:  # members of these clusters are about to be free
                    self._planning.execute(decision)

    def resume(self, away_s: float) -> None:
        """Continue a run that was training when the coordinator was stopped, `away_s` ago."""
        if self.state.round is not None:
            self.record(RoundClosed(self.now_s(), self.state.round.number, _RESTARTED))
        self._resuming = ResumeService(self, away_s, self._resumed_cluster_ended)
        leases = self.state.leases
        trained, waiting = leases.counts.settled, len(leases.unsettled)
        self.note(f"run resumed: {trained} batches are trained, {waiting} were leased when the coordinator stopped")

    def _resumed_cluster_ended(self, cluster: ClusterRecord) -> None:
        for name in cluster.plan.members:
            self.running.send_assignment(name)
        self.running.offer_batches()

    def start_final_averaging(self) -> None:
        """Average the samples since the last round: training is over."""
        self.averaging.is_final = True
        self._wake.set()

    # connections

    def handle_hello(self, session: Session, hello: Hello) -> None:
        name, now_s = session.name, self.now_s()
        _check_addresses(hello.addresses)
        previous = self.sessions.pop(name, None)
        if previous is not None:
            self.note(f"{name} reconnected from {session.address}: its connection from {previous.address} is closed")
            previous.disconnect("a newer connection of this node replaced this one", may_reconnect=False)
        self.sessions[name] = session
        active = self.running.cluster_of(name)
        if active is not None and active.is_training and hello.held_generation != active.generation:
            self.running.fail_cluster(active, f"{name} reconnected without its stage")
        self.record(
            NodeConnected(
                now_s, name, hello.profile, hello.addresses, session.address, hello.held_generation, hello.replicas
            )
        )
        self.state.mark_seen(name, now_s, "")
        self._notices.forget(name)
        if self.state.end_reason is not None:
            self.say_goodbye(name)
            return
        session.send(Welcome(run=self.state.run, heartbeat_s=self.heartbeat_s))
        self.running.send_assignment(name)

    def say_goodbye(self, name: str, *, is_run_over: bool = True) -> None:
        """Disconnect a node because the run has ended, with its contribution."""
        if (session := self.sessions.get(name)) is not None:
            session.disconnect(
                self.state.end_reason or "the run has ended", may_reconnect=True, is_run_over=is_run_over,
                contribution=self.contribution_of(name),
            )  # fmt: skip

    def handle_disconnect(self, session: Session, reason: str) -> None:
        """The connection of a node ended. It may continue training and reconnect; the liveness timeout decides."""
        if self.sessions.get(session.name) is session:
            del self.sessions[session.name]
            self.state.mark_disconnected(session.name)
            self.note(f"the connection to {session.name} ended: {reason}")

    def remove_node(self, name: str, reason: str, *, is_voluntary: bool) -> None:
        self.record(NodeLost(self.now_s(), name, reason, is_voluntary))
        self._fail_cluster_of(name, f"lost {name}: {reason}")
        session = self.sessions.pop(name, None)
        if session is not None:
            session.disconnect(reason, may_reconnect=not is_voluntary, contribution=self.contribution_of(name))

    def kick(self, name: str, reason: str) -> None:
        """Remove a node for good."""
        require(name in self.state.members, f"unknown node {name!r}: see `ravnest status`")
        self.record(NodeKicked(self.now_s(), name, reason))
        self._fail_cluster_of(name, f"{name} was kicked: {reason}")
        session = self.sessions.pop(name, None)
        if session is not None:
            session.disconnect(f"the requester has removed this node: {reason}", may_reconnect=False)

    def quarantine(self, cluster: str, stage: int, reason: str) -> None:
        """Quarantine the node of a stage that sent invalid values, and fail its cluster."""
        if (active := self.running.clusters.get(cluster)) is not None:
            name = active.plan.members[stage]
            self.record(NodeQuarantined(self.now_s(), name, reason, may_retry=False))
            self.running.fail_cluster(active, f"{name} sent invalid values: {reason}")

    def _fail_cluster_of(self, name: str, reason: str) -> None:
        if (active := self.running.cluster_of(name)) is not None:
            self.running.fail_cluster(active, reason)

    def _handle_leave(self, name: str, reason: str) -> None:
        """Retire the cluster of a leaving node; the node is released when its state is no longer needed."""
        if self.state.nodes[name].leaving_s is None:
            self.record(NodeLeaving(self.now_s(), name, reason))
            if (active := self.running.cluster_of(name)) is not None:
                is_handover = can_take_over(self.state, self.policy.min_stages)
                self.running.retire(active.id, f"{name} is leaving", _LEAVE_RETIRE_S if is_handover else 0.0)
                asyncio.get_running_loop().call_later(_LEAVE_RETIRE_S, self._wake.set)

    # messages of nodes

    def handle_message(self, session: Session, message: FromNode) -> None:
        name = session.name
        if self.sessions.get(name) is not session:
            raise FrameError("a newer connection of this node replaced this one")
        self.state.mark_seen(name, self.now_s(), message.activity[:200] if isinstance(message, Heartbeat) else None)
        match message:
            case AddressChanged(addresses=addresses):
                _check_addresses(addresses)
                if addresses != self.state.nodes[name].peer_addresses:
                    self.record(NodeAddressChanged(self.now_s(), name, addresses))
            case ProfileChanged(profile=profile):
                if profile != self.state.nodes[name].profile:
                    self.record(NodeProfileChanged(self.now_s(), name, profile))
            case StageReport():
                active = self.running.cluster_of(name)
                if active is not None and message.generation == active.generation:
                    self._handle_report(name, active, message)
                elif active is None:
                    self._handle_late_report(name, message)
            case AssignmentReleased(generation=generation, replica=replica):
                self.record(NodeReleased(self.now_s(), name, generation, replica))
                if self._resuming:
                    self._resuming.handle_release(name, generation)
            case ReplicaStored():
                self.replication.handle_report(name, message)
            case LeaveRequest(reason=reason):
                self._handle_leave(name, reason[:200] or "no reason given")
            case Hello():
                raise FrameError("expected one hello per session, got a second one")

    def _handle_report(self, name: str, active: ActiveCluster, message: StageReport) -> None:
        stage = active.stage_of(name)
        assert stage is not None
        is_last_stage = stage == len(active.plan.members) - 1
        match message.report:
            case StageReady():
                if name in self.state.clusters[active.id].not_ready:  # else it is repeated
                    self.record(NodeReady(self.now_s(), active.id, name))
                if not active.is_training and self.state.is_training(active.id):
                    active.start()
            case LinkReport() as report:
                self._handle_link(active, name, report)
            case StageFailed(reason=reason, is_consequence=is_consequence):
                if not is_consequence:
                    self.record(NodeQuarantined(self.now_s(), name, reason[:500]))
                self.running.fail_cluster(active, f"{name} (stage {stage}) failed: {reason[:500]}")
            case LossReport() | EvaluationReport() | PredictionReport() if not is_last_stage:
                raise FrameError(f"only the last stage sends a {type(message.report).__name__}")
            case EvaluationReport() as report:
                active.feeder.evaluation_received()
                self.requester.stage_reported(active.id, stage, report)
                active.pump()
            case PredictionReport() as report:
                active.feeder.evaluation_received()
                self.running.handle_prediction(report)
                active.pump()
            case StepReport(metrics=metrics) as report:
                active.metrics[stage] = metrics
                self._planning.handle_step_report(name, active.plan, stage, metrics)
                self.requester.stage_reported(active.id, stage, report)
                if active.retire_reason is not None:
                    self._wake.set()
            case LossReport() | StateSaved() as report:
                self.requester.stage_reported(active.id, stage, report)
            case RingsReady() | AveragingStarted() | AverageReady() | AveragingFailed() | AverageApplied() as report:
                self.averaging.handle_report(name, report)

    def _handle_late_report(self, name: str, message: StageReport) -> None:
        """The cluster is over; a neighbour may have reported its lost link before this node reported the cause."""
        match message.report:
            case StageFailed(reason=reason, is_consequence=False):
                if self._late_failures.get(name, 0) < message.generation <= self.state.generation:
                    self._late_failures[name] = message.generation  # each failure counts once
                    self.record(NodeQuarantined(self.now_s(), name, reason[:500]))

    def _handle_link(self, active: ActiveCluster, name: str, message: LinkReport) -> None:
        if message.peer not in (*active.plan.members, COORDINATOR) and message.peer not in self.state.ring_members:
            raise FrameError("the node reported a link to a node outside its cluster and rings")
        link = LinkEstablished(
            self.now_s(), active.id, name, message.peer, message.kind[:20], message.reason[:500], message.hint[:500]
        )
        known = self.state.clusters[active.id].links.get((name, message.peer))
        if known != LinkRecord(link.kind, link.reason, link.hint):  # else it is repeated
            self.record(link)


def _check_addresses(addresses: PeerAddresses) -> None:
    """Reject invalid addresses, which other nodes would dial. Raises `ValueError`."""
    for address in (*addresses.addresses, *([addresses.observed] if addresses.observed is not None else [])):
        check_address(address)
