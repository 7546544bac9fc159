"""Decides which nodes and clusters to keep, and when to plan. Pure; every decision has a reason.

    lose a node      that has sent nothing for three heartbeats
    release a node   that wants to leave, when others have its state or after a timeout (`departure`)
    end a cluster    with a lost member, or with members that are not ready in time
    create a plan    of the free nodes, and of quarantined ones where there is no plan without them: at once when a
                     cluster failed and its members have released their stages, else when no node has arrived for
                     `settle_s` and all that enrolled have connected, or after `max_settle_factor` times that
    consider a       of running clusters, together with free nodes that no plan had a place for, or when the speed of a
    replan           node turns out to be different

The caller carries a decision out and records events, which make the decision disappear; until then it is repeated.
Without an event, decisions do not change before `next_decision_s`. `token_rejection` and `choose_name` decide about
nodes that enroll.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from ravnest.coordinator.policy.departure import handover_deadline_s, released
from ravnest.coordinator.state import QUARANTINE_S, ClusterRecord, CoordinatorState, JoinToken, NodeRecord
from ravnest.core.config import config, require
from ravnest.core.ids import check_id
from ravnest.planner.fleet import Machine
from ravnest.transport.address import home_of

__all__ = [
    "ConsiderReplan",
    "CreatePlan",
    "Decision",
    "EndCluster",
    "LoseNode",
    "MembershipPolicy",
    "PlanWait",
    "ReleaseNode",
    "choose_name",
    "decide",
    "machines_of",
    "next_decision_s",
    "plan_wait",
    "plannable",
    "token_rejection",
]

_MAX_NAME_LENGTH = 63
_MISSED_HEARTBEATS = 3
_ARRIVAL_S = 30.0  # from the enrollment of a node to its connection
_RECONNECT_S = 3.0  # without a new connection before a plan, if all clusters failed at once
_MAX_REPLANNED = 4  # clusters considered together for a better plan


def choose_name(state: CoordinatorState, wanted: str, key: str) -> str:
    """The name for the holder of a key: its present name, else the wanted one, with a number if that is taken.

    The name of a kicked node stays taken. Raises `ValueError` for an invalid name.
    """
    for name, member in state.members.items():
        if member.key == key:
            return name
    name, number = check_id(wanted), 1
    while name in state.members:
        number += 1
        name = f"{wanted[: _MAX_NAME_LENGTH - len(str(number)) - 1]}-{number}"
    return name


def token_rejection(state: CoordinatorState, token: str, now_s: float, *, check_uses: bool = True) -> str | None:
    """Why a token is rejected; None if it is valid. Without `check_uses`, a used-up token is valid too.

    Compares with every token in constant time, so that timing reveals nothing about them.
    """
    found: JoinToken | None = None
    for known, entry in state.tokens.items():
        if hmac.compare_digest(_bytes(known), _bytes(token)):
            found = entry
    if found is None:
        return "unknown token: ask for a new ticket"
    if now_s >= found.expires_s:
        return "the token has expired: ask for a new ticket"
    if check_uses and found.uses is not None and found.used >= found.uses:
        return f"the token is used up ({found.uses} of {found.uses} enrollments): ask for a new ticket"
    return None


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogatepass")


@config
class MembershipPolicy:
    """Conditions under which nodes are lost and clusters are planned.

    Args:
        min_nodes: Nodes needed to start training.
        min_stages: Stages of the smallest cluster.
        settle_s: Seconds without a new node before the free nodes are planned, if all that enrolled have connected. A
            new node is there from its enrollment, and measures its PC before it connects.
        max_settle_factor: A plan waits at most this many times `settle_s`.
        heartbeat_s: Seconds between two heartbeats of a node.
        forming_timeout_s: Seconds for all members of a new cluster to be ready, besides the transfer of state.
        quarantine_s: Seconds for which plans prefer others to a node whose stage failed.
        replan_interval_s: Seconds between a change of plan and the search for a better one.
        num_spares: Nodes to keep free as spares.
    """

    min_nodes: int = 2
    min_stages: int = 2
    settle_s: float = 5.0
    max_settle_factor: float = 4.0
    heartbeat_s: float = 2.0
    forming_timeout_s: float = 120.0
    quarantine_s: float = QUARANTINE_S
    replan_interval_s: float = 60.0
    num_spares: int = 0

    def __post_init__(self) -> None:
        for name in ("min_stages", "min_nodes"):
            require(getattr(self, name) >= 1, f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("settle_s", "replan_interval_s", "quarantine_s", "num_spares"):
            require(0 <= getattr(self, name) < inf, f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("heartbeat_s", "forming_timeout_s"):
            require(0 < getattr(self, name) < inf, f"{name} must be > 0, got {getattr(self, name)}")
        require(1 <= self.max_settle_factor < inf, f"max_settle_factor must be >= 1, got {self.max_settle_factor}")

    @property
    def liveness_timeout_s(self) -> float:
        """A node that sends nothing for longer is lost."""
        return _MISSED_HEARTBEATS * self.heartbeat_s


@dataclass(frozen=True)
class PlanWait:
    """Nodes that wait for a plan, when it is due (None: not yet), and the numbers of nodes that they wait for."""

    nodes: tuple[str, ...]
    due_s: float | None = None
    num_missing: int = 0
    num_arriving: int = 0  # enrolled, and expected to connect soon


@dataclass(frozen=True)
class LoseNode:
    name: str
    reason: str


@dataclass(frozen=True)
class ReleaseNode:
    """Release a node that wants to leave."""

    name: str
    reason: str


@dataclass(frozen=True)
class EndCluster:
    """`at_fault` are the members that caused it, if known."""

    cluster: str
    reason: str
    at_fault: tuple[str, ...] = ()


@dataclass(frozen=True)
class CreatePlan:
    """Plan these free nodes, and no others."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class ConsiderReplan:
    """Look for a better plan of these clusters and these free nodes."""

    clusters: tuple[str, ...]
    nodes: tuple[str, ...]
    reason: str


Decision = LoseNode | ReleaseNode | EndCluster | CreatePlan | ConsiderReplan


def decide(state: CoordinatorState, now_s: float, policy: MembershipPolicy) -> list[Decision]:
    """Decisions due now, in the order in which to carry them out."""
    silent = _silent(state, now_s, policy)
    why_lost = f"no message for {_MISSED_HEARTBEATS} heartbeats of {policy.heartbeat_s:g} s"
    plan = _plan(state, now_s, policy, silent) or _replan(state, now_s, policy, silent)
    return [
        *(LoseNode(name, why_lost) for name in silent),
        *(ReleaseNode(name, why) for name, why in released(state, now_s, policy.min_stages) if name not in silent),
        *_ended(state, now_s, policy, silent),
        *([plan] if plan is not None else []),
    ]


def next_decision_s(state: CoordinatorState, now_s: float, policy: MembershipPolicy) -> float:
    """The first time after `now_s` at which `decide` may change without an event, at most one heartbeat later."""
    times_s = (time_s for time_s in _decision_times_s(state, now_s, policy) if time_s > now_s)
    return min(times_s, default=now_s + policy.heartbeat_s)


def plan_wait(state: CoordinatorState, now_s: float, policy: MembershipPolicy) -> PlanWait:
    """What free nodes wait for."""
    free = _plannable(state, now_s, policy, ())
    if not state.run or state.end_reason is not None:
        return PlanWait(tuple(free))
    due = _plan_due(state, free, policy)
    missing = max(_num_needed(state, policy) - len(free), 0)
    return PlanWait(tuple(free), None if due is None else due[0], missing, len(_arriving_s(state)))


def machines_of(state: CoordinatorState, names: Iterable[str]) -> tuple[Machine, ...]:
    """Nodes as input of the planner, with speeds in GFLOP/s.

    Nodes with one observed address share a router or a PC: they form a site with its own network.
    """
    return tuple(_machine(name, state.nodes[name], state.fleet_speed_factor) for name in names)


def _machine(name: str, node: NodeRecord, fleet_speed_factor: float) -> Machine:
    profile, observed = node.profile, node.peer_addresses.observed
    return Machine(
        name=name,
        memory_bytes=profile.plannable_bytes,
        speed=profile.gflops * node.speed_factor * fleet_speed_factor,
        up_bytes_per_s=profile.up_bytes_per_s,
        down_bytes_per_s=profile.down_bytes_per_s,
        latency_s=profile.latency_s,
        site=home_of(observed[0]) if observed is not None else "",
    )


def _silent(state: CoordinatorState, now_s: float, policy: MembershipPolicy) -> list[str]:
    present = (name for name, node in state.nodes.items() if node.is_present)
    return [name for name in present if now_s >= _lost_s(state, name, policy)]


def _lost_s(state: CoordinatorState, name: str, policy: MembershipPolicy) -> float:
    return state.last_seen(name).at_s + policy.liveness_timeout_s


def _ended(
    state: CoordinatorState, now_s: float, policy: MembershipPolicy, silent: Collection[str]
) -> Iterator[EndCluster]:
    """Clusters that cannot continue."""
    for cluster in state.live_clusters():
        not_ready = cluster.not_ready
        lost = [name for name in cluster.plan.members if name in silent or not state.nodes[name].is_present]
        if lost:
            yield EndCluster(cluster.plan.id, f"{_are(lost)} lost")
        elif cluster.phase == "training" and not_ready:
            yield EndCluster(cluster.plan.id, f"{' and '.join(not_ready)} reconnected without a stage")
        elif cluster.phase == "forming" and now_s >= _forming_deadline_s(cluster, policy):
            reason = f"{_are(not_ready)} not ready after {policy.forming_timeout_s:g} s"
            yield EndCluster(cluster.plan.id, reason, not_ready)


def _forming_deadline_s(cluster: ClusterRecord, policy: MembershipPolicy) -> float:
    return cluster.formed_s + policy.forming_timeout_s + cluster.plan.transfer_s


def _plan(
    state: CoordinatorState, now_s: float, policy: MembershipPolicy, silent: Collection[str]
) -> CreatePlan | None:
    free = _plannable(state, now_s, policy, silent)
    due = _plan_due(state, free, policy)
    return CreatePlan(tuple(free), due[1]) if due is not None and now_s >= due[0] else None


def _replan(
    state: CoordinatorState, now_s: float, policy: MembershipPolicy, silent: Collection[str]
) -> ConsiderReplan | None:
    """A replan, if one is due and no cluster is forming or about to form: each change interrupts a cluster."""
    free = _free(state, now_s, policy, silent)
    if not state.run or state.end_reason is not None or now_s < _replan_due_s(state, free, policy):
        return None
    if _plan_due(state, _plannable(state, now_s, policy, silent), policy) is not None:
        return None
    clusters = list(state.live_clusters())
    if not clusters or any(cluster.phase == "forming" for cluster in clusters):
        return None
    reason = _replan_reason(state, clusters, free, policy)
    if not reason:
        return None
    return ConsiderReplan(tuple(cluster.plan.id for cluster in clusters[-_MAX_REPLANNED:]), tuple(free), reason)


def _replan_reason(
    state: CoordinatorState, clusters: Collection[ClusterRecord], free: Collection[str], policy: MembershipPolicy
) -> str:
    """Why a better plan may exist; empty if nothing changed since a replan was last considered."""
    before = state.replan_considered
    if state.has_new_speeds:
        return "speed estimates changed"
    if len(free) > policy.num_spares and not set(free) <= (before or set()):
        return f"{_are(free)} free"
    is_large = any(len(cluster.plan.members) > policy.min_stages for cluster in clusters)
    if len(free) < policy.num_spares and is_large and (before is None or len(before) > len(free)):
        return f"{len(free)} of {policy.num_spares} spares are free"
    return ""


def _replan_due_s(state: CoordinatorState, free: Iterable[str], policy: MembershipPolicy) -> float:
    """After the interval, and not while nodes still connect: they often join or reconnect in groups."""
    connected_s = max((state.nodes[name].connected_s for name in free), default=-inf)
    changed_s = max((state.replan_considered_s, *_failure_times_s(state)))
    return max(changed_s + policy.replan_interval_s, connected_s + policy.settle_s)


def _free(state: CoordinatorState, now_s: float, policy: MembershipPolicy, silent: Collection[str]) -> list[str]:
    return [name for name in state.free_nodes(now_s, policy.quarantine_s) if name not in silent]


def plannable(state: CoordinatorState, now_s: float, policy: MembershipPolicy) -> list[str]:
    """Nodes that a plan may use: the free ones, and quarantined ones if there is no plan without them."""
    return _plannable(state, now_s, policy, ())


def _plannable(state: CoordinatorState, now_s: float, policy: MembershipPolicy, silent: Collection[str]) -> list[str]:
    free = _free(state, now_s, policy, silent)
    is_waiting = bool(state.failed_clusters) or not any(state.live_clusters())
    if not is_waiting or (len(free) >= _num_needed(state, policy) and not state.unplaceable.issuperset(free)):
        return free
    needed = [name for name in state.retryable_nodes(now_s, policy.quarantine_s) if name not in silent]
    return sorted((*free, *needed))


def _num_needed(state: CoordinatorState, policy: MembershipPolicy) -> int:
    """Nodes that a plan needs; `min_nodes` applies only until a first cluster has trained."""
    has_started = state.has_trained or any(state.live_clusters())
    return policy.min_stages if has_started else max(policy.min_nodes, policy.min_stages)


def _plan_due(state: CoordinatorState, free: list[str], policy: MembershipPolicy) -> tuple[float, str] | None:
    """The time at which to plan these nodes, and the reason; None: not at all."""
    unplanned = [name for name in free if name not in state.unplaceable]
    needed = _num_needed(state, policy)
    if not state.run or state.end_reason is not None or not unplanned or len(free) < needed:
        return None
    since_s = sorted(_free_since_s(state.nodes[name], policy) for name in free)
    failed = [cluster for cluster in state.failed_clusters if _members(state, cluster) & set(unplanned)]
    if failed:
        soon_s = max((since_s[needed - 1], *_release_times_s(state)))
        if len(failed) > 1 and not any(
            state.live_clusters()
        ):  # the coordinator was offline or restarted: all nodes reconnect
            wait_s = min(policy.settle_s, _RECONNECT_S)
            soon_s = max(soon_s, min(_settled_s(state, free, wait_s), soon_s + policy.max_settle_factor * wait_s))
        return soon_s, f"cluster {' and '.join(failed)} failed"
    enough_s = max(since_s[needed - 1], min(_free_since_s(state.nodes[name], policy) for name in unplanned))
    settled_s = max((_settled_s(state, free, policy.settle_s), enough_s, *_arriving_s(state)))
    max_settle_s = policy.max_settle_factor * policy.settle_s
    nodes = f"{len(free)} nodes are free" if len(free) > 1 else "1 node is free"
    if settled_s <= enough_s + max_settle_s:
        return settled_s, f"{nodes}, no node joined for {policy.settle_s:g} s"
    return enough_s + max_settle_s, f"{nodes} since {max_settle_s:g} s"


def _settled_s(state: CoordinatorState, free: Iterable[str], wait_s: float) -> float:
    """When no node has arrived for `wait_s`."""
    return max(_arrived_s(state, name) for name in free) + wait_s


def _arrived_s(state: CoordinatorState, name: str) -> float:
    """When a node was there: a new one since its enrollment, another since its last connection."""
    connected_s, member = state.nodes[name].connected_s, state.members.get(name)
    if member is None or member.enrolled_s < max(state.started_s, connected_s - _ARRIVAL_S):
        return connected_s
    return min(member.enrolled_s, connected_s)


def _arriving_s(state: CoordinatorState) -> list[float]:
    """Until when to expect members that enrolled in this run and have not connected yet: they measure their PC."""
    arriving = (member for name, member in state.members.items() if name not in state.nodes and not member.kick_reason)
    return [m.enrolled_s + _ARRIVAL_S for m in arriving if m.enrolled_s >= state.started_s]


def _failure_times_s(state: CoordinatorState) -> Iterator[float]:
    """When clusters failed that are not replaced yet."""
    for cluster in state.failed_clusters:
        if (record := state.clusters.get(cluster)) is not None and record.ended_s is not None:
            yield record.ended_s


def _release_times_s(state: CoordinatorState) -> Iterator[float]:
    """When nodes that still store the state of their stage are free at the latest."""
    for name, node in state.nodes.items():
        if node.releasing_s is not None and state.is_connected(name):
            yield node.free_from_s


def _members(state: CoordinatorState, cluster: str) -> set[str]:
    record = state.clusters.get(cluster)
    return set(record.plan.members) if record is not None else set()


def _free_since_s(node: NodeRecord, policy: MembershipPolicy) -> float:
    usable_s = -inf if node.quarantined_s is None else node.retry_s(policy.quarantine_s)
    return max(node.free_since_s, usable_s)


def _decision_times_s(state: CoordinatorState, now_s: float, policy: MembershipPolicy) -> Iterator[float]:
    """Times at which a decision may change, past ones included."""
    silent = _silent(state, now_s, policy)
    free = _free(state, now_s, policy, silent)
    yield now_s + policy.heartbeat_s
    yield _replan_due_s(state, free, policy)
    for name, node in state.nodes.items():
        if node.is_present:
            yield _lost_s(state, name, policy)
        if node.quarantined_s is not None:
            yield node.quarantined_s + policy.quarantine_s
            yield node.retry_s(policy.quarantine_s)
        if node.releasing_s is not None:
            yield node.free_from_s
        if node.leaving_s is not None:
            yield handover_deadline_s(state, name)
    for cluster in state.live_clusters():
        yield _forming_deadline_s(cluster, policy)
    due = _plan_due(state, _plannable(state, now_s, policy, silent), policy)
    if due is not None:
        yield due[0]


def _are(names: Iterable[str]) -> str:
    """`a is`, `a and b are`."""
    listed = list(names)
    return f"{' and '.join(listed)} {'is' if len(listed) == 1 else 'are'}"
