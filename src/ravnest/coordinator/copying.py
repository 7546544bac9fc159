"""Who should keep a copy of what whom: a pure decision.

    a spare      keeps a copy of the least reliable member of a cluster, whose place it can then take at once; who has
                 become free just now is none yet
    a neighbour  the next member or members of the same cluster, if `replicas` are asked for, or (None) if no other
                 cluster has the same parameters: then one, unless another has ended just now and may soon be back

A copy is made anew when it is `every_s` old, or as old as twenty times what it took to get there, so that copies take
little of a line. A node gives one copy at a time, and gets one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf

from ..core.config import config, require
from .records import ClusterRecord, State

__all__ = ["CopyWishes", "MakeCopy", "decide_copies"]

_SHARE = 20.0
_FIRST_S = 3.0
_BACK_S = 10.0  # a cluster that has ended is usually back by then, and whoever is free has a part


@config
class CopyWishes:
    """`replicas` copies of each stage on other members (None: one if there is one cluster alone), so often."""

    replicas: int | None = None
    every_s: float = 30.0

    def __post_init__(self) -> None:
        require(self.replicas is None or self.replicas >= 0, f"replicas is 0 or more, not {self.replicas}")
        require(self.every_s > 0, f"every_s must be above 0, not {self.every_s}")


@dataclass(frozen=True)
class MakeCopy:
    cluster: str
    stage: int
    giver: str
    taker: str
    reason: str


def decide_copies(state: State, now_s: float, wishes: CopyWishes, busy: Collection[str]) -> list[MakeCopy]:
    """Copies to be made now, at most one from and to each node; `busy` are nodes that give or get one already."""
    taken = set(busy)
    found: list[MakeCopy] = []
    for wanted in (*_for_spares(state, now_s), *_for_neighbours(state, now_s, wishes)):
        if not {wanted.giver, wanted.taker} & taken and now_s >= _due_s(state, wanted, wishes):
            found.append(wanted)
            taken |= {wanted.giver, wanted.taker}
    return found


def _due_s(state: State, wanted: MakeCopy, wishes: CopyWishes) -> float:
    """When the taker's copy is to be made anew; the first one is due when the cluster has trained for a moment."""
    for kept in state.nodes[wanted.taker].copies:
        if (kept.copy.cluster, kept.copy.stage) == (wanted.cluster, wanted.stage):
            return kept.at_s + max(wishes.every_s, _SHARE * kept.took_s)
    since_s = state.clusters[wanted.cluster].trains_since_s
    return (since_s or 0.0) + min(_FIRST_S, wishes.every_s)


def _for_spares(state: State, now_s: float) -> Iterator[MakeCopy]:
    """Spares go to clusters in turn, each to the member that was lost most often, of those the one that came last."""
    clusters = list(state.training_clusters())
    free = state.free_nodes(now_s) if clusters else []
    spares = [name for name in free if now_s >= state.nodes[name].free_since_s + _BACK_S]
    covered: set[str] = set()
    for i, spare in enumerate(spares):
        cluster = clusters[i % len(clusters)]
        members = [name for name in cluster.plan.members if name not in covered and _is_there(state, name)]
        if members:
            weakest = max(members, key=lambda name: (state.nodes[name].losses, state.nodes[name].connected_s, name))
            covered.add(weakest)
            yield _copy(cluster, weakest, spare, f"{spare} is the spare for {weakest}")


def _for_neighbours(state: State, now_s: float, wishes: CopyWishes) -> Iterator[MakeCopy]:
    clusters = list(state.training_clusters())
    ended_s = max((found.ended_s for found in state.clusters.values() if found.ended_s is not None), default=-inf)
    is_alone = len(clusters) == 1 and now_s >= ended_s + _BACK_S
    replicas = int(is_alone) if wishes.replicas is None else wishes.replicas
    for cluster in clusters:
        members = cluster.plan.members
        for stage, giver in enumerate(members):
            for step in range(1, min(replicas, len(members) - 1) + 1):
                taker = members[(stage + step) % len(members)]
                if _is_there(state, giver) and _is_there(state, taker):
                    yield _copy(cluster, giver, taker, f"{taker} is a neighbour of {giver}")


def _copy(cluster: ClusterRecord, giver: str, taker: str, reason: str) -> MakeCopy:
    return MakeCopy(cluster.plan.id, cluster.plan.members.index(giver), giver, taker, reason)


def _is_there(state: State, name: str) -> bool:
    return state.nodes[name].is_present and not state.last_heard(name).is_away
