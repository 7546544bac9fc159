"""Status of a run, as strict JSON, for `ravnest status` and dashboards.

It combines the coordinator's state (`CoordinatorState`) with values of the moment (`RuntimeStatus`). It contains no
token and no control characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import msgspec

from ravnest.coordinator.event_log import printable
from ravnest.coordinator.policy.leases import LeaseCounts
from ravnest.coordinator.policy.membership import MembershipPolicy
from ravnest.coordinator.policy.waiting import waiting_for
from ravnest.coordinator.state import ClusterRecord, CoordinatorState, LinkRecord, NodeRecord
from ravnest.core.metrics import StageMetrics, bubble
from ravnest.protocol.commands import AverageReady
from ravnest.protocol.control import NodeProfile
from ravnest.transport.p2p.relay_server import PairStats

__all__ = ["ClusterStatus", "NodeStatus", "RunStatus", "RuntimeStatus", "status_of"]

_MAX_EVENTS = 100


class _Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A strict record with keyword fields."""


class LinkStatus(_Status, frozen=True):
    """A node's link to a peer: its kind, the reason why it is not a better one, and a hint to improve it."""

    peer: str
    kind: str
    reason: str
    hint: str


class ReplicaStatus(_Status, frozen=True):
    """A replica of a stage that a node holds, and its age."""

    cluster: str
    stage: int
    updates: int
    age_s: float


class NodeStatus(_Status, frozen=True):
    """A member. `state` is free, forming, training, leaving, quarantined, gone, kicked or enrolled.

    `speed_factor` is a multiple of its measured speed; `last_seen_age_s` the seconds since its last message.
    """

    name: str
    state: str
    reason: str
    profile: NodeProfile | None = None
    address: str = ""
    activity: str = ""
    last_seen_age_s: float | None = None
    cluster: str | None = None
    stage: int | None = None
    links: tuple[LinkStatus, ...] = ()
    replicas: tuple[ReplicaStatus, ...] = ()
    speed_factor: float = 1.0
    num_losses: int = 0


class StageStatus(_Status, frozen=True):
    """A member of a cluster and the work of its stage; `bubble` is the share of its time without work."""

    name: str
    stage: int
    is_ready: bool
    updates: int = 0
    microbatches: int = 0
    bubble: float = 0.0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class LeaseStatus(_Status, frozen=True):
    """granted = settled + repeated + outstanding + returned"""

    granted: int
    settled: int
    repeated: int
    outstanding: int
    returned: int
    waiting: int = 0


class AveragingStatus(_Status, frozen=True):
    """The last round of a cluster: bytes of all its nodes, and the largest time and codec error of any.

    The codec error is the part of a node's values that the codec lost, relative to the averages; it is carried over.
    """

    round: int
    seconds: float
    sent_bytes: int
    saved_bytes: int
    codec_error: float


class ClusterStatus(_Status, frozen=True):
    id: str
    phase: str
    generation: int
    reason: str  # of the phase
    plan_reason: str
    stages: tuple[StageStatus, ...]
    cuts: tuple[int, ...]
    planned_samples_per_s: float
    samples_per_s: float | None
    loss: float | None
    leases: LeaseStatus
    averaging: AveragingStatus | None = None  # None before the first round


class RingsStatus(_Status, frozen=True):
    """The members of each ring, and the round that is running, if one is."""

    clusters: tuple[str, ...]
    rings: tuple[tuple[str, ...], ...]
    round: int | None = None


class RelayStatus(_Status, frozen=True):
    """Traffic of a pair through the relay."""

    names: tuple[str, str]
    carried_bytes: int
    is_joined: bool


class RejectionStatus(_Status, frozen=True):
    at_s: float
    address: str
    reason: str
    count: int


class EventStatus(_Status, frozen=True):
    at_s: float
    text: str


class RunStatus(_Status, frozen=True):
    """Times are unix times of the coordinator's clock; `now_s` is that of the status."""

    run: str
    release: str
    now_s: float
    uptime_s: float
    end_reason: str | None
    steps_done: int
    steps: int | None
    generation: int
    nodes: tuple[NodeStatus, ...]
    clusters: tuple[ClusterStatus, ...]
    leases: LeaseStatus
    relay: tuple[RelayStatus, ...]
    num_rejected: int
    rejections: tuple[RejectionStatus, ...]
    events: tuple[EventStatus, ...]  # the newest last
    rings: RingsStatus | None = None
    rounds_done: int = 0
    waiting: str = ""  # what the run waits for; empty while a cluster trains


@dataclass(frozen=True, kw_only=True)
class RuntimeStatus:
    """Values of the moment: metrics by cluster and stage, losses and rates by cluster, relay traffic.

    `averages` are the last averaging reports by node.
    """

    metrics: Mapping[tuple[str, int], StageMetrics] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: Mapping[str, float] = field(default_factory=dict)
    averages: Mapping[str, AverageReady] = field(default_factory=dict)
    relay: Sequence[PairStats] = ()
    policy: MembershipPolicy = field(default_factory=MembershipPolicy)


def status_of(state: CoordinatorState, now_s: float, runtime: RuntimeStatus) -> RunStatus:
    names = sorted(state.members.keys() | state.nodes.keys())
    return RunStatus(
        run=state.run,
        release=state.release,
        now_s=now_s,
        uptime_s=max(now_s - state.started_s, 0.0) if state.run else 0.0,
        end_reason=state.end_reason,
        steps_done=state.leases.counts.settled,
        steps=state.steps,
        generation=state.generation,
        nodes=tuple(_node(state, name, now_s, runtime.policy) for name in names),
        clusters=tuple(_cluster(state, cluster, runtime) for cluster in state.clusters.values()),
        leases=_leases(state.leases.counts, len(state.leases.waiting)),
        relay=tuple(_relay(pair) for pair in runtime.relay),
        num_rejected=state.counters.rejected,
        rejections=tuple(
            RejectionStatus(
                at_s=one.at_s, address=printable(one.address), reason=printable(one.reason), count=one.count
            )
            for one in state.rejections
        ),
        events=tuple(EventStatus(at_s=at_s, text=text) for at_s, text in list(state.recent_events)[-_MAX_EVENTS:]),
        rings=_rings(state),
        rounds_done=state.rounds_done,
        waiting=printable(waiting_for(state, now_s, runtime.policy)),
    )


def _node(state: CoordinatorState, name: str, now_s: float, policy: MembershipPolicy) -> NodeStatus:
    node = state.nodes.get(name)
    kicked = state.members[name].kick_reason if name in state.members else None
    if node is None:
        reason = "not connected yet" if kicked is None else kicked
        return NodeStatus(name=name, state="enrolled" if kicked is None else "kicked", reason=printable(reason))
    seen = state.last_seen(name)
    cluster = state.clusters.get(node.cluster or "")
    node_state, reason = _node_state(node, cluster, kicked, now_s, policy)
    return NodeStatus(
        name=name,
        state=node_state,
        reason=printable(reason),
        profile=node.profile,
        address=printable(node.address),
        activity=printable("disconnected" if seen.is_disconnected else seen.activity) if node.is_present else "",
        last_seen_age_s=max(now_s - seen.at_s, 0.0),
        cluster=node.cluster,
        stage=cluster.plan.members.index(name) if cluster is not None else None,
        links=_links(name, cluster.links) if cluster is not None else (),
        replicas=tuple(
            ReplicaStatus(held.replica.cluster, held.replica.stage, held.replica.updates, max(now_s - held.at_s, 0.0))
            for held in node.replicas
        ),
        speed_factor=node.speed_factor * state.fleet_speed_factor,
        num_losses=node.num_losses,
    )


def _node_state(
    node: NodeRecord, cluster: ClusterRecord | None, kicked: str | None, now_s: float, policy: MembershipPolicy
) -> tuple[str, str]:
    """The state of a node, and the reason."""
    if kicked is not None:
        return "kicked", kicked
    if not node.is_present:
        return "gone", node.reason
    if node.leaving_s is not None:
        return "leaving", node.reason
    if cluster is not None:
        return cluster.phase, node.reason
    if node.quarantined_s is not None and node.is_quarantined(now_s, policy.quarantine_s):
        end_s = node.quarantined_s + policy.quarantine_s
        unless = " unless the run needs it" if node.retry_s(policy.quarantine_s) < end_s else ""
        return "quarantined", f"for another {end_s - now_s:.0f} s{unless}: {node.quarantine_reason}"
    return "free", node.reason


def _links(name: str, links: Mapping[tuple[str, str], LinkRecord]) -> tuple[LinkStatus, ...]:
    """Links that a node reported."""
    return tuple(
        LinkStatus(peer=b, kind=printable(link.kind), reason=printable(link.reason), hint=printable(link.hint))
        for (a, b), link in sorted(links.items(), key=lambda item: item[0])
        if a == name
    )


def _cluster(state: CoordinatorState, cluster: ClusterRecord, runtime: RuntimeStatus) -> ClusterStatus:
    plan = cluster.plan
    return ClusterStatus(
        id=plan.id,
        phase=cluster.phase,
        generation=plan.generation,
        reason=printable(cluster.reason),
        plan_reason=printable(plan.reason),
        stages=tuple(_stage(cluster, stage, runtime) for stage in range(len(plan.members))),
        cuts=plan.cuts,
        planned_samples_per_s=plan.samples_per_s,
        samples_per_s=runtime.samples_per_s.get(plan.id),
        loss=runtime.losses.get(plan.id),
        leases=_leases(state.leases.counts_of(plan.id)),
        averaging=_averaging([runtime.averages[name] for name in plan.members if name in runtime.averages]),
    )


def _averaging(reports: Sequence[AverageReady]) -> AveragingStatus | None:
    """The latest round in these reports. Values come from nodes and are not trusted."""
    number = max((one.round for one in reports), default=None)
    if number is None:
        return None
    latest = [one for one in reports if one.round == number]
    return AveragingStatus(
        round=number,
        seconds=max((one.seconds for one in latest if isfinite(one.seconds)), default=0.0),
        sent_bytes=sum(max(one.sent_bytes, 0) for one in latest),
        saved_bytes=sum(max(one.saved_bytes, 0) for one in latest),
        codec_error=max((one.codec_error for one in latest if isfinite(one.codec_error)), default=0.0),
    )


def _stage(cluster: ClusterRecord, stage: int, runtime: RuntimeStatus) -> StageStatus:
    name = cluster.plan.members[stage]
    metrics = runtime.metrics.get((cluster.plan.id, stage), StageMetrics())
    idle = bubble(StageMetrics(), metrics)
    return StageStatus(
        name=name,
        stage=stage,
        is_ready=name in cluster.ready,
        updates=metrics.updates,
        microbatches=metrics.microbatches,
        bubble=idle if isfinite(idle) else 0.0,  # reported by a node, and not trusted
        memory_bytes=metrics.memory_bytes,
        peak_memory_bytes=metrics.peak_memory_bytes,
        sent_bytes=metrics.sent_bytes,
        received_bytes=metrics.received_bytes,
    )


def _leases(counts: LeaseCounts, waiting: int = 0) -> LeaseStatus:
    return LeaseStatus(**msgspec.structs.asdict(counts), waiting=waiting)


def _rings(state: CoordinatorState) -> RingsStatus | None:
    if state.rings is None:
        return None
    number = state.round.number if state.round is not None else None
    return RingsStatus(clusters=state.rings.clusters, rings=state.rings.rings, round=number)


def _relay(pair: PairStats) -> RelayStatus:
    return RelayStatus(names=pair.names, carried_bytes=sum(pair.carried_bytes), is_joined=pair.is_joined)
