"""Applies events to the state: state = apply(... apply(apply(empty, event 0), event 1) ..., event n).

Only `apply` changes a state, so the same events always give the same state, and a snapshot can replace them. Liveness
is neither stored nor compared: a heartbeat is not an event.
"""

from __future__ import annotations

from collections import deque
from typing import Any, assert_never

import msgspec

from ravnest.coordinator import events as on
from ravnest.coordinator.event_log import describe
from ravnest.coordinator.events import Event
from ravnest.coordinator.policy.leases import Leases
from ravnest.coordinator.state import (
    QUARANTINE_S,
    ClusterRecord,
    CoordinatorState,
    JoinToken,
    LinkRecord,
    Liveness,
    Member,
    NodeRecord,
    RejectionRecord,
    ReplicaRecord,
    RingsRecord,
    RoundRecord,
    new_event_log,
)
from ravnest.core.ids import COORDINATOR
from ravnest.protocol.control import ReplicaInfo

__all__ = ["QUARANTINE_S", "CoordinatorState", "apply", "restore", "snapshot"]

_MAX_REJECTIONS, _MAX_ENDED, _MAX_FAILED = 50, 32, 8
_WAITING = "waiting for a plan"


def apply(state: CoordinatorState, event: Event) -> None:
    """Change the state. Events of unknown nodes and clusters change nothing."""
    state.last_event_s = event.at_s
    text = describe(event)
    if text is not None:
        state.log(event.at_s, text)
    match event:
        case on.LeaseGranted(cluster=cluster, batch=batch, samples=samples):
            state.leases.grant(cluster, batch)
            if cluster in state.clusters:
                state.clusters[cluster].fed_batches.append((batch, samples))
        case on.LeaseSettled(cluster=cluster, batch=batch, samples=samples):
            if state.leases.settle(cluster, batch) == "ignored":
                state.counters.leases_ignored += 1
            else:
                state.samples_since_average[cluster] = state.samples_since_average.get(cluster, 0) + samples
                state.samples_trained[cluster] = state.samples_trained.get(cluster, 0) + samples
                _advance(state, cluster, batch)
        case on.LeaseReturned(cluster=cluster, batch=batch):
            state.leases.return_batch(cluster, batch)
        case on.RunStarted():
            _start_run(state, event)
        case on.RunEnded(reason=reason):
            state.end_reason = reason
        case on.TokenIssued(token=token, expires_s=expires_s, uses=uses):
            state.tokens[token] = JoinToken(expires_s, uses)
        case on.NodeEnrolled():
            _enroll(state, event)
        case on.NodeKicked():
            _kick(state, event)
        case on.NodeConnected():
            _connect(state, event)
        case on.NodeAddressChanged(name=name, peer_addresses=addresses):
            if name in state.nodes:
                state.nodes[name].peer_addresses = addresses
        case on.NodeProfileChanged(name=name, profile=profile):
            if name in state.nodes and state.nodes[name].profile != profile:
                state.nodes[name].profile, state.has_new_speeds = profile, True
                state.unplaceable.discard(name)
        case on.NodeLost():
            _remove(state, event)
        case on.NodeQuarantined(at_s=at_s, name=name, reason=reason, may_retry=may_retry):
            if name in state.nodes:
                state.counters.quarantined += 1
                state.nodes[name].quarantine(at_s, reason, may_retry=may_retry)
        case on.NodeLeaving(at_s=at_s, name=name, reason=reason):
            if name in state.nodes:
                state.nodes[name].leaving_s, state.nodes[name].reason = at_s, reason
        case on.NodeSpeedEstimated(name=name, speed_factor=factor):
            if name in state.nodes:
                state.nodes[name].speed_factor, state.has_new_speeds = factor, True
        case on.FleetSpeedEstimated(speed_factor=factor):
            state.fleet_speed_factor, state.has_new_speeds = factor, True
        case on.PlanCreated():
            _plan(state, event)
        case on.PlanFailed(nodes=nodes, reason=reason):
            state.counters.plans_failed += 1
            _set_idle(state, dict.fromkeys(nodes, reason))
        case on.LinkEstablished():
            _link(state, event)
        case on.NodeReady():
            _ready(state, event)
        case on.NodeReleased():
            _release(state, event)
        case on.ReplicaRecorded(at_s=at_s, name=name, replica=replica, took_s=took_s):
            if name in state.nodes and replica.cluster in state.cuts:
                state.nodes[name].add_replica(ReplicaRecord(replica, at_s, took_s))
        case on.ClusterEnded():
            _end(state, event)
        case on.ReplanConsidered(at_s=at_s, nodes=nodes):
            state.replan_considered, state.replan_considered_s, state.has_new_speeds = set(nodes), at_s, False
        case (
            on.RingsFormed()
            | on.NodeRingsReady()
            | on.RoundStarted()
            | on.NodeAveragingStarted()
            | on.NodeAverageReady()
            | on.NodeAveragingFailed()
            | on.RoundCommitted()
            | on.NodeAverageApplied()
            | on.RoundClosed()
        ):
            _apply_round(state, event)
        case on.ConnectionRejected(at_s=at_s, address=address, reason=reason, count=count):
            state.counters.rejected += count
            state.rejections = [*state.rejections[1 - _MAX_REJECTIONS :], RejectionRecord(at_s, address, reason, count)]
        case on.NoteAdded():
            pass
        case _:
            assert_never(event)


def snapshot(state: CoordinatorState) -> bytes:
    """Everything but liveness."""
    return msgspec.msgpack.encode(state, enc_hook=_encode)


def restore(data: bytes) -> CoordinatorState:
    """The state in a snapshot; raises `msgspec.MsgspecError`."""
    return msgspec.msgpack.decode(data, type=CoordinatorState, dec_hook=_decode)


def _encode(value: Any) -> Any:
    return list(value) if isinstance(value, deque) else None


def _decode(kind: type, data: Any) -> Any:
    if kind is Liveness:
        return Liveness()
    events = new_event_log()
    events.extend(msgspec.convert(data, list[tuple[float, str]]))
    return events


def _start_run(state: CoordinatorState, event: on.RunStarted) -> None:
    """Reset the state for a new run. Generations continue, so that assignments of an earlier run are recognised."""
    state.run, state.steps, state.release = event.run, event.steps, event.release
    state.started_s, state.end_reason, state.has_trained = event.at_s, None, False
    state.unplaceable, state.clusters, state.leases = set(), {}, Leases(next_new=event.first_batch)
    state.rings, state.round, state.rounds_done, state.rounds_started = None, None, 0, 0
    state.samples_since_average, state.samples_trained, state.averaged_clusters = {}, {}, set()
    state.cuts, state.failed_clusters, state.replan_considered, state.replan_considered_s = {}, [], None, event.at_s
    state.fleet_speed_factor, state.has_new_speeds = 1.0, False
    for node in state.nodes.values():
        if node.cluster is not None:
            node.cluster, node.free_since_s = None, event.at_s
        node.quarantined_s, node.quarantine_reason, node.num_failures, node.may_retry = None, "", 0, True
        node.replicas, node.releasing_s = [], None
        if node.is_present:
            node.reason = _WAITING


def _advance(state: CoordinatorState, cluster: str, batch: int) -> None:
    """Drop the batch of a cluster's next step, which is trained."""
    record = state.clusters.get(cluster)
    if record is not None and record.fed_batches and record.fed_batches[0][0] == batch:
        record.fed_batches.pop(0)
        record.num_settled += 1


def _enroll(state: CoordinatorState, event: on.NodeEnrolled) -> None:
    known = state.members.get(event.name)
    if known is not None and known.key == event.key:
        return  # a new certificate for the same node
    state.members[event.name] = Member(event.key, event.at_s)
    state.counters.enrolled += 1
    if event.token in state.tokens:
        state.tokens[event.token].used += 1


def _kick(state: CoordinatorState, event: on.NodeKicked) -> None:
    member, node = state.members.get(event.name), state.nodes.get(event.name)
    if member is not None:
        state.counters.kicked += member.kick_reason is None
        member.kick_reason = event.reason
    if node is not None:
        node.is_present, node.reason = False, event.reason


def _connect(state: CoordinatorState, event: on.NodeConnected) -> None:
    known = state.nodes.get(event.name)
    node = NodeRecord(
        profile=event.profile, peer_addresses=event.peer_addresses, address=event.address,
        held_generation=event.held_generation, connected_s=event.at_s, free_since_s=event.at_s, reason=_WAITING,
    )  # fmt: skip
    if known is not None:
        node.cluster = known.cluster
        node.quarantined_s, node.quarantine_reason = known.quarantined_s, known.quarantine_reason
        node.num_failures, node.may_retry = known.num_failures, known.may_retry
        node.speed_factor, node.num_losses = known.speed_factor, known.num_losses
        if event.held_generation:
            node.releasing_s = known.releasing_s
        if known.is_present:
            node.free_since_s, node.reason = known.free_since_s, known.reason
    if known is None or known.profile != event.profile:
        state.unplaceable.discard(event.name)
    cluster = state.clusters.get(node.cluster or "")
    if cluster is not None and event.held_generation != cluster.plan.generation:
        cluster.ready.discard(event.name)  # it no longer has its assignment
    node.replicas = [
        _replica_record(state, known, one, event.at_s) for one in event.replicas if one.cluster in state.cuts
    ]
    state.nodes[event.name] = node
    state.mark_seen(event.name, event.at_s)


def _replica_record(
    state: CoordinatorState, known: NodeRecord | None, replica: ReplicaInfo, at_s: float
) -> ReplicaRecord:
    """The known record of a replica, or else one with the time at which its cluster ended."""
    for held in known.replicas if known is not None else ():
        if held.replica == replica:
            return held
    cluster = state.clusters.get(replica.cluster)
    ended_s = cluster.ended_s if cluster is not None else None
    return ReplicaRecord(replica, at_s if ended_s is None else ended_s)


def _release(state: CoordinatorState, event: on.NodeReleased) -> None:
    node = state.nodes.get(event.name)
    if node is None:
        return
    if node.held_generation == event.generation:
        node.held_generation, node.releasing_s = 0, None
    if event.replica is not None and event.replica.cluster in state.cuts:
        node.add_replica(ReplicaRecord(event.replica, event.at_s))


def _remove(state: CoordinatorState, event: on.NodeLost) -> None:
    node = state.nodes.get(event.name)
    if node is None or not node.is_present:
        return
    node.is_present, node.reason, node.held_generation, node.releasing_s = False, event.reason, 0, None
    node.num_losses += not event.is_voluntary
    state.counters.left += event.is_voluntary
    state.counters.lost += not event.is_voluntary


def _plan(state: CoordinatorState, event: on.PlanCreated) -> None:
    state.generation = max(state.generation, event.generation)
    state.replan_considered, state.replan_considered_s = None, event.at_s
    state.counters.plans_made += 1
    for cluster in event.clusters:
        state.clusters[cluster.id] = ClusterRecord(plan=cluster, formed_s=event.at_s, reason=cluster.reason)
        state.cuts[cluster.id] = cluster.cuts
        if cluster.repairs and cluster.repairs in state.failed_clusters:
            state.failed_clusters.remove(cluster.repairs)
            if cluster.repairs in state.averaged_clusters:
                state.averaged_clusters.add(cluster.id)
        for name in cluster.members:
            node = state.nodes[name]
            assert node.cluster is None, f"{name} is in two clusters: {node.cluster} and {cluster.id}"
            node.cluster, node.reason = cluster.id, cluster.reason
    state.failed_clusters = [cluster for cluster in state.failed_clusters if _has_free_members(state, cluster)]
    _set_idle(state, {idle.name: idle.reason for idle in (*event.spares, *event.left_out)})


def _has_free_members(state: CoordinatorState, cluster: str) -> bool:
    record = state.clusters.get(cluster)
    members = (state.nodes[name] for name in record.plan.members) if record is not None else ()
    return any(node.is_present and node.cluster is None for node in members)


def _set_idle(state: CoordinatorState, reasons: dict[str, str]) -> None:
    """Note nodes without an assignment: a plan of the same nodes, or fewer, would fail again."""
    state.unplaceable = set(reasons)
    for name, reason in reasons.items():
        if name in state.nodes and state.nodes[name].is_present:
            state.nodes[name].reason = reason


def _link(state: CoordinatorState, event: on.LinkEstablished) -> None:
    cluster = state.clusters.get(event.cluster)
    known = (*cluster.plan.members, COORDINATOR, *state.ring_members) if cluster is not None else ()
    if cluster is not None and event.node in cluster.plan.members and event.peer in known:
        cluster.links[event.node, event.peer] = LinkRecord(event.kind, event.reason, event.hint)


def _ready(state: CoordinatorState, event: on.NodeReady) -> None:
    cluster = state.clusters.get(event.cluster)
    if cluster is None or cluster.phase != "forming" or event.name not in cluster.plan.members:
        return
    cluster.ready.add(event.name)
    state.nodes[event.name].held_generation = cluster.plan.generation
    if not cluster.not_ready:
        cluster.phase, cluster.training_since_s, state.has_trained = "training", event.at_s, True
        state.log(event.at_s, f"cluster {cluster.plan.id} is training: all {len(cluster.ready)} members are ready")


def _end(state: CoordinatorState, event: on.ClusterEnded) -> None:
    cluster = state.clusters.get(event.cluster)
    if cluster is None or not cluster.is_live:
        return
    cluster.fed_batches = []
    cluster.phase, cluster.ended_s, cluster.reason = "lost" if event.is_lost else "ended", event.at_s, event.reason
    state.counters.clusters_lost += event.is_lost
    state.counters.clusters_ended += not event.is_lost
    state.leases.close(event.cluster)
    for counted in (state.samples_since_average, state.samples_trained):
        counted.pop(event.cluster, None)
    if event.is_lost or event.is_replanned:
        state.failed_clusters = [*state.failed_clusters[1 - _MAX_FAILED :], event.cluster]
    for name in cluster.plan.members:
        node = state.nodes[name]
        node.cluster, node.free_since_s = None, event.at_s
        if node.is_present and node.held_generation == cluster.plan.generation:
            node.releasing_s = event.at_s
        if node.is_present:
            node.reason = f"cluster {event.cluster} ended: {event.reason}"
    ended = [record.plan.id for record in state.clusters.values() if not record.is_live]
    for cluster_id in ended[:-_MAX_ENDED]:
        del state.clusters[cluster_id]
        state.leases.forget(cluster_id)
        state.averaged_clusters.discard(cluster_id)


_RoundEvent = (
    on.RingsFormed | on.NodeRingsReady | on.RoundStarted | on.NodeAveragingStarted | on.NodeAverageReady
    | on.NodeAveragingFailed | on.RoundCommitted | on.NodeAverageApplied | on.RoundClosed
)  # fmt: skip


def _apply_round(state: CoordinatorState, event: _RoundEvent) -> None:
    """Events of other rings, rounds and attempts change nothing."""
    rings = state.rings
    if isinstance(event, on.RingsFormed):
        state.generation = max(state.generation, event.generation)
        state.rings = RingsRecord(event.generation, event.clusters, event.rings, formed_s=event.at_s)
        return
    if isinstance(event, on.NodeRingsReady):
        if rings is not None and rings.generation == event.generation:
            rings.ready.add(event.name)
        return
    current = state.round if state.round is not None and state.round.number == event.number else None
    if isinstance(event, on.RoundStarted):
        _start_attempt(state, event, current)
        return
    if current is None:
        return
    match event:
        case on.NodeAveragingStarted(name=name):
            current.started.add(name)
        case on.NodeAverageReady(name=name, attempt=attempt, digests=digests):
            if current.attempt == attempt:
                current.digests[name] = digests
        case on.NodeAveragingFailed(name=name, attempt=attempt, peer=peer):
            if current.attempt == attempt:
                current.failed[name] = peer
                if rings is not None:
                    rings.ready.discard(name)
        case on.RoundCommitted():
            current.is_committed = True
            state.rounds_done += 1
            since = state.samples_since_average
            for cluster in current.weights:
                since[cluster] = max(0, since.get(cluster, 0) - current.samples.get(cluster, 0))
                state.averaged_clusters.add(cluster)
        case on.NodeAverageApplied(name=name):
            current.applied.add(name)
        case on.RoundClosed():
            state.round = None
            if rings is not None and not rings.ready >= rings.members:
                state.rings = None  # a ring link failed: new rings are formed
        case _:
            assert_never(event)


def _start_attempt(state: CoordinatorState, event: on.RoundStarted, current: RoundRecord | None) -> None:
    """A further attempt of the current round keeps its start, its samples and its snapshots."""
    since = state.samples_since_average
    state.round = RoundRecord(
        number=event.number,
        attempt=event.attempt,
        weights=event.weights,
        samples={c: since.get(c, 0) for c in event.weights} if current is None else current.samples,
        started_s=event.at_s if current is None else current.started_s,
        attempt_started_s=event.at_s,
        started=set() if current is None else current.started,
    )
    state.rounds_started = max(state.rounds_started, event.number)
