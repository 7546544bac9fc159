"""Where a run stands: the one answer that `ravnest status` prints and a dashboard draws, as strict JSON.

A status is made of what the coordinator knows (`State`) and of what is only true at the moment (`Live`). It holds no
token, and no text that could move a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import msgspec

from ..core.control import NodeProfile
from ..core.metrics import StageMetrics, bubble
from ..core.orders import Averaged
from ..net.hub import PairStats
from .decide import Wishes
from .leases import Counts
from .records import ClusterRecord, LinkRecord, NodeRecord, State
from .sentences import plain

__all__ = [
    "AveragedStatus", "ClusterStatus", "CopyStatus", "EventStatus", "LeaseStatus", "LinkStatus", "Live", "NodeStatus",
    "RefusalStatus", "RelayStatus", "StageStatus", "Status", "status_of",
]  # fmt: skip

_MOST_EVENTS = 100


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A strict record, given by name."""


class LinkStatus(_Part, frozen=True):
    """A node's link to a peer: direct, punched or relayed, why not better, and what would make it better."""

    peer: str
    how: str
    reason: str
    hint: str


class CopyStatus(_Part, frozen=True):
    """A copy that a node keeps of what a stage had learnt, and how old it is."""

    cluster: str
    stage: int
    updates: int
    age_s: float


class NodeStatus(_Part, frozen=True):
    """A member. `state` is free, forming, training, leaving, left out, gone, kicked or enrolled; `why` says why.

    `speed` is the share of what it measured that its stages showed it to have.
    """

    name: str
    state: str
    why: str
    profile: NodeProfile | None = None
    address: str = ""
    doing: str = ""
    heard_s_ago: float | None = None
    cluster: str | None = None
    stage: int | None = None
    links: tuple[LinkStatus, ...] = ()
    keeps: tuple[CopyStatus, ...] = ()
    speed: float = 1.0
    losses: int = 0


class StageStatus(_Part, frozen=True):
    """A member of a cluster and what its stage has done; `bubble` is the part of its time without work."""

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


class LeaseStatus(_Part, frozen=True):
    """granted = settled + repeated + outstanding + returned"""

    granted: int
    settled: int
    repeated: int
    outstanding: int
    returned: int
    waiting: int = 0


class AveragedStatus(_Part, frozen=True):
    """What the last round took a cluster: bytes of all its nodes, the time and the codec's error of the worst of them.

    The error is what the codec lost at a node, and owes the next round, over the averages.
    """

    round: int
    seconds: float
    sent_bytes: int
    saved_bytes: int
    codec_error: float


class ClusterStatus(_Part, frozen=True):
    id: str
    phase: str
    generation: int
    why: str
    reason: str  # of the plan
    stages: tuple[StageStatus, ...]
    cuts: tuple[int, ...]
    planned_samples_per_s: float
    samples_per_s: float | None
    loss: float | None
    leases: LeaseStatus
    averaged: AveragedStatus | None = None  # None before the first round


class RelayStatus(_Part, frozen=True):
    """What a pair has sent through the relay."""

    names: tuple[str, str]
    carried_bytes: int
    is_joined: bool


class RefusalStatus(_Part, frozen=True):
    at_s: float
    address: str
    reason: str
    count: int


class EventStatus(_Part, frozen=True):
    at_s: float
    text: str


class Status(_Part, frozen=True):
    """Times are unix times of the coordinator's clock; `now_s` is when the status was made."""

    run: str
    release: str
    now_s: float
    uptime_s: float
    ended: str | None
    steps_done: int
    steps: int | None
    generation: int
    nodes: tuple[NodeStatus, ...]
    clusters: tuple[ClusterStatus, ...]
    leases: LeaseStatus
    relay: tuple[RelayStatus, ...]
    refused: int
    refusals: tuple[RefusalStatus, ...]
    events: tuple[EventStatus, ...]  # the latest last


@dataclass(frozen=True, kw_only=True)
class Live:
    """What is true at the moment: the latest metrics by cluster and stage, losses and rates by cluster, the relay.

    `averaged` is what each node told last of a round.
    """

    metrics: Mapping[tuple[str, int], StageMetrics] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: Mapping[str, float] = field(default_factory=dict)
    averaged: Mapping[str, Averaged] = field(default_factory=dict)
    relay: Sequence[PairStats] = ()
    wishes: Wishes = field(default_factory=Wishes)


def status_of(state: State, now_s: float, live: Live) -> Status:
    names = sorted(state.members.keys() | state.nodes.keys())
    return Status(
        run=state.run,
        release=state.release,
        now_s=now_s,
        uptime_s=max(now_s - state.begun_s, 0.0) if state.run else 0.0,
        ended=state.ended,
        steps_done=state.leases.counts.settled,
        steps=state.steps,
        generation=state.generation,
        nodes=tuple(_node(state, name, now_s, live.wishes) for name in names),
        clusters=tuple(_cluster(state, cluster, live) for cluster in state.clusters.values()),
        leases=_leases(state.leases.counts, len(state.leases.waiting)),
        relay=tuple(_relayed(pair) for pair in live.relay),
        refused=state.counters.refused,
        refusals=tuple(
            RefusalStatus(at_s=seen.at_s, address=plain(seen.address), reason=plain(seen.reason), count=seen.count)
            for seen in state.refusals
        ),
        events=tuple(EventStatus(at_s=at_s, text=text) for at_s, text in list(state.words)[-_MOST_EVENTS:]),
    )


def _node(state: State, name: str, now_s: float, wishes: Wishes) -> NodeStatus:
    node = state.nodes.get(name)
    kicked = state.members[name].kicked if name in state.members else None
    if node is None:
        why = "it has not connected yet" if kicked is None else kicked
        return NodeStatus(name=name, state="enrolled" if kicked is None else "kicked", why=plain(why))
    heard = state.last_heard(name)
    cluster = state.clusters.get(node.cluster or "")
    standing, why = _standing(node, cluster, kicked, now_s, wishes)
    return NodeStatus(
        name=name,
        state=standing,
        why=plain(why),
        profile=node.profile,
        address=plain(node.address),
        doing=plain(heard.doing) if node.is_present else "",
        heard_s_ago=max(now_s - heard.at_s, 0.0),
        cluster=node.cluster,
        stage=cluster.plan.members.index(name) if cluster is not None else None,
        links=_links(name, cluster.links) if cluster is not None else (),
        keeps=tuple(
            CopyStatus(kept.copy.cluster, kept.copy.stage, kept.copy.updates, max(now_s - kept.at_s, 0.0))
            for kept in node.copies
        ),
        speed=node.speed * state.pace,
        losses=node.losses,
    )


def _standing(
    node: NodeRecord, cluster: ClusterRecord | None, kicked: str | None, now_s: float, wishes: Wishes
) -> tuple[str, str]:
    """A node's state in a word or two, and why."""
    if kicked is not None:
        return "kicked", kicked
    if not node.is_present:
        return "gone", node.why
    if node.leaving_s is not None:
        return "leaving", node.why
    if cluster is not None:
        return cluster.phase, node.why
    if node.blamed_s is not None and node.is_blamed(now_s, wishes.blame_s):
        return "left out", f"for another {node.blamed_s + wishes.blame_s - now_s:.0f} s: {node.blame}"
    return "free", node.why


def _links(name: str, links: Mapping[tuple[str, str], LinkRecord]) -> tuple[LinkStatus, ...]:
    """What a node told of its own links."""
    return tuple(
        LinkStatus(peer=b, how=plain(link.how), reason=plain(link.reason), hint=plain(link.hint))
        for (a, b), link in sorted(links.items(), key=lambda item: item[0])
        if a == name
    )


def _cluster(state: State, cluster: ClusterRecord, live: Live) -> ClusterStatus:
    plan = cluster.plan
    return ClusterStatus(
        id=plan.id,
        phase=cluster.phase,
        generation=plan.generation,
        why=plain(cluster.why),
        reason=plain(plan.reason),
        stages=tuple(_stage(cluster, stage, live) for stage in range(len(plan.members))),
        cuts=plan.cuts,
        planned_samples_per_s=plan.samples_per_s,
        samples_per_s=live.samples_per_s.get(plan.id),
        loss=live.losses.get(plan.id),
        leases=_leases(state.leases.of(plan.id)),
        averaged=_averaged([live.averaged[name] for name in plan.members if name in live.averaged]),
    )


def _averaged(told: Sequence[Averaged]) -> AveragedStatus | None:
    """Of the latest round that any of them told of. A node may say anything."""
    number = max((one.round for one in told), default=None)
    if number is None:
        return None
    latest = [one for one in told if one.round == number]
    return AveragedStatus(
        round=number,
        seconds=max((one.seconds for one in latest if isfinite(one.seconds)), default=0.0),
        sent_bytes=sum(max(one.sent_bytes, 0) for one in latest),
        saved_bytes=sum(max(one.saved_bytes, 0) for one in latest),
        codec_error=max((one.codec_error for one in latest if isfinite(one.codec_error)), default=0.0),
    )


def _stage(cluster: ClusterRecord, stage: int, live: Live) -> StageStatus:
    name = cluster.plan.members[stage]
    done = live.metrics.get((cluster.plan.id, stage), StageMetrics())
    idle = bubble(StageMetrics(), done)
    return StageStatus(
        name=name,
        stage=stage,
        is_ready=name in cluster.ready,
        updates=done.updates,
        microbatches=done.microbatches,
        bubble=idle if isfinite(idle) else 0.0,  # a node may say anything
        memory_bytes=done.memory_bytes,
        peak_memory_bytes=done.peak_memory_bytes,
        sent_bytes=done.sent_bytes,
        received_bytes=done.received_bytes,
    )


def _leases(counts: Counts, waiting: int = 0) -> LeaseStatus:
    return LeaseStatus(**msgspec.structs.asdict(counts), waiting=waiting)


def _relayed(pair: PairStats) -> RelayStatus:
    return RelayStatus(names=pair.names, carried_bytes=sum(pair.carried_bytes), is_joined=pair.is_joined)
