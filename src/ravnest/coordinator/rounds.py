"""Averaging rounds, as what is known of them and what to do next: pure, like all of the coordinator's decisions.

    lay rings     when other clusters train than those that have rings, or an attempt failed, or some of them have not
                  all their links after a minute; never while a round is under way
    open a round  when the clusters with rings have trained `average_every` samples since the last, on average
    commit        when every member has its averages, and those of a ring agree
    try again     among those that are left, from the same snapshots, when one is lost or does not answer
    close         when all have taken the average over, or when nothing can come of it

A cluster weighs as many samples as it has trained since it last took part. One that is new among others that have come
further is a ghost: it weighs nothing in its first round, takes the average over, and counts from then on. One that is
slow past `grace_s` is left out of the attempt, and keeps its samples for the next round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..core.config import config, require
from . import events as on
from .records import RingsRecord, RoundRecord, State

__all__ = [
    "AveragingWishes",
    "CloseRound",
    "CommitRound",
    "LayNewRings",
    "OpenRound",
    "apply_round",
    "decide_round",
    "warm_clusters",
]

_MOST_ATTEMPTS = 4
_LINK_S = 60.0  # a link that breaks while others are still to come may be missed by one of its ends
_FINISH = 10  # times the grace that an attempt may take once all have begun


@config
class AveragingWishes:
    """How often clusters average, in samples of each on average (0: never), and how long one may be waited for.

    `codec` says how numbers travel (fp32, bf16, int8, or auto: see `plan.codec`), `outer` what becomes of an average
    (plain or nesterov).
    """

    average_every: int = 0
    grace_s: float = 60.0
    codec: str = "fp32"
    outer: str = "plain"

    def __post_init__(self) -> None:
        require(self.average_every >= 0, f"average_every is a number of samples, 0 for never, not {self.average_every}")
        require(self.grace_s > 0, f"grace_s must be above 0, not {self.grace_s}")
        codecs = ("auto", "fp32", "bf16", "int8")
        require(self.codec in codecs, f"a codec is auto, fp32, bf16 or int8, not {self.codec!r}")
        require(self.outer in ("plain", "nesterov"), f"the outer step is plain or nesterov, not {self.outer!r}")


@dataclass(frozen=True)
class LayNewRings:
    clusters: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class OpenRound:
    number: int
    attempt: int
    weights: dict[str, float]
    reason: str


@dataclass(frozen=True)
class CommitRound:
    number: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class CloseRound:
    """`reason` is empty if all went well."""

    number: int
    reason: str


RoundDecision = LayNewRings | OpenRound | CommitRound | CloseRound
_RoundEvent = (
    on.RingsLaid | on.NodeLinked | on.RoundOpened | on.NodeBegan | on.NodeAveraged | on.NodeNotAveraged
    | on.RoundCommitted | on.NodeShifted | on.RoundClosed
)  # fmt: skip


def apply_round(state: State, event: _RoundEvent) -> None:
    """Change the state by what happened to rings and rounds. What is of another round or attempt changes nothing."""
    rings, now = state.rings, state.round
    match event:
        case on.RingsLaid(generation=generation, clusters=clusters, rings=laid):
            state.generation = max(state.generation, generation)
            state.rings = RingsRecord(generation, clusters, laid, laid_s=event.at_s)
        case on.NodeLinked(name=name, generation=generation):
            if rings is not None and rings.generation == generation:
                rings.ready.add(name)
        case on.RoundOpened(at_s=at_s, number=number, attempt=attempt, weights=weights):
            opened_s = now.opened_s if now is not None and now.number == number else at_s
            is_again = now is not None and now.number == number
            begun = now.begun if now is not None and is_again else set[str]()
            counted = now.counted if now is not None and is_again else {c: state.since.get(c, 0) for c in weights}
            state.round = RoundRecord(
                number=number, attempt=attempt, weights=weights, counted=counted, opened_s=opened_s, began_s=at_s,
                begun=begun,
            )  # fmt: skip
            state.rounds_begun = max(state.rounds_begun, number)
        case on.NodeBegan(name=name, number=number):
            if now is not None and now.number == number:
                now.begun.add(name)
        case on.NodeAveraged(name=name, number=number, attempt=attempt, digests=digests):
            if now is not None and (now.number, now.attempt) == (number, attempt):
                now.averaged[name] = digests
        case on.NodeNotAveraged(name=name, number=number, attempt=attempt, peer=peer):
            if now is not None and (now.number, now.attempt) == (number, attempt):
                now.failed[name] = peer
                if rings is not None:
                    rings.ready.discard(name)
        case on.RoundCommitted(number=number):
            if now is not None and now.number == number:
                now.is_committed = True
                state.rounds_done += 1
                for cluster in now.weights:
                    state.since[cluster] = max(0, state.since.get(cluster, 0) - now.counted.get(cluster, 0))
                    state.averaged.add(cluster)
        case on.NodeShifted(name=name, number=number):
            if now is not None and now.number == number:
                now.shifted.add(name)
        case on.RoundClosed(number=number):
            if now is not None and now.number == number:
                state.round = None
                if rings is not None and not rings.ready >= rings.members:
                    state.rings = None  # a line between two of them broke: they are laid anew


def decide_round(state: State, now_s: float, wishes: AveragingWishes, *, is_last: bool = False) -> list[RoundDecision]:
    """What to do about averaging now; `is_last`: training is over, and a round is due whatever was trained since."""
    if not wishes.average_every:
        return []
    training = [cluster.plan.id for cluster in state.training_clusters()]
    if state.round is None:
        return list(_between_rounds(state, training, now_s, wishes, is_last=is_last))
    return list(_in_round(state, state.round, training, now_s, wishes))


def _between_rounds(
    state: State, training: list[str], now_s: float, wishes: AveragingWishes, *, is_last: bool
) -> Iterator[RoundDecision]:
    rings = state.rings
    if len(training) < 2:
        return
    if rings is None or set(rings.clusters) != set(training):
        yield LayNewRings(tuple(training), f"{len(training)} clusters train now")
        return
    if not rings.ready >= rings.members:
        if now_s >= rings.laid_s + _LINK_S:
            late = " and ".join(sorted(rings.members - rings.ready))
            yield LayNewRings(tuple(training), f"{late} had not all links after {_LINK_S:g} s")
        return
    warm = warm_clusters(state, training)
    samples = sum(state.since.get(cluster, 0) for cluster in warm)
    if samples and (is_last or samples >= wishes.average_every * len(warm)):
        weights = {cluster: float(state.since.get(cluster, 0)) if cluster in warm else 0.0 for cluster in training}
        reason = "training is over" if is_last else f"{samples} samples were trained since the last"
        yield OpenRound(state.rounds_begun + 1, 0, weights, reason)


def warm_clusters(state: State, training: Collection[str]) -> list[str]:
    """Those whose weights count: who has taken part before; else those who have come about as far as the furthest."""
    known = [cluster for cluster in training if cluster in state.averaged]
    most = max(state.trained.get(cluster, 0) for cluster in training)
    return known or [cluster for cluster in training if 2 * state.trained.get(cluster, 0) >= most]


def _in_round(
    state: State, now: RoundRecord, training: Collection[str], now_s: float, wishes: AveragingWishes
) -> Iterator[RoundDecision]:
    alive = {cluster: weight for cluster, weight in now.weights.items() if cluster in training}
    members = _members(state, alive)
    if now.is_committed:
        if now.shifted >= members or now_s >= now.began_s + _FINISH * wishes.grace_s:
            yield CloseRound(now.number, "")
    elif len(alive) < len(now.weights):
        gone = [cluster for cluster in now.weights if cluster not in alive]
        yield _again(now, alive, f"{' and '.join(gone)} is gone")
    elif now.failed:
        at_fault = {_cluster_of(state, peer) for peer in now.failed.values()} & alive.keys()
        rest = {cluster: weight for cluster, weight in alive.items() if cluster not in at_fault}
        yield _again(now, rest if len(rest) > 1 or now.attempt else alive, "an attempt failed")
    elif now.averaged.keys() >= members:
        differing = _differing(now.averaged)
        if differing is None:
            yield CommitRound(now.number, now.attempt, "all have the same averages")
        else:
            yield CloseRound(now.number, f"the averages of ring {differing} differ")
    elif now_s >= now.began_s + wishes.grace_s and not now.begun >= members:
        late = {_cluster_of(state, name) for name in members - now.begun}
        rest = {cluster: weight for cluster, weight in alive.items() if cluster not in late}
        yield _again(now, rest, f"{' and '.join(sorted(filter(None, late)))} did not begin in {wishes.grace_s:g} s")
    elif now_s >= now.began_s + _FINISH * wishes.grace_s:
        yield _again(now, alive, f"it did not finish in {_FINISH * wishes.grace_s:g} s")


def _again(now: RoundRecord, weights: dict[str, float], reason: str) -> RoundDecision:
    """Another attempt among these, if there is something to average."""
    if len(weights) < 2 or now.attempt + 1 >= _MOST_ATTEMPTS or not sum(weights.values()):
        return CloseRound(now.number, reason)
    return OpenRound(now.number, now.attempt + 1, weights, reason)


def _members(state: State, clusters: Collection[str]) -> set[str]:
    """Nodes of these clusters that own something to average."""
    in_rings = state.ring_members
    return {name for cluster in clusters for name in state.clusters[cluster].plan.members if name in in_rings}


def _cluster_of(state: State, name: str) -> str | None:
    node = state.nodes.get(name)
    return node.cluster if node is not None else None


def _differing(averaged: dict[str, dict[int, str]]) -> int | None:
    """A ring of which two members have different averages."""
    seen: dict[int, str] = {}
    for digests in averaged.values():
        for ring, digest in digests.items():
            if seen.setdefault(ring, digest) != digest:
                return ring
    return None
