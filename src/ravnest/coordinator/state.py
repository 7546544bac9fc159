"""What a coordinator knows: state = apply(... apply(apply(nothing, event 0), event 1) ..., event n).

Only `apply` changes a state, so the same events give the same state again, and a snapshot of it equals them all. What
was heard of nodes lately (`heard`) is not kept and is outside equality: a beat is no event.
"""

from __future__ import annotations

from collections import deque
from typing import Any, assert_never

import msgspec

from ..core.control import Copy
from . import events as on
from .events import Event
from .leases import Leases
from .records import (
    BLAME_S,
    ClusterRecord,
    Hearing,
    KeptCopy,
    LinkRecord,
    Member,
    NodeRecord,
    Refusal,
    State,
    Token,
    no_words,
)
from .rounds import apply_round
from .sentences import sentence

__all__ = ["BLAME_S", "State", "apply", "restore", "snapshot"]

COORDINATOR = "coordinator"  # the peer from which a root has its batches
_MOST_REFUSALS, _MOST_ENDED, _MOST_BROKEN = 50, 32, 8


def apply(state: State, event: Event) -> None:
    """Change the state by what happened. What is said of nodes and clusters that are not known changes nothing."""
    said = sentence(event)
    if said is not None:
        state.say(event.at_s, said)
    match event:
        case on.LeaseGranted(cluster=cluster, batch=batch, samples=samples):
            state.leases.note_granted(cluster, batch)
            if cluster in state.clusters:
                state.clusters[cluster].fed.append((batch, samples))
        case on.LeaseSettled(cluster=cluster, batch=batch, samples=samples):
            if state.leases.settle(cluster, batch) == "ignored":
                state.counters.leases_ignored += 1
            else:
                state.since[cluster] = state.since.get(cluster, 0) + samples
                state.trained[cluster] = state.trained.get(cluster, 0) + samples
                _fed_one(state, cluster, batch)
        case on.LeaseReturned(cluster=cluster, batch=batch):
            state.leases.give_back(cluster, batch)
        case on.RunBegun():
            _begin(state, event)
        case on.RunEnded(reason=reason):
            state.ended = reason
        case on.TokenIssued(token=token, expires_s=expires_s, uses=uses):
            state.tokens[token] = Token(expires_s, uses)
        case on.NodeEnrolled():
            _enrol(state, event)
        case on.NodeKicked():
            _kick(state, event)
        case on.NodeConnected():
            _connect(state, event)
        case on.NodeMoved(name=name, where=where):
            if name in state.nodes:
                state.nodes[name].where = where
        case on.NodeGone():
            _lose(state, event)
        case on.NodeBlamed(at_s=at_s, name=name, reason=reason):
            if name in state.nodes:
                state.counters.blamed += 1
                state.nodes[name].blamed_s, state.nodes[name].blame = at_s, reason
        case on.NodeLeaving(at_s=at_s, name=name, reason=reason):
            if name in state.nodes:
                state.nodes[name].leaving_s, state.nodes[name].why = at_s, reason
        case on.NodeSlowed(name=name, share=share):
            if name in state.nodes:
                state.nodes[name].speed, state.has_new_speeds = share, True
        case on.FleetPaced(share=share):
            state.pace, state.has_new_speeds = share, True
        case on.PlanMade():
            _plan(state, event)
        case on.PlanFailed(nodes=nodes, reason=reason):
            state.counters.plans_failed += 1
            _leave_idle(state, dict.fromkeys(nodes, reason))
        case on.LinkMade():
            _link(state, event)
        case on.NodeReady():
            _ready(state, event)
        case on.NodeLetGo():
            _let_go(state, event)
        case on.CopyKept(at_s=at_s, name=name, copy=copy, took_s=took_s):
            if name in state.nodes and copy.cluster in state.cuts:
                state.nodes[name].keep(KeptCopy(copy, at_s, took_s))
        case on.ClusterEnded():
            _end(state, event)
        case on.Considered(at_s=at_s, nodes=nodes):
            state.considered, state.considered_s, state.has_new_speeds = set(nodes), at_s, False
        case on.RingsLaid() | on.NodeLinked() | on.RoundOpened() | on.NodeAveraged() | on.NodeNotAveraged():
            apply_round(state, event)
        case on.NodeBegan() | on.RoundCommitted() | on.NodeShifted() | on.RoundClosed():
            apply_round(state, event)
        case on.CallerRefused(at_s=at_s, address=address, reason=reason, count=count):
            state.counters.refused += count
            state.refusals = [*state.refusals[1 - _MOST_REFUSALS :], Refusal(at_s, address, reason, count)]
        case on.Noted():
            pass
        case _:
            assert_never(event)


def snapshot(state: State) -> bytes:
    """All of a state but what was heard."""
    return msgspec.msgpack.encode(state, enc_hook=_encode)


def restore(data: bytes) -> State:
    """The state of a snapshot; raises `msgspec.MsgspecError`."""
    return msgspec.msgpack.decode(data, type=State, dec_hook=_decode)


def _encode(part: Any) -> Any:
    return list(part) if isinstance(part, deque) else None


def _decode(kind: type, data: Any) -> Any:
    if kind is Hearing:
        return Hearing()
    words = no_words()
    words.extend(msgspec.convert(data, list[tuple[float, str]]))
    return words


def _begin(state: State, event: on.RunBegun) -> None:
    """A generation is never used twice, so that what a node still holds of an earlier run is not taken for a part."""
    state.run, state.steps, state.release = event.run, event.steps, event.release
    state.begun_s, state.ended, state.has_trained = event.at_s, None, False
    state.hopeless, state.clusters, state.leases = set(), {}, Leases(next_new=event.first)
    state.rings, state.round, state.rounds_done, state.rounds_begun = None, None, 0, 0
    state.since, state.trained, state.averaged = {}, {}, set()
    state.cuts, state.broken, state.considered, state.considered_s = {}, [], None, event.at_s
    state.pace, state.has_new_speeds = 1.0, False
    for node in state.nodes.values():
        if node.cluster is not None:
            node.cluster, node.free_since_s = None, event.at_s
        node.blamed_s, node.blame, node.copies, node.letting_go_s = None, "", [], None
        if node.is_present:
            node.why = "it waits for a plan"


def _fed_one(state: State, cluster: str, batch: int) -> None:
    """A cluster has trained the batch of its next window."""
    found = state.clusters.get(cluster)
    if found is not None and found.fed and found.fed[0][0] == batch:
        found.fed.pop(0)
        found.done += 1


def _enrol(state: State, event: on.NodeEnrolled) -> None:
    known = state.members.get(event.name)
    if known is not None and known.key == event.key:
        return  # the same node has a new certificate, and takes nobody's place
    state.members[event.name] = Member(event.key, event.at_s)
    state.counters.enrolled += 1
    if event.token in state.tokens:
        state.tokens[event.token].used += 1


def _kick(state: State, event: on.NodeKicked) -> None:
    member, node = state.members.get(event.name), state.nodes.get(event.name)
    if member is not None:
        state.counters.kicked += member.kicked is None
        member.kicked = event.reason
    if node is not None:
        node.is_present, node.why = False, event.reason


def _connect(state: State, event: on.NodeConnected) -> None:
    known = state.nodes.get(event.name)
    node = NodeRecord(
        profile=event.profile, where=event.where, address=event.address, holding=event.holding,
        connected_s=event.at_s, free_since_s=event.at_s, why="it waits for a plan",
    )  # fmt: skip
    if known is not None:
        node.cluster, node.blamed_s, node.blame = known.cluster, known.blamed_s, known.blame
        node.speed, node.losses = known.speed, known.losses
        if event.holding:
            node.letting_go_s = known.letting_go_s
        if known.is_present:
            node.free_since_s, node.why = known.free_since_s, known.why
    if known is None or known.profile != event.profile:
        state.hopeless.discard(event.name)
    cluster = state.clusters.get(node.cluster or "")
    if cluster is not None and event.holding != cluster.plan.generation:
        cluster.ready.discard(event.name)  # it no longer has its part
    node.copies = [_kept(state, known, copy, event.at_s) for copy in event.copies if copy.cluster in state.cuts]
    state.nodes[event.name] = node
    state.heard(event.name, event.at_s)


def _kept(state: State, known: NodeRecord | None, copy: Copy, at_s: float) -> KeptCopy:
    """As of when it was known, or else as of when its cluster ended."""
    for kept in known.copies if known is not None else ():
        if kept.copy == copy:
            return kept
    cluster = state.clusters.get(copy.cluster)
    ended_s = cluster.ended_s if cluster is not None else None
    return KeptCopy(copy, at_s if ended_s is None else ended_s)


def _let_go(state: State, event: on.NodeLetGo) -> None:
    node = state.nodes.get(event.name)
    if node is None:
        return
    if node.holding == event.generation:
        node.holding, node.letting_go_s = 0, None
    if event.copy is not None and event.copy.cluster in state.cuts:
        node.keep(KeptCopy(event.copy, event.at_s))


def _lose(state: State, event: on.NodeGone) -> None:
    node = state.nodes.get(event.name)
    if node is None or not node.is_present:
        return
    node.is_present, node.why, node.holding, node.letting_go_s = False, event.reason, 0, None
    node.losses += not event.polite
    state.counters.left += event.polite
    state.counters.lost += not event.polite


def _plan(state: State, event: on.PlanMade) -> None:
    state.generation = max(state.generation, event.generation)
    state.considered, state.considered_s = None, event.at_s
    state.counters.plans_made += 1
    for cluster in event.clusters:
        state.clusters[cluster.id] = ClusterRecord(plan=cluster, formed_s=event.at_s, why=cluster.reason)
        state.cuts[cluster.id] = cluster.cuts
        if cluster.mends and cluster.mends in state.broken:
            state.broken.remove(cluster.mends)
            if cluster.mends in state.averaged:
                state.averaged.add(cluster.id)
        for name in cluster.members:
            node = state.nodes[name]
            assert node.cluster is None, f"{name} is planned twice: {node.cluster} and {cluster.id}"
            node.cluster, node.why = cluster.id, cluster.reason
    state.broken = [cluster for cluster in state.broken if _has_free_members(state, cluster)]
    _leave_idle(state, {idle.name: idle.reason for idle in (*event.spares, *event.left_out)})


def _has_free_members(state: State, cluster: str) -> bool:
    found = state.clusters.get(cluster)
    members = (state.nodes[name] for name in found.plan.members) if found is not None else ()
    return any(node.is_present and node.cluster is None for node in members)


def _leave_idle(state: State, why: dict[str, str]) -> None:
    """These got no part. The same nodes, or fewer of them, need not be asked about again."""
    state.hopeless = set(why)
    for name, reason in why.items():
        if name in state.nodes and state.nodes[name].is_present:
            state.nodes[name].why = reason


def _link(state: State, event: on.LinkMade) -> None:
    cluster = state.clusters.get(event.cluster)
    known = (*cluster.plan.members, COORDINATOR, *state.ring_members) if cluster is not None else ()
    if cluster is not None and event.a in cluster.plan.members and event.b in known:
        cluster.links[event.a, event.b] = LinkRecord(event.how, event.reason, event.hint)


def _ready(state: State, event: on.NodeReady) -> None:
    cluster = state.clusters.get(event.cluster)
    if cluster is None or cluster.phase != "forming" or event.name not in cluster.plan.members:
        return
    cluster.ready.add(event.name)
    state.nodes[event.name].holding = cluster.plan.generation
    if not cluster.missing:
        cluster.phase, cluster.trains_since_s, state.has_trained = "training", event.at_s, True
        state.say(event.at_s, f"cluster {cluster.plan.id} trains: all {len(cluster.ready)} members are ready")


def _end(state: State, event: on.ClusterEnded) -> None:
    cluster = state.clusters.get(event.cluster)
    if cluster is None or not cluster.is_live:
        return
    cluster.fed = []
    cluster.phase, cluster.ended_s, cluster.why = "lost" if event.is_lost else "ended", event.at_s, event.reason
    state.counters.clusters_lost += event.is_lost
    state.counters.clusters_ended += not event.is_lost
    state.leases.close(event.cluster)
    for counted in (state.since, state.trained):
        counted.pop(event.cluster, None)
    if event.is_lost or event.again:
        state.broken = [*state.broken[1 - _MOST_BROKEN :], event.cluster]
    for name in cluster.plan.members:
        node = state.nodes[name]
        node.cluster, node.free_since_s = None, event.at_s
        if node.is_present and node.holding == cluster.plan.generation:
            node.letting_go_s = event.at_s
        if node.is_present:
            node.why = f"cluster {event.cluster} ended: {event.reason}"
    over = [found.plan.id for found in state.clusters.values() if not found.is_live]
    for cluster_id in over[:-_MOST_ENDED]:
        del state.clusters[cluster_id]
        state.leases.forget(cluster_id)
        state.averaged.discard(cluster_id)
