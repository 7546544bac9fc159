"""Carries out averaging decisions: forms rings, starts, commits and closes rounds, and records reports of nodes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from itertools import combinations
from math import inf

from ravnest.coordinator.context import CoordinatorContext
from ravnest.coordinator.events import (
    NodeAverageApplied,
    NodeAverageReady,
    NodeAveragingFailed,
    NodeAveragingStarted,
    NodeRingsReady,
    RingsFormed,
    RoundClosed,
    RoundCommitted,
    RoundStarted,
)
from ravnest.coordinator.policy.averaging import (
    AveragingPolicy,
    CloseRound,
    CommitRound,
    FormNewRings,
    StartRound,
    clusters_with_weight,
    decide_round,
)
from ravnest.coordinator.requester import RingShape
from ravnest.coordinator.state import CoordinatorState
from ravnest.errors import RavnestError
from ravnest.planner.rings import LineLoad, choose_codec
from ravnest.protocol.commands import (
    AbortAveraging,
    AverageApplied,
    AverageReady,
    AveragingFailed,
    AveragingStarted,
    Command,
    CommitAverage,
    FormRings,
    RingPosition,
    RingsReady,
    StartAveraging,
)
from ravnest.protocol.peer import Peer

__all__ = ["AveragingService"]

_MAX_FULLY_LINKED = 6  # members of a ring
_CHUNK_S, _MIN_CHUNK, _MAX_CHUNK = 0.05, 2**13, 2**18

AveragingReport = RingsReady | AveragingStarted | AverageReady | AveragingFailed | AverageApplied


class AveragingService:
    """Rings and rounds; runs in the coordinator's loop."""

    def __init__(self, context: CoordinatorContext, policy: AveragingPolicy) -> None:
        self._context, self.policy = context, policy
        self._forming_rings: asyncio.Task[None] | None = None
        self._tokens: list[str] = []
        self.latest_averages: dict[str, AverageReady] = {}  # by node
        self._codec_in_use = ""
        self.is_final = False  # training is over: remaining samples are averaged

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to average, or no other cluster to average with."""
        state = self._context.state
        training = [cluster.plan.id for cluster in state.training_clusters()]
        if not self.policy.average_every or len(training) < 2:
            return state.round is None
        return state.round is None and not any(
            state.samples_since_average.get(c, 0) for c in clusters_with_weight(state, training)
        )

    def tick(self) -> None:
        """Carry out the decisions that are due."""
        context = self._context
        for decision in decide_round(context.state, context.now_s(), self.policy, is_final=self.is_final):
            match decision:
                case FormNewRings(clusters=clusters, reason=reason):
                    if self._forming_rings is None or self._forming_rings.done():
                        self._forming_rings = asyncio.get_running_loop().create_task(self._form_rings(clusters, reason))
                case StartRound(number=number, attempt=attempt, weights=weights, reason=reason):
                    context.record(RoundStarted(context.now_s(), number, attempt, weights, reason))
                    self._send_to_participants(self._start_command())
                case CommitRound(number=number, attempt=attempt):
                    assert context.state.round is not None
                    took_s = context.now_s() - context.state.round.started_s
                    context.record(RoundCommitted(context.now_s(), number, attempt, took_s))
                    self._send_to_participants(CommitAverage(number, attempt))
                case CloseRound(number=number, reason=reason):
                    if reason:
                        self._send_to_rings(AbortAveraging(number, reason))
                    context.record(RoundClosed(context.now_s(), number, reason))

    async def _form_rings(self, clusters: tuple[str, ...], reason: str) -> None:
        context = self._context
        plans = [context.running.clusters[cluster].plan for cluster in clusters if cluster in context.running.clusters]
        try:
            shapes = await asyncio.to_thread(context.requester.rings, plans)
        except RavnestError as error:
            context.note(f"cannot form rings of {', '.join(clusters)}: {error}")
            return
        if any(not context.state.is_training(cluster) for cluster in clusters):
            return  # a cluster ended meanwhile: rings are decided again
        generation = context.state.generation + 1
        context.record(
            RingsFormed(context.now_s(), generation, clusters, tuple(shape.members for shape in shapes), reason)
        )
        self._send_rings(generation, shapes)

    def _send_rings(self, generation: int, shapes: list[RingShape]) -> None:
        """Send each node its rings, and its peers in them with a relay token for each pair."""
        context = self._context
        for token in self._tokens:
            context.relay.close(token)
        pairs: dict[tuple[str, str], str] = {}
        for shape in shapes:
            for a, b in _linked_pairs(shape.members):
                pairs.setdefault((min(a, b), max(a, b)), secrets.token_urlsafe(24))
        for pair, token in pairs.items():
            context.relay.open(token, pair)
        self._tokens = list(pairs.values())
        for name in sorted({name for shape in shapes for name in shape.members}):
            positions = tuple(
                RingPosition(ring, shape.members, shape.targets)
                for ring, shape in enumerate(shapes)
                if name in shape.members
            )
            peers = tuple(
                Peer(name=other, addresses=context.state.nodes[other].peer_addresses, relay_token=token)
                for pair, token in pairs.items()
                if name in pair
                for other in pair
                if other != name
            )
            context.running.send_command(name, FormRings(generation, positions, peers))

    def _start_command(self) -> StartAveraging:
        state = self._context.state
        assert state.rings is not None
        assert state.round is not None
        weights = {
            name: weight for cluster, weight in state.round.weights.items() for name in _nodes_of(state, cluster)
        }
        return StartAveraging(
            generation=state.rings.generation, round=state.round.number, attempt=state.round.attempt, weights=weights,
            codec=self._codec(weights), outer=self.policy.outer, piece_elements=_chunk_elements(state, weights),
            within_s=20 * self.policy.grace_s,
        )  # fmt: skip

    def _codec(self, names: Iterable[str]) -> str:
        """The configured codec, or one chosen by the uplinks of these nodes and the traffic of the last round."""
        if self.policy.codec != "auto":
            return self.policy.codec
        state = self._context.state
        rates = [cluster.plan.samples_per_s for cluster in state.training_clusters() if cluster.plan.samples_per_s > 0]
        between_s = self.policy.average_every * len(rates) / sum(rates) if rates else None
        choice = choose_codec([self._load(name) for name in names], between_s or None)
        if choice.codec != self._codec_in_use:
            self._codec_in_use = choice.codec
            self._context.note(f"averages are sent as {choice.codec}: {choice.reason}")
        return choice.codec

    def _load(self, name: str) -> LineLoad:
        rate, last = self._context.state.nodes[name].profile.up_bytes_per_s, self.latest_averages.get(name)
        return LineLoad(rate) if last is None else LineLoad(rate, float(max(last.sent_bytes + last.saved_bytes, 0)))

    def _send_to_participants(self, command: Command) -> None:
        state = self._context.state
        assert state.round is not None
        for cluster in state.round.weights:
            for name in _nodes_of(state, cluster):
                self._context.running.send_command(name, command)

    def _send_to_rings(self, command: Command) -> None:
        state = self._context.state
        for name in state.ring_members:
            self._context.running.send_command(name, command)

    def handle_report(self, name: str, report: AveragingReport) -> None:
        """Record a report of rings and rounds."""
        record, at_s = self._context.record, self._context.now_s()
        match report:
            case RingsReady(generation=generation):
                record(NodeRingsReady(at_s, name, generation))
            case AveragingStarted(round=number):
                record(NodeAveragingStarted(at_s, name, number))
            case AverageReady(round=number, attempt=attempt, digests=digests):
                self.latest_averages[name] = report
                record(NodeAverageReady(at_s, name, number, attempt, digests))
            case AveragingFailed(round=number, attempt=attempt, reason=reason, peer=peer):
                record(NodeAveragingFailed(at_s, name, number, attempt, reason[:500], peer[:63]))
            case AverageApplied(round=number):
                record(NodeAverageApplied(at_s, name, number))


def _linked_pairs(members: tuple[str, ...]) -> Iterable[tuple[str, str]]:
    """Neighbours; in a small ring all pairs, so that the ring closes without a new link when a member is lost."""
    if len(members) <= _MAX_FULLY_LINKED:
        return combinations(members, 2)
    return zip(members, (*members[1:], members[0]), strict=True)


def _chunk_elements(state: CoordinatorState, names: Iterable[str]) -> int:
    """Values that the slowest uplink sends in `_CHUNK_S`, so that nothing waits long behind a chunk."""
    slowest = min((state.nodes[name].profile.up_bytes_per_s for name in names), default=inf)
    return int(min(max(slowest * _CHUNK_S / 4, _MIN_CHUNK), _MAX_CHUNK))


def _nodes_of(state: CoordinatorState, cluster: str) -> tuple[str, ...]:
    """Nodes of a cluster that are in a ring."""
    record = state.clusters.get(cluster)
    in_rings = state.ring_members
    return tuple(name for name in record.plan.members if name in in_rings) if record is not None else ()
