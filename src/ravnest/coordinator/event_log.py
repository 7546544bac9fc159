"""Describes events in one sentence each, for the log and the status; None for frequent events.

Reasons may come from nodes and unknown clients, so a sentence is truncated and contains no control characters.
"""

from __future__ import annotations

from typing import assert_never

from ravnest.coordinator import events as on
from ravnest.coordinator.events import ClusterSpec, Event
from ravnest.core.units import UNLIMITED_BYTES, format_bytes

__all__ = ["describe", "printable"]

_MAX_LENGTH = 600


def printable(text: str) -> str:
    """The text on one line, without control characters, and truncated."""
    short = text[: _MAX_LENGTH - 1] + "…" if len(text) > _MAX_LENGTH else text
    if short.isprintable():
        return short
    return "".join(letter if letter.isprintable() else " " for letter in short)


def describe(event: Event) -> str | None:
    """Describe an event and its reason; tokens are never included."""
    text = _describe(event)
    return None if text is None else printable(text)


_NodeEvent = (
    on.TokenIssued | on.NodeEnrolled | on.NodeKicked | on.NodeConnected | on.NodeProfileChanged | on.NodeLost
    | on.NodeLeaving | on.NodeQuarantined | on.NodeSpeedEstimated | on.FleetSpeedEstimated | on.ConnectionRejected
)  # fmt: skip
_ClusterEvent = (
    on.PlanCreated | on.PlanFailed | on.LinkEstablished | on.NodeReady | on.ClusterEnded | on.ReplanConsidered
)
_RoundEvent = on.RingsFormed | on.RoundStarted | on.NodeAveragingFailed | on.RoundCommitted | on.RoundClosed


def _describe(event: Event) -> str | None:
    match event:
        case on.RunStarted(run=run, steps=steps, release=release):
            batches = "no limit" if steps is None else _count(steps, "batch", "batches")
            return f"run {run} started: {batches}, release {release}"
        case on.RunEnded(reason=reason):
            return f"run ended: {reason}"
        case on.NoteAdded(text=text):
            return text
        case (
            on.PlanCreated()
            | on.PlanFailed()
            | on.LinkEstablished()
            | on.NodeReady()
            | on.ClusterEnded()
            | on.ReplanConsidered()
        ):
            return _describe_cluster_event(event)
        case on.RingsFormed() | on.RoundStarted() | on.NodeAveragingFailed() | on.RoundCommitted() | on.RoundClosed():
            return _describe_round_event(event)
        case on.NodeReleased() | on.ReplicaRecorded():
            return None
        case on.LeaseGranted() | on.LeaseSettled() | on.LeaseReturned() | on.NodeAddressChanged():
            return None
        case on.NodeRingsReady() | on.NodeAveragingStarted() | on.NodeAverageReady() | on.NodeAverageApplied():
            return None
        case _:
            return _describe_node_event(event)


def _describe_node_event(event: _NodeEvent) -> str:
    match event:
        case on.TokenIssued(at_s=at_s, expires_s=expires_s, uses=uses):
            limit = "any number of uses" if uses is None else _count(uses, "use")
            return f"ticket issued: valid for {max(expires_s - at_s, 0) / 3600:.3g} h, {limit}"
        case on.NodeEnrolled(name=name, key=key):
            return f"{name} enrolled with key {key[:12]}" if key else f"{name} enrolled"
        case on.NodeKicked(name=name, reason=reason):
            return f"{name} was removed: {reason}"
        case on.NodeConnected(name=name, profile=profile, address=address):
            is_limited = profile.memory_bytes < UNLIMITED_BYTES
            memory = format_bytes(profile.memory_bytes) if is_limited else "memory without a limit"
            size = f"{memory}, {profile.gflops:.3g} GFLOP/s on {profile.full_device}"
            origin = f" from {address}" if address else ""
            return f"{name} connected{origin}: {size}"
        case on.NodeProfileChanged(name=name, profile=profile):
            size = f"{format_bytes(profile.memory_bytes)}, {profile.gflops:.3g} GFLOP/s, {profile.threads} threads"
            return (
                f"{name} offers {size} from now on: agents of its PC have come or gone, or its memory did not suffice"
            )
        case on.NodeLost(name=name, reason=reason, is_voluntary=is_voluntary):
            return f"{name} left: {reason}" if is_voluntary else f"{name} is lost: {reason}"
        case on.NodeLeaving(name=name, reason=reason):
            return f"{name} is leaving: {reason}"
        case on.NodeQuarantined(name=name, reason=reason):
            return f"{name} is quarantined: {reason}"
        case on.NodeSpeedEstimated(name=name, speed_factor=speed_factor, reason=reason):
            return f"{name} computes at {speed_factor:.2g} times its expected speed: {reason}"
        case on.FleetSpeedEstimated(speed_factor=speed_factor, reason=reason):
            return f"all nodes compute at {speed_factor:.2g} times their measured speed: {reason}"
        case on.ConnectionRejected(address=address, reason=reason, count=count):
            return f"rejected {address}{f' {count} times' if count > 1 else ''}: {reason}"
        case _:
            assert_never(event)


def _describe_cluster_event(event: _ClusterEvent) -> str | None:
    match event:
        case on.PlanCreated(generation=generation, clusters=clusters, reason=reason, took_s=took_s):
            made = "; ".join(map(_describe_cluster, clusters)) or "no new cluster"
            return f"plan {generation}, computed in {took_s:.2g} s: {made}{_because(reason)}"
        case on.PlanFailed(reason=reason, nodes=nodes):
            return f"no plan for {', '.join(nodes)}: {reason}"
        case on.LinkEstablished(cluster=cluster, node=node, peer=peer, kind=kind, reason=reason, hint=hint):
            advice = f"; {hint}" if hint else ""
            return f"cluster {cluster}: {node} has a {kind} link to {peer}{_because(reason)}{advice}"
        case on.NodeReady(cluster=cluster, name=name):
            return f"cluster {cluster}: {name} is ready"
        case on.ReplanConsidered(ending_clusters=ending, reason=reason):
            return f"found a better plan for {', '.join(ending)}: {reason}" if ending else None
        case on.ClusterEnded(cluster=cluster, reason=reason, is_lost=is_lost):
            return f"cluster {cluster} {'failed' if is_lost else 'ended'}: {reason}"
        case _:
            assert_never(event)


def _describe_round_event(event: _RoundEvent) -> str | None:
    match event:
        case on.RingsFormed(generation=generation, clusters=clusters, rings=rings, reason=reason):
            return f"rings {generation}: {_count(len(rings), 'ring')} of {', '.join(clusters)}{_because(reason)}"
        case on.RoundStarted(number=number, attempt=attempt, weights=weights, reason=reason):
            if not attempt:
                return None
            return f"round {number}, attempt {attempt + 1}: averaging {', '.join(weights)}{_because(reason)}"
        case on.NodeAveragingFailed(name=name, number=number, reason=reason):
            return f"round {number} failed at {name}: {reason}"
        case on.RoundCommitted(number=number, took_s=took_s):
            return f"round {number} committed in {took_s:.2g} s"
        case on.RoundClosed(number=number, reason=reason):
            return f"round {number} failed: {reason}" if reason else None
        case _:
            assert_never(event)


def _describe_cluster(cluster: ClusterSpec) -> str:
    resumed = f", resumed after {_count(cluster.first_update, 'update')}" if cluster.first_update else ""
    sources = f": {cluster.restored_from}" if cluster.restored_from else ""
    speed = f"{cluster.samples_per_s:.3g} samples/s"
    return f"cluster {cluster.id} of {', '.join(cluster.members)} at {speed}{resumed}{sources}"


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
