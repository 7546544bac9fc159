"""What a coordinator should do now: pure decisions from what it knows, each with its reason.

    lose a node      that was not heard for three beats
    let a node leave when others have what it has learnt, or it has waited long enough
    end a cluster    a member of which is gone, or that does not get ready in time
    make a plan      of the nodes that are free: at once when a cluster broke and its members have let go of their
                     stages, else when it is quiet: nobody came for `wait_s`, or enough of them have waited `max_wait`
                     times as long
    reconsider       running clusters together with nodes that no plan has a place for, or when a node turns out to be
                     slower or faster than it was taken to be

The owner carries a decision out and says so with events, which make it vanish; until then it is decided again. Nothing
changes by itself before `next_look_s`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from ..core.config import config, require
from ..net.addresses import home_of
from ..plan.fleet import Machine
from .admission import choose_name, judge_token
from .records import BLAME_S, ClusterRecord, NodeRecord, State

__all__ = [
    "Decision", "EndCluster", "LetLeave", "LoseNode", "MakePlan", "Reconsider", "Wishes",
    "choose_name", "decide", "judge_token", "machines_of", "next_look_s",
]  # fmt: skip

_MISSED_BEATS = 3
_BACK_S = 3.0  # that nobody else has come for, when all clusters broke at once
_LEAVE_S = 60.0  # that a node which leaves may be kept, for others to take over what it has learnt
_MOST_CHANGED = 4  # clusters that are looked at together


@config
class Wishes:
    """How patient a coordinator is. Training begins with at least `min_nodes`; a cluster has at least `min_stages`."""

    min_nodes: int = 2
    min_stages: int = 2
    wait_s: float = 15.0
    max_wait: float = 4.0  # times wait_s
    beat_s: float = 2.0
    forming_s: float = 120.0
    blame_s: float = BLAME_S
    rest_s: float = 60.0  # between a change of plan and looking for a better one
    num_spares: int = 0

    def __post_init__(self) -> None:
        require(self.min_stages >= 1, f"a cluster has at least 1 stage, not {self.min_stages}")
        require(self.min_nodes >= 1, f"training takes at least 1 node, not {self.min_nodes}")
        require(0 <= self.wait_s < inf, f"wait_s must be 0 or more, not {self.wait_s}")
        require(1 <= self.max_wait < inf, f"max_wait must be at least 1, not {self.max_wait}")
        require(0 < self.beat_s < inf, f"beat_s must be above 0, not {self.beat_s}")
        require(0 < self.forming_s < inf, f"forming_s must be above 0, not {self.forming_s}")
        require(0 <= self.rest_s < inf, f"rest_s must be 0 or more, not {self.rest_s}")
        require(self.num_spares >= 0, f"num_spares must be 0 or more, not {self.num_spares}")
        require(0 <= self.blame_s < inf, f"blame_s must be 0 or more, not {self.blame_s}")

    @property
    def silence_s(self) -> float:
        """Who is not heard for longer is lost."""
        return _MISSED_BEATS * self.beat_s


@dataclass(frozen=True)
class LoseNode:
    name: str
    reason: str


@dataclass(frozen=True)
class LetLeave:
    """A node that wants to leave can do so now."""

    name: str
    reason: str


@dataclass(frozen=True)
class EndCluster:
    """`blamed` are the members whose fault it is, if it is known."""

    cluster: str
    reason: str
    blamed: tuple[str, ...] = ()


@dataclass(frozen=True)
class MakePlan:
    """Plan these free nodes, and no others."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Reconsider:
    """Look whether these clusters and these free nodes could do more in another way."""

    clusters: tuple[str, ...]
    nodes: tuple[str, ...]
    reason: str


Decision = LoseNode | LetLeave | EndCluster | MakePlan | Reconsider


def decide(state: State, now_s: float, wishes: Wishes) -> list[Decision]:
    """What to do now, in the order in which to do it."""
    silent = _silent(state, now_s, wishes)
    why = f"it was not heard for {_MISSED_BEATS} beats of {wishes.beat_s:g} s"
    plan = _plan(state, now_s, wishes, silent) or _reconsider(state, now_s, wishes, silent)
    return [
        *(LoseNode(name, why) for name in silent),
        *(LetLeave(name, why) for name, why in _leavers(state, now_s) if name not in silent),
        *_broken(state, now_s, wishes, silent),
        *([plan] if plan is not None else []),
    ]


def next_look_s(state: State, now_s: float, wishes: Wishes) -> float:
    """The first moment after `now_s` at which `decide` could say something else if nothing happens, or a beat later."""
    return min((time_s for time_s in _turns(state, now_s, wishes) if time_s > now_s), default=now_s + wishes.beat_s)


def machines_of(state: State, names: Iterable[str]) -> tuple[Machine, ...]:
    """Nodes as the planner takes them, their speeds still in GFLOP/s.

    Nodes that the coordinator sees at one address are behind one router, or on one PC: a site, with its own network.
    """
    return tuple(_machine(name, state.nodes[name], state.pace) for name in names)


def _machine(name: str, node: NodeRecord, pace: float) -> Machine:
    has = node.profile
    return Machine(
        name=name,
        memory_bytes=has.memory_bytes,
        speed=has.gflops * node.speed * pace,
        up_bytes_per_s=has.up_bytes_per_s,
        down_bytes_per_s=has.down_bytes_per_s,
        latency_s=has.latency_s,
        site=home_of(node.where.observed[0]) if node.where.observed is not None else "",
    )


def _silent(state: State, now_s: float, wishes: Wishes) -> list[str]:
    present = (name for name, node in state.nodes.items() if node.is_present)
    return [name for name in present if now_s >= _lost_s(state, name, wishes)]


def _lost_s(state: State, name: str, wishes: Wishes) -> float:
    return state.last_heard(name).at_s + wishes.silence_s


def _broken(state: State, now_s: float, wishes: Wishes, silent: Collection[str]) -> Iterator[EndCluster]:
    for cluster in state.live_clusters():
        missing = cluster.missing
        gone = [name for name in cluster.plan.members if name in silent or not state.nodes[name].is_present]
        if gone:
            yield EndCluster(cluster.plan.id, f"{_list(gone)} gone")
        elif cluster.phase == "training" and missing:
            yield EndCluster(cluster.plan.id, f"{' and '.join(missing)} came back without a stage")
        elif cluster.phase == "forming" and now_s >= _late_s(cluster, wishes):
            yield EndCluster(cluster.plan.id, f"{_list(missing)} not ready after {wishes.forming_s:g} s", missing)


def _leavers(state: State, now_s: float) -> Iterator[tuple[str, str]]:
    """Who may go: nobody needs what it has, because no cluster is broken or forming; or it has waited long enough."""
    is_needed = bool(state.broken) or any(cluster.phase == "forming" for cluster in state.live_clusters())
    for name, node in state.nodes.items():
        if not node.is_present or node.leaving_s is None:
            continue
        if now_s >= node.leaving_s + _LEAVE_S:
            yield name, f"{node.why}; it waited {_LEAVE_S:g} s for others to take over"
        elif node.cluster is None and not node.holding and not (node.copies and is_needed):
            yield name, node.why


def _late_s(cluster: ClusterRecord, wishes: Wishes) -> float:
    return cluster.formed_s + wishes.forming_s + cluster.plan.moving_s


def _plan(state: State, now_s: float, wishes: Wishes, silent: Collection[str]) -> MakePlan | None:
    free = _free(state, now_s, wishes, silent)
    due = _due(state, free, wishes)
    return MakePlan(tuple(free), due[1]) if due is not None and now_s >= due[0] else None


def _reconsider(state: State, now_s: float, wishes: Wishes, silent: Collection[str]) -> Reconsider | None:
    """Not while a cluster is forming or about to be, and not often: every change costs its cluster a moment."""
    free = _free(state, now_s, wishes, silent)
    if not state.run or state.ended is not None or now_s < _reconsider_s(state, free, wishes):
        return None
    if _due(state, free, wishes) is not None:
        return None
    clusters = list(state.live_clusters())
    if not clusters or any(cluster.phase == "forming" for cluster in clusters):
        return None
    reason = _why_reconsider(state, clusters, free, wishes)
    if not reason:
        return None
    return Reconsider(tuple(cluster.plan.id for cluster in clusters[-_MOST_CHANGED:]), tuple(free), reason)


def _why_reconsider(state: State, clusters: Collection[ClusterRecord], free: Collection[str], wishes: Wishes) -> str:
    """A sentence; empty if all that there is to say has been considered before."""
    before = state.considered
    if state.has_new_speeds:
        return "nodes are faster or slower than they were taken to be"
    if len(free) > wishes.num_spares and not set(free) <= (before or set()):
        return f"{_list(free)} free"
    is_large = any(len(cluster.plan.members) > wishes.min_stages for cluster in clusters)
    if len(free) < wishes.num_spares and is_large and (before is None or len(before) > len(free)):
        return f"{wishes.num_spares} spares are asked for, and {len(free)} there"
    return ""


def _reconsider_s(state: State, free: Iterable[str], wishes: Wishes) -> float:
    """Not before it is quiet, either: who comes is often one of several, and who was lost may well come back."""
    came_s = max((state.nodes[name].connected_s for name in free), default=-inf)
    return max(max((state.considered_s, *_broke_s(state))) + wishes.rest_s, came_s + wishes.wait_s)


def _free(state: State, now_s: float, wishes: Wishes, silent: Collection[str]) -> list[str]:
    return [name for name in state.free_nodes(now_s, wishes.blame_s) if name not in silent]


def _due(state: State, free: list[str], wishes: Wishes) -> tuple[float, str] | None:
    """When to plan these free nodes, and why; None: not at all.

    Once a cluster has trained, whoever is free may form another: then `min_nodes` no longer counts.
    """
    fresh = [name for name in free if name not in state.hopeless]
    has_begun = state.has_trained or any(state.live_clusters())
    needed = wishes.min_stages if has_begun else max(wishes.min_nodes, wishes.min_stages)
    if not state.run or state.ended is not None or not fresh or len(free) < needed:
        return None
    since_s = sorted(_free_since_s(state.nodes[name], wishes) for name in free)
    broken = [cluster for cluster in state.broken if _members(state, cluster) & set(fresh)]
    if broken:
        soon_s = max((since_s[needed - 1], *_letting_go_s(state)))
        if len(broken) > 1 and not any(state.live_clusters()):  # by our own line or restart: all will come back
            wait_s = min(wishes.wait_s, _BACK_S)
            soon_s = max(soon_s, min(_quiet_s(state, free, wait_s), soon_s + wishes.max_wait * wait_s))
        return soon_s, f"cluster {' and '.join(broken)} broke"
    enough_s = max(since_s[needed - 1], min(_free_since_s(state.nodes[name], wishes) for name in fresh))
    quiet_s = max(_quiet_s(state, free, wishes.wait_s), enough_s)
    patience_s = enough_s + wishes.max_wait * wishes.wait_s
    who = f"{len(free)} nodes are free" if len(free) > 1 else "a node is free"
    if quiet_s <= patience_s:
        return quiet_s, f"{who}, and nobody came for {wishes.wait_s:g} s"
    return patience_s, f"{who}, and have waited for {wishes.max_wait * wishes.wait_s:g} s"


def _quiet_s(state: State, free: Iterable[str], wait_s: float) -> float:
    """When nobody will have come for so long."""
    return max(state.nodes[name].connected_s for name in free) + wait_s


def _broke_s(state: State) -> Iterator[float]:
    """When clusters broke that none has taken the place of."""
    for cluster in state.broken:
        if (found := state.clusters.get(cluster)) is not None and found.ended_s is not None:
            yield found.ended_s


def _letting_go_s(state: State) -> Iterator[float]:
    """Until when to wait for those who have yet to put down what they have learnt."""
    for name, node in state.nodes.items():
        if node.is_present and node.letting_go_s is not None and not state.last_heard(name).is_away:
            yield node.free_from_s


def _members(state: State, cluster: str) -> set[str]:
    found = state.clusters.get(cluster)
    return set(found.plan.members) if found is not None else set()


def _free_since_s(node: NodeRecord, wishes: Wishes) -> float:
    return node.free_since_s if node.blamed_s is None else max(node.free_since_s, node.blamed_s + wishes.blame_s)


def _turns(state: State, now_s: float, wishes: Wishes) -> Iterator[float]:
    """All moments at which a decision may change, past ones too."""
    free = _free(state, now_s, wishes, _silent(state, now_s, wishes))
    yield now_s + wishes.beat_s
    yield _reconsider_s(state, free, wishes)
    for name, node in state.nodes.items():
        if node.is_present:
            yield _lost_s(state, name, wishes)
        if node.blamed_s is not None:
            yield node.blamed_s + wishes.blame_s
        if node.letting_go_s is not None:
            yield node.free_from_s
        if node.leaving_s is not None:
            yield node.leaving_s + _LEAVE_S
    for cluster in state.live_clusters():
        yield _late_s(cluster, wishes)
    due = _due(state, free, wishes)
    if due is not None:
        yield due[0]


def _list(names: Iterable[str]) -> str:
    """`a is`, `a and b are`."""
    listed = list(names)
    return f"{' and '.join(listed)} {'is' if len(listed) == 1 else 'are'}"
