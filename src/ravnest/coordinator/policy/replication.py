"""Decides which nodes replicate which stages, and from which replicas a new cluster is restored. Pure.

    a spare      holds a replica of the least reliable member of a cluster, so that it can replace it at once; a node
                 that has only just become free does not count as a spare
    a neighbour  the next `replicas` members of the same cluster hold one; if `replicas` is None, one of them does while
                 no other cluster has the same parameters, unless a cluster has just ended and may be replaced soon

A replica is refreshed every `interval_s`, or every twenty times its transfer time if that is longer, so that
replication takes little of a connection. A node sends one replica at a time, and receives one.

A replica belongs to a stage, an interval of the model's chain between two cuts of its cluster. A new cluster may be cut
elsewhere, so one of its stages may need several replicas. A stage that is training counts as an up-to-date replica. A
node's own replica, which needs no transfer, is preferred to another that is not much newer.

Replicas on other nodes have no frozen tensors, which would be sent again and again; a stage that is restored from them
gets its frozen tensors from the requester. The node that computed a stage keeps them, and sends them on request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ravnest.coordinator.state import ClusterRecord, CoordinatorState
from ravnest.core.config import config, require
from ravnest.protocol.control import ReplicaInfo

__all__ = ["Replica", "ReplicationPolicy", "RestorePlan", "decide_replication", "plan_restore"]

_MIN_TRANSFERS = 20.0  # transfer times between two refreshes of a replica
_FIRST_S = 3.0
_REFORM_S = 10.0  # a cluster that ended is usually replaced within this time, and its members are free no longer
_OWN_BONUS_S = 15.0  # by which another replica must be newer than the node's own to be worth a transfer
_SAME_AGE_S = 2.0  # replicas whose age differs by less are equal: the faster uplink decides


@config
class ReplicationPolicy:
    """Number and refresh interval of replicas.

    Args:
        replicas: Replicas of each stage on other members of its cluster; None: one while there is a single cluster.
        interval_s: Seconds between two refreshes of a replica.
    """

    replicas: int | None = None
    interval_s: float = 30.0

    def __post_init__(self) -> None:
        require(self.replicas is None or self.replicas >= 0, f"replicas must be >= 0, got {self.replicas}")
        require(self.interval_s > 0, f"interval_s must be > 0, got {self.interval_s}")


@dataclass(frozen=True)
class ReplicateStage:
    cluster: str
    stage: int
    source: str
    target: str
    reason: str


def decide_replication(
    state: CoordinatorState, now_s: float, policy: ReplicationPolicy, busy: Collection[str]
) -> list[ReplicateStage]:
    """Transfers to start now, at most one from and to each node; `busy` nodes have a transfer already."""
    taken = set(busy)
    due: list[ReplicateStage] = []
    for wanted in (*_for_spares(state, now_s), *_for_neighbours(state, now_s, policy)):
        if not {wanted.source, wanted.target} & taken and now_s >= _due_s(state, wanted, policy):
            due.append(wanted)
            taken |= {wanted.source, wanted.target}
    return due


def _due_s(state: CoordinatorState, wanted: ReplicateStage, policy: ReplicationPolicy) -> float:
    """When the target's replica is to be refreshed; the first one is due soon after training started."""
    for held in state.nodes[wanted.target].replicas:
        if (held.replica.cluster, held.replica.stage) == (wanted.cluster, wanted.stage):
            return held.at_s + max(policy.interval_s, _MIN_TRANSFERS * held.took_s)
    since_s = state.clusters[wanted.cluster].training_since_s
    return (since_s or 0.0) + min(_FIRST_S, policy.interval_s)


def _for_spares(state: CoordinatorState, now_s: float) -> Iterator[ReplicateStage]:
    """Spares are spread over the clusters, each for the member lost most often, then the one connected last."""
    clusters = list(state.training_clusters())
    free = state.free_nodes(now_s) if clusters else []
    spares = [name for name in free if now_s >= state.nodes[name].free_since_s + _REFORM_S]
    covered: set[str] = set()
    for i, spare in enumerate(spares):
        cluster = clusters[i % len(clusters)]
        members = [name for name in cluster.plan.members if name not in covered and state.is_connected(name)]
        if members:
            weakest = max(members, key=lambda name: (state.nodes[name].num_losses, state.nodes[name].connected_s, name))
            covered.add(weakest)
            yield _replicate(cluster, weakest, spare, f"{spare} is the spare for {weakest}")


def _for_neighbours(state: CoordinatorState, now_s: float, policy: ReplicationPolicy) -> Iterator[ReplicateStage]:
    clusters = list(state.training_clusters())
    ended_s = max((cluster.ended_s for cluster in state.clusters.values() if cluster.ended_s is not None), default=-inf)
    is_alone = len(clusters) == 1 and now_s >= ended_s + _REFORM_S
    replicas = int(is_alone) if policy.replicas is None else policy.replicas
    for cluster in clusters:
        members = cluster.plan.members
        for stage, source in enumerate(members):
            for offset in range(1, min(replicas, len(members) - 1) + 1):
                target = members[(stage + offset) % len(members)]
                if state.is_connected(source) and state.is_connected(target):
                    yield _replicate(cluster, source, target, f"{target} is a neighbour of {source}")


def _replicate(cluster: ClusterRecord, source: str, target: str, reason: str) -> ReplicateStage:
    return ReplicateStage(cluster.plan.id, cluster.plan.members.index(source), source, target, reason)


@dataclass(frozen=True)
class Replica:
    """A replica, its holder, the time of its state, the ops it covers (`first` to `end`); complete or not."""

    info: ReplicaInfo
    holder: str
    at_s: float
    first: int
    end: float
    up_bytes_per_s: float
    has_frozen: bool


@dataclass(frozen=True)
class RestorePlan:
    """Replicas for each stage, first stage first; stages that no replicas cover completely; a description.

    `missing_frozen` are the stages that replicas cover without their frozen tensors.
    """

    stages: tuple[tuple[Replica, ...], ...]
    missing_stages: tuple[int, ...]
    missing_frozen: tuple[int, ...]
    updates: int
    description: str


def plan_restore(
    state: CoordinatorState,
    members: Sequence[str],
    cuts: Sequence[int],
    now_s: float,
    updates: Mapping[tuple[str, int], int],
) -> RestorePlan:
    """Replicas to restore a new cluster from; `updates` of training stages are by cluster and stage."""
    available = list(_available(state, now_s, updates))
    stages: list[tuple[Replica, ...]] = []
    missing: list[int] = []
    for stage, (name, (first, end)) in enumerate(zip(members, pairwise((0, *cuts, inf)), strict=True)):
        chosen, is_complete = _cover(available, name, int(first), end)
        stages.append(chosen)
        if not is_complete:
            missing.append(stage)
    newest = max((replica.info.updates for stage in stages for replica in stage), default=0)
    frozen = tuple(
        i for i, stage in enumerate(stages) if i not in missing and not all(replica.has_frozen for replica in stage)
    )
    return RestorePlan(tuple(stages), tuple(missing), frozen, newest, _describe(members, stages, missing, now_s))


def _available(state: CoordinatorState, now_s: float, updates: Mapping[tuple[str, int], int]) -> Iterator[Replica]:
    """Training stages and stored replicas of all connected nodes."""
    for cluster in state.training_clusters():
        for stage, name in enumerate(cluster.plan.members):
            made = updates.get((cluster.plan.id, stage), 0)
            if made and state.is_connected(name):
                yield _replica(state, ReplicaInfo(cluster.plan.id, stage, made), name, now_s)
    for name, node in state.nodes.items():
        for held in node.replicas:
            if held.replica.cluster in state.cuts and held.replica.updates and state.is_connected(name):
                yield _replica(state, held.replica, name, held.at_s)


def _replica(state: CoordinatorState, info: ReplicaInfo, holder: str, at_s: float) -> Replica:
    bounds = (0, *state.cuts[info.cluster], inf)
    first, end = bounds[info.stage], bounds[info.stage + 1]
    cluster = state.clusters.get(info.cluster)
    has_frozen = cluster is not None and cluster.plan.members[info.stage] == holder
    return Replica(info, holder, at_s, int(first), end, state.nodes[holder].profile.up_bytes_per_s, has_frozen)


def _cover(available: Sequence[Replica], name: str, first: int, end: float) -> tuple[tuple[Replica, ...], bool]:
    """Replicas that together cover the ops from `first` to `end`, and whether they do."""
    bounds = sorted({first, end, *(bound for r in available for bound in (r.first, r.end) if first < bound < end)})
    chosen: list[Replica] = []
    is_complete = True
    for low, high in pairwise(bounds):
        candidates = (r for r in available if r.first <= low and high <= r.end)
        best = max(candidates, key=lambda r: _rank(r, name, chosen), default=None)
        if best is None:
            is_complete = False
        elif best not in chosen:
            chosen.append(best)
    return tuple(chosen), is_complete


def _rank(replica: Replica, name: str, chosen: Sequence[Replica]) -> tuple[float, bool, bool, float, str]:
    is_own = replica.holder == name
    at_s = replica.at_s + (_OWN_BONUS_S if is_own else 0.0)
    return at_s // _SAME_AGE_S, is_own, replica in chosen, replica.up_bytes_per_s, replica.holder


def _describe(
    members: Sequence[str], stages: Sequence[tuple[Replica, ...]], missing: Sequence[int], now_s: float
) -> str:
    """Names the transfers and the stages without a complete replica."""
    parts: list[str] = []
    for stage, (name, replicas) in enumerate(zip(members, stages, strict=True)):
        for replica in replicas:
            age_s = max(now_s - replica.at_s, 0.0)
            if replica.holder != name:
                age = f", {age_s:.0f} s old" if age_s > 1 else ""
                parts.append(f"{name} gets its state from {replica.holder}{age}")
        if stage in missing:
            parts.append(f"no complete replica of stage {stage}")
    return "; ".join(parts)
