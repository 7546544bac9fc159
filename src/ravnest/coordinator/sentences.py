"""Events as people read them: one plain sentence each, with its reason; None for what comes too often to be read.

Some of the words are those of nodes and strangers, so a sentence is cut and holds nothing that could move a terminal.
"""

from __future__ import annotations

from typing import assert_never

from ..core.config import format_bytes
from . import events as on
from .events import Cluster, Event

__all__ = ["plain", "sentence"]

_MOST_LETTERS = 600


def plain(text: str) -> str:
    """The text on one line, without control characters and not too long."""
    short = text[: _MOST_LETTERS - 1] + "…" if len(text) > _MOST_LETTERS else text
    return "".join(letter if letter.isprintable() else " " for letter in short)


def sentence(event: Event) -> str | None:
    """What happened and why. A token is never told."""
    said = _sentence(event)
    return None if said is None else plain(said)


def _sentence(event: Event) -> str | None:
    match event:
        case on.RunBegun(run=run, steps=steps, release=release):
            return f"run {run} begins: {_batches(steps)}, release {release}"
        case on.RunEnded(reason=reason):
            return f"the run is over: {reason}"
        case on.Noted(text=text):
            return text
        case on.PlanMade() | on.PlanFailed() | on.LinkMade() | on.NodeReady() | on.ClusterEnded() | on.Considered():
            return _about_clusters(event)
        case on.NodeLetGo() | on.CopyKept():
            return None
        case on.LeaseGranted() | on.LeaseSettled() | on.LeaseReturned() | on.NodeMoved():
            return None
        case on.NodeLinked() | on.NodeBegan() | on.NodeAveraged() | on.NodeShifted():
            return None
        case on.RingsLaid() | on.RoundOpened() | on.NodeNotAveraged() | on.RoundCommitted() | on.RoundClosed():
            return _about_rounds(event)
        case _:
            return _about_nodes(event)


_AboutNodes = (
    on.TokenIssued | on.NodeEnrolled | on.NodeKicked | on.NodeConnected | on.NodeGone | on.NodeLeaving | on.NodeBlamed
    | on.NodeSlowed | on.FleetPaced
    | on.CallerRefused
)  # fmt: skip
_AboutRounds = on.RingsLaid | on.RoundOpened | on.NodeNotAveraged | on.RoundCommitted | on.RoundClosed
_AboutClusters = on.PlanMade | on.PlanFailed | on.LinkMade | on.NodeReady | on.ClusterEnded | on.Considered


def _about_nodes(event: _AboutNodes) -> str:
    match event:
        case on.TokenIssued(at_s=at_s, expires_s=expires_s, uses=uses):
            times = "any number of times" if uses is None else _count(uses, "time")
            return f"a ticket was issued: good for {max(expires_s - at_s, 0) / 3600:.3g} h, {times}"
        case on.NodeEnrolled(name=name, key=key):
            return f"{name} enrolled with key {key[:12]}"
        case on.NodeKicked(name=name, reason=reason):
            return f"{name} was sent away for good: {reason}"
        case on.NodeConnected(name=name, profile=has, address=address):
            size = f"{format_bytes(has.memory_bytes)}, {has.gflops:.3g} GFLOP/s on {has.device}"
            return f"{name} connected from {address}: {size}"
        case on.NodeGone(name=name, reason=reason, polite=polite):
            return f"{name} left: {reason}" if polite else f"{name} is lost: {reason}"
        case on.NodeLeaving(name=name, reason=reason):
            return f"{name} is leaving: {reason}"
        case on.NodeBlamed(name=name, reason=reason):
            return f"{name} is left out of plans for a while: {reason}"
        case on.NodeSlowed(name=name, share=share, reason=reason):
            return f"{name} computes at {share:.2g} of the speed that is expected of it: {reason}"
        case on.FleetPaced(share=share, reason=reason):
            return f"all compute at {share:.2g} of the speeds that they measured: {reason}"
        case on.CallerRefused(address=address, reason=reason, count=count):
            return f"refused {address}{f' {count} times' if count > 1 else ''}: {reason}"
        case _:
            assert_never(event)


def _about_clusters(event: _AboutClusters) -> str | None:
    match event:
        case on.PlanMade(generation=generation, clusters=clusters, reason=reason, took_s=took_s):
            made = "; ".join(map(_cluster, clusters)) or "no new cluster"
            return f"plan {generation}, made in {took_s:.2g} s: {made}{_because(reason)}"
        case on.PlanFailed(reason=reason, nodes=nodes):
            return f"no plan for {', '.join(nodes)}: {reason}"
        case on.LinkMade(cluster=cluster, a=a, b=b, how=how, reason=reason, hint=hint):
            return f"cluster {cluster}: {a} has a {how} link to {b}{_because(reason)}{f'; {hint}' if hint else ''}"
        case on.NodeReady(cluster=cluster, name=name):
            return f"cluster {cluster}: {name} is ready"
        case on.Considered(ends=ends, reason=reason):
            return f"a better plan for {', '.join(ends)}: {reason}" if ends else None
        case on.ClusterEnded(cluster=cluster, reason=reason, is_lost=is_lost):
            return f"cluster {cluster} {'is lost' if is_lost else 'ended'}: {reason}"
        case _:
            assert_never(event)


def _about_rounds(event: _AboutRounds) -> str | None:
    match event:
        case on.RingsLaid(generation=generation, clusters=clusters, rings=rings, reason=reason):
            return f"rings {generation}: {_count(len(rings), 'ring')} of {', '.join(clusters)}{_because(reason)}"
        case on.RoundOpened(number=number, attempt=attempt, weights=weights, reason=reason):
            again = f", attempt {attempt + 1}," if attempt else ""
            return f"round {number}{again} averages {', '.join(weights)}{_because(reason)}" if attempt else None
        case on.NodeNotAveraged(name=name, number=number, reason=reason):
            return f"round {number} failed at {name}: {reason}"
        case on.RoundCommitted(number=number, took_s=took_s):
            return f"round {number} is averaged, in {took_s:.2g} s"
        case on.RoundClosed(number=number, reason=reason):
            return f"nothing came of round {number}: {reason}" if reason else None
        case _:
            assert_never(event)


def _cluster(cluster: Cluster) -> str:
    goes_on = f", which goes on after {_count(cluster.begin, 'update')}" if cluster.begin else ""
    begins = f": {cluster.begins}" if cluster.begins else ""
    speed = f"{cluster.samples_per_s:.3g} samples/s"
    return f"cluster {cluster.id} of {', '.join(cluster.members)} at {speed}{goes_on}{begins}"


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _batches(steps: int | None) -> str:
    return "without an end" if steps is None else _count(steps, "batch", "batches")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
