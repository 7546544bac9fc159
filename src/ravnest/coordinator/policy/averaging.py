"""Decides when clusters form rings, average, retry and close an averaging round. Pure.

    form rings    when the set of training clusters differs from the clusters of the current rings, after a failed
                  attempt, or when a member lacks ring links after 60 s; never during a round
    start round   when the clusters with weight have trained `average_every` samples each, on average, since the last
    commit        when every member has its averages, and the averages of each ring agree
    retry         among the remaining clusters, from the same snapshots, when a cluster is lost or does not answer
    close         when all members have applied the average, or when the round cannot succeed

The weight of a cluster is the number of samples it has trained since it last took part. A new cluster that is far
behind the others has weight zero in its first round: it adopts the average, and has weight from then on. A cluster that
does not start within `grace_s` is left out of the next attempt, and keeps its samples for the next round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ravnest.coordinator.state import CoordinatorState, RoundRecord
from ravnest.core.config import config, require

__all__ = [
    "AveragingPolicy",
    "CloseRound",
    "CommitRound",
    "FormNewRings",
    "StartRound",
    "decide_round",
    "clusters_with_weight",
]

_MAX_ATTEMPTS = 4
_LINK_TIMEOUT_S = 60.0  # one end may not notice a link that fails while its other links are still being set up
_ATTEMPT_GRACES = 10  # an attempt may take this many times `grace_s`


@config
class AveragingPolicy:
    """Conditions, encoding and outer optimizer of averages.

    Args:
        average_every: Samples that a cluster trains between two rounds, on average over the clusters; 0: never.
        grace_s: Seconds to wait for a cluster to start before it is left out of the attempt.
        codec: Encoding of averages on the wire: fp32, bf16, int8, or auto (see `planner.rings.choose_codec`).
        outer: Outer optimizer applied to an average: plain or nesterov.
    """

    average_every: int = 0
    grace_s: float = 60.0
    codec: str = "fp32"
    outer: str = "plain"

    def __post_init__(self) -> None:
        require(self.average_every >= 0, f"average_every must be >= 0, got {self.average_every}")
        require(self.grace_s > 0, f"grace_s must be > 0, got {self.grace_s}")
        codecs = ("auto", "fp32", "bf16", "int8")
        require(self.codec in codecs, f"codec must be auto, fp32, bf16 or int8, got {self.codec!r}")
        require(self.outer in ("plain", "nesterov"), f"outer must be plain or nesterov, got {self.outer!r}")


@dataclass(frozen=True)
class FormNewRings:
    clusters: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class StartRound:
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
    """`reason` is empty if the round succeeded."""

    number: int
    reason: str


RoundDecision = FormNewRings | StartRound | CommitRound | CloseRound


def decide_round(
    state: CoordinatorState, now_s: float, policy: AveragingPolicy, *, is_final: bool = False
) -> list[RoundDecision]:
    """Next steps of averaging. With `is_final`, training is over and a round is due for any sample since the last."""
    if not policy.average_every:
        return []
    training = [cluster.plan.id for cluster in state.training_clusters()]
    if state.round is None:
        return list(_between_rounds(state, training, now_s, policy, is_final=is_final))
    return list(_in_round(state, state.round, training, now_s, policy))


def _between_rounds(
    state: CoordinatorState, training: list[str], now_s: float, policy: AveragingPolicy, *, is_final: bool
) -> Iterator[RoundDecision]:
    rings = state.rings
    if len(training) < 2:
        return
    if rings is None or set(rings.clusters) != set(training):
        yield FormNewRings(tuple(training), f"{len(training)} clusters are training")
        return
    if not rings.ready >= rings.members:
        if now_s >= rings.formed_s + _LINK_TIMEOUT_S:
            late = " and ".join(sorted(rings.members - rings.ready))
            yield FormNewRings(tuple(training), f"{late} had no complete set of ring links after {_LINK_TIMEOUT_S:g} s")
        return
    since = state.samples_since_average
    weighted = clusters_with_weight(state, training)
    samples = sum(since.get(cluster, 0) for cluster in weighted)
    if samples and (is_final or samples >= policy.average_every * len(weighted)):
        weights = {cluster: float(since.get(cluster, 0)) if cluster in weighted else 0.0 for cluster in training}
        reason = "training is over" if is_final else f"{samples} samples trained since the last round"
        yield StartRound(state.rounds_started + 1, 0, weights, reason)


def clusters_with_weight(state: CoordinatorState, training: Collection[str]) -> list[str]:
    """Clusters that have averaged before, or else those with at least half of the most samples trained by any."""
    averaged = [cluster for cluster in training if cluster in state.averaged_clusters]
    most = max(state.samples_trained.get(cluster, 0) for cluster in training)
    return averaged or [cluster for cluster in training if 2 * state.samples_trained.get(cluster, 0) >= most]


def _in_round(
    state: CoordinatorState, current: RoundRecord, training: Collection[str], now_s: float, policy: AveragingPolicy
) -> Iterator[RoundDecision]:
    alive = {cluster: weight for cluster, weight in current.weights.items() if cluster in training}
    members = _members(state, alive)
    attempt_timeout_s = _ATTEMPT_GRACES * policy.grace_s
    is_late = now_s >= current.attempt_started_s + attempt_timeout_s
    if current.is_committed:
        if current.applied >= members or is_late:
            yield CloseRound(current.number, "")
    elif len(alive) < len(current.weights):
        lost = [cluster for cluster in current.weights if cluster not in alive]
        yield _retry(current, alive, f"lost {' and '.join(lost)}")
    elif current.failed:
        at_fault = {_cluster_of(state, peer) for peer in current.failed.values()} & alive.keys()
        rest = {cluster: weight for cluster, weight in alive.items() if cluster not in at_fault}
        yield _retry(current, rest if len(rest) > 1 or current.attempt else alive, "the last attempt failed")
    elif current.digests.keys() >= members:
        differing = _differing_ring(current.digests)
        if differing is None:
            yield CommitRound(current.number, current.attempt, "all members have the same averages")
        else:
            yield CloseRound(current.number, f"members of ring {differing} computed different averages")
    elif now_s >= current.attempt_started_s + policy.grace_s and not current.started >= members:
        late = {_cluster_of(state, name) for name in members - current.started}
        rest = {cluster: weight for cluster, weight in alive.items() if cluster not in late}
        names = " and ".join(sorted(filter(None, late)))
        yield _retry(current, rest, f"{names} did not start within {policy.grace_s:g} s")
    elif is_late:
        yield _retry(current, alive, f"the last attempt did not finish within {attempt_timeout_s:g} s")


def _retry(current: RoundRecord, weights: dict[str, float], reason: str) -> RoundDecision:
    """Another attempt with these weights, or the end of the round if it cannot succeed."""
    if len(weights) < 2 or current.attempt + 1 >= _MAX_ATTEMPTS or not sum(weights.values()):
        return CloseRound(current.number, reason)
    return StartRound(current.number, current.attempt + 1, weights, reason)


def _members(state: CoordinatorState, clusters: Collection[str]) -> set[str]:
    """Nodes of these clusters that are in a ring."""
    in_rings = state.ring_members
    return {name for cluster in clusters for name in state.clusters[cluster].plan.members if name in in_rings}


def _cluster_of(state: CoordinatorState, name: str) -> str | None:
    node = state.nodes.get(name)
    return node.cluster if node is not None else None


def _differing_ring(digests: dict[str, dict[int, str]]) -> int | None:
    """A ring in which two members have different averages."""
    seen: dict[int, str] = {}
    for by_ring in digests.values():
        for ring, digest in by_ring.items():
            if seen.setdefault(ring, digest) != digest:
                return ring
    return None
