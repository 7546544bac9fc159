"""Carries out what `rounds` decides: lays rings, opens rounds, commits and closes them, and notes what nodes say."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from itertools import combinations
from math import inf
from typing import Protocol

from ..core.errors import RavnestError
from ..core.orders import (
    Abandon,
    Average,
    Averaged,
    Begun,
    Commit,
    LayRings,
    NotAveraged,
    Order,
    RingsReady,
    Seat,
    Shifted,
)
from ..core.peers import Peer
from ..net.hub import RelayHub
from ..plan.codec import LineLoad, choose_codec
from .events import (
    Event,
    NodeAveraged,
    NodeBegan,
    NodeLinked,
    NodeNotAveraged,
    NodeShifted,
    RingsLaid,
    RoundClosed,
    RoundCommitted,
    RoundOpened,
)  # fmt: skip
from .requester import Requester, RingShape
from .rounds import AveragingWishes, CloseRound, CommitRound, LayNewRings, OpenRound, decide_round, warm_clusters
from .running import Running
from .state import State

__all__ = ["Averaging", "AveragingReport", "Office"]

_ALL_LINKED = 6  # members
_PIECE_S, _LEAST_PIECE, _MOST_PIECE = 0.05, 2**13, 2**18

AveragingReport = RingsReady | Begun | Averaged | NotAveraged | Shifted


class Office(Protocol):
    """What of the coordinator is needed here."""

    state: State
    requester: Requester
    hub: RelayHub
    running: Running

    def now_s(self) -> float: ...

    def record(self, event: Event) -> None: ...

    def note(self, text: str) -> None: ...


class Averaging:
    """Lives in the coordinator's loop."""

    def __init__(self, office: Office, wishes: AveragingWishes) -> None:
        self._office, self.wishes = office, wishes
        self._laying: asyncio.Task[None] | None = None
        self._tokens: list[str] = []
        self.averaged: dict[str, Averaged] = {}  # what each node told last of a round
        self._codec_told = ""
        self.is_last = False  # training is over: what was trained since the last round is averaged

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to average, or nobody to do it with."""
        state = self._office.state
        training = [cluster.plan.id for cluster in state.training_clusters()]
        if not self.wishes.average_every or len(training) < 2:
            return state.round is None
        return state.round is None and not any(state.since.get(c, 0) for c in warm_clusters(state, training))

    def look(self) -> None:
        """Decide and act."""
        office = self._office
        for decision in decide_round(office.state, office.now_s(), self.wishes, is_last=self.is_last):
            match decision:
                case LayNewRings(clusters=clusters, reason=reason):
                    if self._laying is None or self._laying.done():
                        self._laying = asyncio.get_running_loop().create_task(self._lay(clusters, reason))
                case OpenRound(number=number, attempt=attempt, weights=weights, reason=reason):
                    office.record(RoundOpened(office.now_s(), number, attempt, weights, reason))
                    self._tell_participants(self._average())
                case CommitRound(number=number, attempt=attempt):
                    now = office.state.round
                    assert now is not None
                    office.record(RoundCommitted(office.now_s(), number, attempt, office.now_s() - now.opened_s))
                    self._tell_participants(Commit(number, attempt))
                case CloseRound(number=number, reason=reason):
                    if reason:
                        self._tell_all(Abandon(number, reason))
                    office.record(RoundClosed(office.now_s(), number, reason))

    async def _lay(self, clusters: tuple[str, ...], reason: str) -> None:
        office = self._office
        plans = [office.running.clusters[cluster].plan for cluster in clusters if cluster in office.running.clusters]
        try:
            shapes = await asyncio.to_thread(office.requester.rings, plans)
        except RavnestError as error:
            office.note(f"no rings for {', '.join(clusters)}: {error}")
            return
        if any(not office.state.is_training(cluster) for cluster in clusters):
            return  # one ended meanwhile: it is decided anew
        generation = office.state.generation + 1
        office.record(RingsLaid(office.now_s(), generation, clusters, tuple(shape.members for shape in shapes), reason))
        self._tell_seats(generation, shapes)

    def _tell_seats(self, generation: int, shapes: list[RingShape]) -> None:
        """Each node its rings, and its neighbours in them with a token for each pair."""
        office = self._office
        for token in self._tokens:
            office.hub.close(token)
        pairs: dict[tuple[str, str], str] = {}
        for shape in shapes:
            for a, b in _linked(shape.members):
                pairs.setdefault((min(a, b), max(a, b)), secrets.token_urlsafe(24))
        for pair, token in pairs.items():
            office.hub.open(token, pair)
        self._tokens = list(pairs.values())
        for name in sorted({name for shape in shapes for name in shape.members}):
            seats = tuple(
                Seat(ring, shape.members, shape.targets) for ring, shape in enumerate(shapes) if name in shape.members
            )
            peers = tuple(
                Peer(name=other, where=office.state.nodes[other].where, relay_token=token)
                for pair, token in pairs.items()
                if name in pair
                for other in pair
                if other != name
            )
            office.running.tell_order(name, LayRings(generation, seats, peers))

    def _average(self) -> Average:
        state = self._office.state
        assert state.rings is not None
        assert state.round is not None
        weights = {
            name: weight for cluster, weight in state.round.weights.items() for name in _nodes_of(state, cluster)
        }
        return Average(
            generation=state.rings.generation, round=state.round.number, attempt=state.round.attempt, weights=weights,
            codec=self._codec(weights), outer=self.wishes.outer, piece_elements=_piece_elements(state, weights),
            within_s=20 * self.wishes.grace_s,
        )  # fmt: skip

    def _codec(self, names: Iterable[str]) -> str:
        """As the user wishes; else as the lines of these nodes allow, by what the last round took."""
        if self.wishes.codec != "auto":
            return self.wishes.codec
        state = self._office.state
        rates = [cluster.plan.samples_per_s for cluster in state.training_clusters() if cluster.plan.samples_per_s > 0]
        between_s = self.wishes.average_every * len(rates) / sum(rates) if rates else None
        choice = choose_codec([self._load(name) for name in names], between_s or None)
        if choice.codec != self._codec_told:
            self._codec_told = choice.codec
            self._office.note(f"averages travel as {choice.codec}: {choice.reason}")
        return choice.codec

    def _load(self, name: str) -> LineLoad:
        rate, told = self._office.state.nodes[name].profile.up_bytes_per_s, self.averaged.get(name)
        return LineLoad(rate) if told is None else LineLoad(rate, float(max(told.sent_bytes + told.saved_bytes, 0)))

    def _tell_participants(self, order: Order) -> None:
        state = self._office.state
        assert state.round is not None
        for cluster in state.round.weights:
            for name in _nodes_of(state, cluster):
                self._office.running.tell_order(name, order)

    def _tell_all(self, order: Order) -> None:
        state = self._office.state
        for name in state.ring_members:
            self._office.running.tell_order(name, order)

    def reported(self, name: str, report: AveragingReport) -> None:
        """What a node says of rings and rounds."""
        record, at_s = self._office.record, self._office.now_s()
        match report:
            case RingsReady(generation=generation):
                record(NodeLinked(at_s, name, generation))
            case Begun(round=number):
                record(NodeBegan(at_s, name, number))
            case Averaged(round=number, attempt=attempt, digests=digests):
                self.averaged[name] = report
                record(NodeAveraged(at_s, name, number, attempt, digests))
            case NotAveraged(round=number, attempt=attempt, reason=reason, peer=peer):
                record(NodeNotAveraged(at_s, name, number, attempt, reason[:500], peer[:63]))
            case Shifted(round=number):
                record(NodeShifted(at_s, name, number))


def _linked(members: tuple[str, ...]) -> Iterable[tuple[str, str]]:
    """Neighbours; in a small ring everybody, so that those who are left when one is lost are neighbours too."""
    if len(members) <= _ALL_LINKED:
        return combinations(members, 2)
    return zip(members, (*members[1:], members[0]), strict=True)


def _piece_elements(state: State, names: Iterable[str]) -> int:
    """So many numbers as the slowest line sends in a moment, so that nothing waits long behind a piece."""
    slowest = min((state.nodes[name].profile.up_bytes_per_s for name in names), default=inf)
    return int(min(max(slowest * _PIECE_S / 4, _LEAST_PIECE), _MOST_PIECE))


def _nodes_of(state: State, cluster: str) -> tuple[str, ...]:
    """Nodes of a cluster that own something to average."""
    found = state.clusters.get(cluster)
    in_rings = state.ring_members
    return tuple(name for name in found.plan.members if name in in_rings) if found is not None else ()
