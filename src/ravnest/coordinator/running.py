"""The clusters that run: how one begins and ends, what it is lent, and what its members are told.

A cluster may be asked to retire: it gets nothing more to train, and ends when it has trained what it has. Its members
then form another, which goes on from what they have learnt; nothing is trained twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from ..core.control import Desired, Part, Peer, Source, Tell, Told
from ..core.errors import FrameError
from ..core.orders import Order, Save
from ..net.agree import Introduction
from ..net.feeding import feed_purpose
from ..net.hub import RelayHub
from .blobs import Blobs
from .clusters import LiveCluster
from .events import Cluster, ClusterEnded, Event, LeaseGranted, LeaseReturned, LeaseSettled, NodeBlamed
from .feeder import Feeder
from .requester import Piece, Requester, StageFiles
from .sources import Beginning
from .state import State

__all__ = ["Made", "Running"]

_RETIRE_S = 30.0  # that a cluster may take to train what it has before it ends all the same


@dataclass(frozen=True)
class Made:
    """A cluster that was planned, its files, and what it goes on from."""

    cluster: Cluster
    files: Sequence[StageFiles]
    beginning: Beginning


class _Office(Protocol):
    """What of the coordinator is needed here."""

    state: State
    requester: Requester
    hub: RelayHub
    blobs: Blobs

    def now_s(self) -> float: ...

    def record(self, event: Event) -> None: ...

    def tell(self, name: str, told: Told) -> None: ...


class Running:
    """Lives in the coordinator's loop."""

    def __init__(self, office: _Office) -> None:
        self._office = office
        self.clusters: dict[str, LiveCluster] = {}  # who was last given something to train comes last
        self.is_ending = False
        self._member_of: dict[str, LiveCluster] = {}

    def of(self, name: str) -> LiveCluster | None:
        """The cluster that a node is in."""
        return self._member_of.get(name)

    @property
    def members(self) -> list[str]:
        """All nodes that are in a cluster."""
        return list(self._member_of)

    @property
    def updates(self) -> dict[tuple[str, int], int]:
        """That stages have made, by cluster and stage."""
        return {(c, i): m.updates for c, live in self.clusters.items() for i, m in live.metrics.items()}

    # beginning and ending

    def found(self, made: Made, sources: Sequence[tuple[Source, ...]]) -> None:
        """A cluster begins: its members are told what to be."""
        office, cluster = self._office, made.cluster
        names = cluster.members
        tokens = [secrets.token_urlsafe(24) for _ in names[1:]]
        for token, pair in zip(tokens, pairwise(names), strict=True):
            office.hub.open(token, pair)
        feeder = Feeder(
            accumulate=cluster.accumulate, depth=cluster.depths[0], samples_per_s=cluster.samples_per_s,
            round_trip_s=2 * office.state.nodes[names[0]].profile.latency_s, begin=cluster.begin,
        )  # fmt: skip
        parts = self._parts(made, tokens, sources)
        live = LiveCluster(cluster, parts, feeder, self._lease, self._settle, self.broken)
        live.relay_tokens = tokens
        live.max_weights_bytes = [given.max_bytes for given in made.files]
        self.clusters[cluster.id] = live
        self._member_of |= dict.fromkeys(names, live)
        if self.is_ending:
            live.end_after(cluster.begin)
        for name in names:
            self.tell_desired(name)

    def _parts(self, made: Made, tokens: Sequence[str], sources: Sequence[tuple[Source, ...]]) -> list[Part]:
        cluster, blobs, nodes = made.cluster, self._office.blobs, self._office.state.nodes
        names = cluster.members

        def peer(stage: int, token: str) -> Peer:
            return Peer(name=names[stage], where=nodes[names[stage]].where, relay_token=token)

        return [
            Part(
                generation=cluster.generation, cluster=cluster.id, stage=i, count=len(names),
                file=blobs.put(given.file), brief=blobs.put(given.brief),
                weights=None if given.weights is None else blobs.put(given.weights),
                before=peer(i - 1, tokens[i - 1]) if i else None,
                after=peer(i + 1, tokens[i]) if i + 1 < len(names) else None,
                begin=cluster.begin, sources=sources[i], states=tuple(map(blobs.put, given.states)),
            )
            for i, given in enumerate(made.files)
        ]  # fmt: skip

    def broken(self, live: LiveCluster, reason: str, blamed: tuple[str, ...] = ()) -> None:
        """It cannot go on, and these members are at fault."""
        for name in blamed:
            self._office.record(NodeBlamed(self._office.now_s(), name, reason))
        self.end(live.id, reason, is_lost=True)

    def end(self, cluster: str, reason: str, *, is_lost: bool, again: bool = False) -> None:
        office, live = self._office, self.clusters.pop(cluster, None)
        if live is None:
            return
        live.close()
        for name in live.plan.members:
            del self._member_of[name]
        for token in live.relay_tokens:
            office.hub.close(token)
        for part in live.parts:
            for blob in (part.file, part.brief, part.weights, *part.states):
                if blob is not None:
                    office.blobs.drop(blob)
        for batch in sorted(office.state.leases.outstanding_of(cluster)):
            office.record(LeaseReturned(office.now_s(), cluster, batch, reason))
        office.record(ClusterEnded(office.now_s(), cluster, reason, is_lost, again))
        office.requester.ended(cluster, reason, is_lost=is_lost)
        for name in live.plan.members:
            self.tell_desired(name)
        self.more()

    def retire(self, cluster: str, reason: str) -> None:
        """Give it nothing more; it ends when it has trained what it has."""
        if (live := self.clusters.get(cluster)) is not None and live.retires is None:
            live.retires, live.retires_s = reason, self._office.now_s()
            self.end_retired()

    def end_retired(self) -> None:
        """Those that have trained all that they were fed, as every stage has said; and those that take too long."""
        for live in list(self.clusters.values()):
            if live.retires is not None:
                is_late = self._office.now_s() >= live.retires_s + _RETIRE_S
                outstanding = self._office.state.leases.outstanding_of(live.id)
                if is_late or (not outstanding and live.least_updates >= live.feeder.windows):
                    self.end(live.id, live.retires, is_lost=False, again=True)

    # leases

    def more(self) -> None:
        """There may be something to lease: where data are scarce, everybody in turn."""
        for live in list(self.clusters.values()):
            live.pump()

    def _lease(self, live: LiveCluster) -> tuple[int, Sequence[Piece]] | None:
        office = self._office
        batch = office.state.leases.grant(live.id, office.requester.available())
        if batch is None:
            return None
        pieces = office.requester.pieces(batch, live.feeder.accumulate)
        samples = sum(piece.samples for piece in pieces if piece.share)
        office.record(LeaseGranted(office.now_s(), live.id, batch, samples))
        office.requester.fed(live.id, live.feeder.windows, batch, pieces)
        self.clusters[live.id] = self.clusters.pop(live.id)
        return batch, pieces

    def _settle(self, live: LiveCluster, batch: int, samples: int) -> None:
        self._office.record(LeaseSettled(self._office.now_s(), live.id, batch, samples))
        self._office.requester.settled(batch)

    def feed_for(self, name: str, said: Introduction) -> LiveCluster:
        """The cluster whose root dials; raises `FrameError` for anybody else."""
        live = self.of(name)
        if live is None or live.stage_of(name) != 0:
            raise FrameError(f"{name} is no root of a cluster")
        if said != Introduction.of(live.generation, feed_purpose(live.id)):
            raise FrameError(f"{name} came for another cluster or generation than its own, which is {live.generation}")
        if live.is_fed:
            raise FrameError(f"{name} came again while its cluster is being fed")
        return live

    # orders

    def tell_desired(self, name: str) -> None:
        live = self.of(name)
        if live is None:
            self._office.tell(name, Desired(None, self._office.state.why_free(name)))
            return
        self._office.tell(name, Desired(live.part_of(name), live.plan.reason))
        for told in live.retold(name):
            self._office.tell(name, told)

    def tell_order(self, name: str, order: Order) -> None:
        """To one member; said again if it reconnects."""
        if (live := self.of(name)) is not None:
            self._office.tell(name, live.order_one(name, order))

    def _tell_all(self, live: LiveCluster, told: Tell) -> None:
        for name in live.plan.members:
            self._office.tell(name, told)

    def end_training(self) -> None:
        """Nothing more is leased: each cluster trains to the end of what it got."""
        self.is_ending = True
        for live in self.clusters.values():
            self._tell_all(live, live.end_after(live.feeder.windows))

    def end_after(self, cluster: str, updates: int) -> None:
        if (live := self.clusters.get(cluster)) is not None:
            self._tell_all(live, live.end_after(updates))

    def evaluate(self, cluster: str, first: int, pieces: Sequence[Piece], *, fresh: bool) -> None:
        if (live := self.clusters.get(cluster)) is not None:
            live.feeder.evaluate(first, pieces, fresh=fresh)
            live.pump()

    def checkpoint(self, cluster: str, at: int, *, whole: bool) -> None:
        """Have each stage send all that it will have learnt after so many updates."""
        if (live := self.clusters.get(cluster)) is not None:
            self._tell_all(live, live.order(Save(state="whole" if whole else "light", at=at)))

    def save(self, cluster: str) -> None:
        """Have each stage send its weights."""
        if (live := self.clusters.get(cluster)) is not None:
            self._tell_all(live, live.save())
