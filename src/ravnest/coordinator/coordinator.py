"""The coordinator: keeps the state, carries out what `decide` says, and tells each node what it should be.

Everything that happens is an event: it changes the state (`apply`) and is kept in the journal. All of this lives in
one asyncio loop; only planning, which computes, is done in a thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec

from ..core.config import require
from ..core.control import (
    Beat,
    Copied,
    Desired,
    Hello,
    Leave,
    LetGo,
    Moved,
    Part,
    Peer,
    Report,
    Said,
    Tell,
    Told,
    Welcome,
    Whereabouts,
)
from ..core.errors import FrameError, RavnestError
from ..core.orders import (
    Averaged,
    Begun,
    Evaluated,
    Failed,
    Linked,
    Lost,
    NotAveraged,
    Order,
    Ready,
    RingsReady,
    Save,
    Saved,
    Shifted,
    Updated,
)
from ..net.addresses import check_address
from ..net.agree import Introduction
from ..net.feeding import feed_purpose
from ..net.hub import HubConfig, RelayHub
from .averaging import Averaging
from .blobs import Blobs
from .clusters import LiveCluster
from .copies import Copies
from .copying import CopyWishes
from .decide import (
    Decision,
    EndCluster,
    LetLeave,
    LoseNode,
    MakePlan,
    Reconsider,
    Wishes,
    decide,
    machines_of,
    next_look_s,
)
from .events import (
    CallerRefused,
    Cluster,
    ClusterEnded,
    Considered,
    Event,
    LeaseGranted,
    LeaseReturned,
    LeaseSettled,
    LinkMade,
    NodeBlamed,
    NodeConnected,
    NodeGone,
    NodeKicked,
    NodeLeaving,
    NodeLetGo,
    NodeMoved,
    NodeReady,
    NodeSlowed,
    Noted,
    PlanFailed,
    PlanMade,
    RoundClosed,
)  # fmt: skip
from .feeder import Feeder
from .orphans import Orphans
from .patience import Patience
from .people import COORDINATOR
from .records import ClusterRecord, LinkRecord
from .requester import Piece, Requester, StageFiles
from .rounds import AveragingWishes
from .sessions import Session
from .slow import Watch
from .sources import Beginning, find_beginning
from .state import State, apply

__all__ = ["Coordinator"]

_MOST_REFUSALS = 8  # kinds that are told apart at a time, so that strangers cannot fill the log
_GATHER_S = 0.25  # a mishap that frees some nodes often frees more: all of them are planned together
_RETIRE_S = 30.0  # that a cluster may take to train what it has before it ends for a better one
_REST_S = 0.05  # between two looks: each goes over all nodes, and what happens often happens to many at once


class Coordinator:
    """Give it a state and somebody who wants a model trained; tell it what nodes say."""

    def __init__(
        self,
        state: State,
        requester: Requester,
        wishes: Wishes,
        *,
        averaging: AveragingWishes | None = None,
        copying: CopyWishes | None = None,
        keep: Callable[[Event], None] = lambda event: None,
        clock: Callable[[], float] = time.time,
        patience: Patience | None = None,
    ) -> None:
        self.state, self.requester, self.wishes = state, requester, wishes
        self.beat_s = wishes.beat_s
        self.hub = RelayHub(HubConfig(on_refused=self.refused))
        self.blobs = Blobs()
        self.clusters: dict[str, LiveCluster] = {}
        self.sessions: dict[str, Session] = {}
        self._member_of: dict[str, LiveCluster] = {}
        self.is_ending = False
        self.averaging = Averaging(self, averaging or AveragingWishes())
        self.copies = Copies(self, copying or CopyWishes())
        self._orphans: Orphans | None = None  # clusters of an earlier life of this coordinator
        self._keep = keep
        self._start_s, self._started = clock(), time.monotonic()
        self._wake = asyncio.Event()
        self._planning: asyncio.Task[None] | None = None
        self._watch = Watch()
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._telling: asyncio.TimerHandle | None = None
        self._told_s, self._tell_s = 0.0, (patience or Patience()).tell_s

    def now_s(self) -> float:
        """The time of day when we began, and what has passed since: a clock that is set does not matter."""
        return self._start_s + time.monotonic() - self._started

    def record(self, event: Event) -> None:
        apply(self.state, event)
        self._keep(event)
        if not isinstance(event, LeaseGranted | LeaseSettled | CallerRefused):  # which are many and decide nothing
            self._wake.set()

    def note(self, text: str) -> None:
        self.record(Noted(self.now_s(), text))

    def refused(self, address: str, reason: str) -> None:
        """Somebody was sent away; told with others like it in one event, and not too often."""
        key = (address.rpartition(":")[0] or address, reason)
        if key not in self._refusals and len(self._refusals) >= _MOST_REFUSALS:
            key = ("many", "for various reasons")
        self._refusals[key] += 1
        if self._telling is None:
            wait_s = max(self._told_s + self._tell_s - self.now_s(), 0.0)
            self._telling = asyncio.get_running_loop().call_later(wait_s, self.tell_refusals)

    def take_up(self) -> None:
        """Go on with a run that trained when the coordinator was stopped."""
        if self.state.round is not None:
            self.record(RoundClosed(self.now_s(), self.state.round.number, "the coordinator was started anew"))
        self._orphans = Orphans(self, self._orphan_ended)
        leases = self.state.leases
        trained, waiting = leases.counts.settled, len(leases.unsettled)
        self.note(f"the run goes on: {trained} batches are trained, {waiting} were lent when the coordinator stopped")

    def _orphan_ended(self, cluster: ClusterRecord) -> None:
        for name in cluster.plan.members:
            self._tell_desired(name)
        self.more()

    # deciding

    async def tend(self) -> None:
        """Decide and act, whenever something has changed or is due. Runs until cancelled."""
        looked_s = self.now_s()
        while True:
            self._wake.clear()
            now_s = self.now_s()  # the same for both questions: what falls due in between would be missed
            if now_s > looked_s + self.beat_s:  # this process stood still, or the PC slept: nobody else is to blame
                self.state.wake(now_s)
            looked_s = now_s
            for decision in decide(self.state, now_s, self.wishes):
                self._carry_out(decision)
            if self._orphans:
                self._orphans.look()
            else:
                self.averaging.look()
                self.copies.look()
                self._look_for_the_slow(now_s)
            await asyncio.sleep(_REST_S)
            if self._wake.is_set():
                continue
            wait_s = min(max(next_look_s(self.state, now_s, self.wishes) - self.now_s(), 0.0), 1.0)
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def tell_refusals(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        self._telling, self._told_s = None, self.now_s()
        refusals, self._refusals = self._refusals, Counter()
        for (address, reason), count in refusals.items():
            self.record(CallerRefused(self.now_s(), address, reason, count))

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case LoseNode(name=name, reason=reason):
                self.lose(name, reason, polite=False)
            case LetLeave(name=name, reason=reason):
                self.lose(name, reason, polite=True)
            case EndCluster(cluster=cluster, reason=reason, blamed=blamed):
                if (live := self.clusters.get(cluster)) is not None:
                    self._broken(live, reason, blamed)
            case MakePlan():
                is_needed = not self.is_ending or not self.clusters  # whose weights would else be lost
                if is_needed and not self._is_planning and not self._orphans:
                    self._planning = asyncio.get_running_loop().create_task(self._plan_soon())
            case Reconsider():
                if not self.is_ending and not self._is_planning and not self._orphans:
                    self._planning = asyncio.get_running_loop().create_task(self._reconsider(decision))

    @property
    def _is_planning(self) -> bool:
        return self._planning is not None and not self._planning.done()

    async def _plan_soon(self) -> None:
        await asyncio.sleep(_GATHER_S)
        for decision in decide(self.state, self.now_s(), self.wishes):
            if isinstance(decision, MakePlan):
                await self._plan(decision.nodes)

    async def _plan(self, nodes: Sequence[str]) -> None:
        began = self.now_s()
        generation = self.state.generation + 1
        try:
            machines = machines_of(self.state, nodes)
            planned = await asyncio.to_thread(self.requester.plan, machines, generation, tuple(self.state.broken))
            made: list[_Made] = []
            for cluster in planned.clusters:
                beginning = self._beginning(cluster)
                if beginning.lacking and self.requester.learnt() > beginning.updates:
                    beginning = replace(beginning, updates=self.requester.learnt())
                profiles = [self.state.nodes[name].profile for name in cluster.members]
                files = await asyncio.to_thread(self.requester.stages, cluster, profiles, beginning.lacking)
                made.append(_Made(_begun(cluster, beginning), files, beginning))
        except RavnestError as error:
            self.record(PlanFailed(self.now_s(), str(error), tuple(nodes)))
            return
        free = set(self.state.free_nodes(self.now_s(), self.wishes.blame_s))
        kept = [one for one in made if free.issuperset(one.cluster.members)]
        if len(kept) < len(made):
            self.note("a PC left while the plan was made: its cluster is planned anew")
        clusters = tuple(one.cluster for one in kept)
        took_s = self.now_s() - began
        self.record(
            PlanMade(self.now_s(), generation, clusters, planned.spares, planned.left_out, planned.reason, took_s)
        )
        for one in kept:
            self._found(one)

    async def _reconsider(self, decision: Reconsider) -> None:
        """If another plan is worth enough more, what it changes ends, when it has trained what it has."""
        members = [name for c in decision.clusters for name in self.state.clusters[c].plan.members]
        machines = machines_of(self.state, (*members, *decision.nodes))
        try:
            ends, reason = await asyncio.to_thread(self.requester.better, machines, decision.clusters)
        except RavnestError as error:
            ends, reason = (), str(error)
        self.record(Considered(self.now_s(), decision.nodes, ends, f"{decision.reason}: {reason}"))
        for cluster in ends:
            if (live := self.clusters.get(cluster)) is not None:
                live.retires, live.retires_s = f"a better plan: {reason}", self.now_s()
                self._end_if_retired(live)

    def _end_if_retired(self, live: LiveCluster) -> None:
        """All that it was fed is trained, and every stage has said so; or it takes too long."""
        if live.retires is None:
            return
        is_late = self.now_s() >= live.retires_s + _RETIRE_S
        is_done = not self.state.leases.outstanding_of(live.id) and live.least_updates >= live.feeder.windows
        if is_late or is_done:
            self._end_cluster(live.id, live.retires, is_lost=False, again=True)

    def _look_for_the_slow(self, now_s: float) -> None:
        """Nodes whose stages show another speed than they were planned with; clusters that have retired late."""
        for live in list(self.clusters.values()):
            self._end_if_retired(live)
        for found in self._watch.look(self._member_of, now_s):
            speed = self.state.nodes[found.name].speed * found.share
            self.record(NodeSlowed(now_s, found.name, speed, "its stage shows it, next to the others"))

    def _beginning(self, cluster: Cluster) -> Beginning:
        """What a new cluster goes on from."""
        updates = {(c, i): m.updates for c, live in self.clusters.items() for i, m in live.metrics.items()}
        return find_beginning(self.state, cluster.members, cluster.cuts, self.now_s(), updates)

    # clusters

    def _found(self, made: _Made) -> None:
        """A cluster begins: its members are told what to be."""
        cluster, files = made.cluster, made.files
        names, sources = cluster.members, self.copies.sources(cluster.members, made.beginning)
        tokens = [secrets.token_urlsafe(24) for _ in names[1:]]
        for token, pair in zip(tokens, pairwise(names), strict=True):
            self.hub.open(token, pair)

        def peer(stage: int, token: str) -> Peer:
            return Peer(name=names[stage], where=self.state.nodes[names[stage]].where, relay_token=token)

        parts = [
            Part(
                generation=cluster.generation, cluster=cluster.id, stage=i, count=len(names),
                file=self.blobs.put(given.file), brief=self.blobs.put(given.brief),
                weights=None if given.weights is None else self.blobs.put(given.weights),
                before=peer(i - 1, tokens[i - 1]) if i else None,
                after=peer(i + 1, tokens[i]) if i + 1 < len(names) else None,
                begin=cluster.begin, sources=sources[i], states=tuple(map(self.blobs.put, given.states)),
            )
            for i, given in enumerate(files)
        ]  # fmt: skip
        feeder = Feeder(
            accumulate=cluster.accumulate, depth=cluster.depths[0], samples_per_s=cluster.samples_per_s,
            round_trip_s=2 * self.state.nodes[names[0]].profile.latency_s, begin=cluster.begin,
        )  # fmt: skip
        live = LiveCluster(cluster, parts, feeder, self._lease, self._settle, self._broken)
        live.relay_tokens = tokens
        live.max_weights_bytes = [given.max_bytes for given in files]
        self.clusters[cluster.id] = live
        self._member_of |= dict.fromkeys(names, live)
        if self.is_ending:
            live.end_after(cluster.begin)
        for name in names:
            self._tell_desired(name)

    def _tell_desired(self, name: str) -> None:
        session = self.sessions.get(name)
        if session is None:
            return
        live = self.cluster_of(name)
        if live is None:
            session.tell(Desired(None, self.state.why_free(name)))
            return
        session.tell(Desired(live.part_of(name), live.plan.reason))
        for told in live.retold(name):
            session.tell(told)

    def cluster_of(self, name: str) -> LiveCluster | None:
        return self._member_of.get(name)

    def _broken(self, live: LiveCluster, reason: str, blamed: tuple[str, ...]) -> None:
        for name in blamed:
            self.record(NodeBlamed(self.now_s(), name, reason))
        self._end_cluster(live.id, reason, is_lost=True)

    def _end_cluster(self, cluster: str, reason: str, *, is_lost: bool, again: bool = False) -> None:
        live = self.clusters.pop(cluster, None)
        if live is None:
            return
        live.close()
        for name in live.plan.members:
            del self._member_of[name]
        for token in live.relay_tokens:
            self.hub.close(token)
        for part in live.parts:
            for blob in (part.file, part.brief, part.weights, *part.states):
                if blob is not None:
                    self.blobs.drop(blob)
        for batch in sorted(self.state.leases.outstanding_of(cluster)):
            self.record(LeaseReturned(self.now_s(), cluster, batch, reason))
        self.record(ClusterEnded(self.now_s(), cluster, reason, is_lost, again))
        self.requester.ended(cluster, reason, is_lost=is_lost)
        for name in live.plan.members:
            self._tell_desired(name)
        self.more()

    def end_cluster(self, cluster: str, reason: str) -> None:
        """The cluster has done its work."""
        self._end_cluster(cluster, reason, is_lost=False)

    def tell_order(self, name: str, order: Order) -> None:
        """To one member; said again if it reconnects."""
        live, session = self._member_of.get(name), self.sessions.get(name)
        if live is not None:
            told = live.order_one(name, order)
            if session is not None:
                session.tell(told)

    def tell(self, name: str, told: Told) -> None:
        """To one node, if it is connected."""
        if (session := self.sessions.get(name)) is not None:
            session.tell(told)

    def _tell(self, live: LiveCluster, told: Tell) -> None:
        for name in live.plan.members:
            if (session := self.sessions.get(name)) is not None:
                session.tell(told)

    # leases

    def more(self) -> None:
        """There may be something to lease."""
        for live in list(self.clusters.values()):
            live.pump()

    def _lease(self, live: LiveCluster) -> tuple[int, Sequence[Piece]] | None:
        batch = self.state.leases.grant(live.id, self.requester.available())
        if batch is None:
            return None
        pieces = self.requester.pieces(batch, live.feeder.accumulate)
        samples = sum(piece.samples for piece in pieces if piece.share)
        self.record(LeaseGranted(self.now_s(), live.id, batch, samples))
        self.requester.fed(live.id, live.feeder.windows, batch, pieces)
        return batch, pieces

    def _settle(self, live: LiveCluster, batch: int, samples: int) -> None:
        self.record(LeaseSettled(self.now_s(), live.id, batch, samples))
        self.requester.settled(batch)

    def end_training(self) -> None:
        """Nothing more is leased: each cluster trains to the end of what it got."""
        self.is_ending = True
        for live in self.clusters.values():
            self._tell(live, live.end_after(live.feeder.windows))

    def average_for_the_last_time(self) -> None:
        """Training is over: what was trained since the last round is averaged."""
        self.averaging.is_last = True
        self._wake.set()

    def end_after(self, cluster: str, updates: int) -> None:
        if (live := self.clusters.get(cluster)) is not None:
            self._tell(live, live.end_after(updates))

    def evaluate(self, cluster: str, first: int, pieces: Sequence[Piece], *, fresh: bool) -> None:
        if (live := self.clusters.get(cluster)) is not None:
            live.feeder.evaluate(first, pieces, fresh=fresh)
            live.pump()

    def checkpoint(self, cluster: str, at: int, *, whole: bool) -> None:
        """Have each stage send all that it will have learnt after so many updates."""
        if (live := self.clusters.get(cluster)) is not None:
            self._tell(live, live.order(Save(state="whole" if whole else "light", at=at)))

    def save(self, cluster: str) -> None:
        """Have each stage send its weights."""
        if (live := self.clusters.get(cluster)) is not None:
            self._tell(live, live.save())

    # what nodes say

    def arrived(self, session: Session, hello: Hello) -> None:
        name, now_s = session.name, self.now_s()
        _check_where(hello.where)
        older = self.sessions.pop(name, None)
        if older is not None:
            self.note(f"{name} came again from {session.address}: its connection from {older.address} is closed")
            older.dismiss("this node came again from elsewhere", again=False)
        self.sessions[name] = session
        live = self.cluster_of(name)
        if live is not None and live.is_training and hello.holding != live.generation:
            self._end_cluster(live.id, f"{name} came back without its stage", is_lost=True)
        self.record(
            NodeConnected(now_s, name, hello.profile, hello.where, session.address, hello.holding, hello.copies)
        )
        self.state.heard(name, now_s, "")
        session.tell(Welcome(run=self.state.run, beat_s=self.beat_s))
        self._tell_desired(name)

    def heard(self, session: Session, said: Said) -> None:
        name = session.name
        if self.sessions.get(name) is not session:
            raise FrameError("it was replaced by a newer connection")
        self.state.heard(name, self.now_s(), said.doing[:200] if isinstance(said, Beat) else None)
        match said:
            case Moved(where=where):
                _check_where(where)
                if where != self.state.nodes[name].where:
                    self.record(NodeMoved(self.now_s(), name, where))
            case Report():
                self._reported(name, said)
            case LetGo(generation=generation, copy=copy):
                self.record(NodeLetGo(self.now_s(), name, generation, copy))
                if self._orphans:
                    self._orphans.let_go(name, generation)
            case Copied():
                self.copies.reported(name, said)
            case Leave(reason=reason):
                self._leaves(name, reason[:200] or "it left")
            case Hello():
                raise FrameError("it said hello twice")

    def left(self, session: Session, reason: str) -> None:
        """Its connection is gone; the node may train on and come back. Whether it is lost is decided later."""
        if self.sessions.get(session.name) is session:
            del self.sessions[session.name]
            self.state.broke_off(session.name)
            self.note(f"the connection to {session.name} ended: {reason}")

    def lose(self, name: str, reason: str, *, polite: bool) -> None:
        live = self.cluster_of(name)
        self.record(NodeGone(self.now_s(), name, reason, polite))
        if live is not None:
            self._end_cluster(live.id, f"{name} is gone: {reason}", is_lost=True)
        session = self.sessions.pop(name, None)
        if session is not None:
            session.dismiss(reason, again=not polite)

    def _leaves(self, name: str, reason: str) -> None:
        """Its cluster trains what it has and ends; the node goes when others have taken over."""
        if self.state.nodes[name].leaving_s is not None:
            return
        self.record(NodeLeaving(self.now_s(), name, reason))
        live = self.cluster_of(name)
        if live is not None:
            live.retires, live.retires_s = f"{name} is leaving", self.now_s()
            self._end_if_retired(live)

    def kick(self, name: str, reason: str) -> None:
        """It does not come in again, and is in no roster from now on."""
        require(name in self.state.members, f"there is no node {name!r}: see `ravnest status`")
        self.record(NodeKicked(self.now_s(), name, reason))
        live = self.cluster_of(name)
        if live is not None:
            self._end_cluster(live.id, f"{name} was kicked: {reason}", is_lost=True)
        session = self.sessions.pop(name, None)
        if session is not None:
            session.dismiss(f"the requester has removed this node: {reason}", again=False)

    def blame(self, cluster: str, stage: int, reason: str) -> None:
        """What a stage reported cannot be: its node is at fault."""
        if (live := self.clusters.get(cluster)) is not None:
            self.record(NodeBlamed(self.now_s(), live.plan.members[stage], reason))
            self._end_cluster(cluster, f"{live.plan.members[stage]} is at fault: {reason}", is_lost=True)

    def _reported(self, name: str, said: Report) -> None:
        live = self.cluster_of(name)
        if live is None or said.generation != live.generation:
            return  # of a part that is no more
        stage = live.stage_of(name)
        assert stage is not None
        is_leaf = stage == len(live.plan.members) - 1
        match said.report:
            case Ready():
                if name in self.state.clusters[live.id].missing:  # else it says so once more
                    self.record(NodeReady(self.now_s(), live.id, name))
                if not live.is_training and self.state.is_training(live.id):
                    live.start()
            case Linked() as report:
                self._linked(live, name, report)
            case Failed(reason=reason, is_consequence=is_consequence):
                if not is_consequence:
                    self.record(NodeBlamed(self.now_s(), name, reason[:500]))
                self._end_cluster(live.id, f"{name} (stage {stage}) failed: {reason[:500]}", is_lost=True)
            case Lost() | Evaluated() if not is_leaf:
                raise FrameError(f"a {type(said.report).__name__} comes from the last stage only")
            case Evaluated() as report:
                live.feeder.evaluated()
                self.requester.reported(live.id, stage, report)
                live.pump()
            case Updated(metrics=metrics) as report:
                live.metrics[stage] = metrics
                if live.retires is not None:
                    self._wake.set()
                if live.plan.seconds:
                    self._watch.heard(name, metrics, live.plan.seconds[stage], self.now_s())
                self.requester.reported(live.id, stage, report)
            case Lost() | Saved() as report:
                self.requester.reported(live.id, stage, report)
            case RingsReady() | Begun() | Averaged() | NotAveraged() | Shifted() as report:
                self.averaging.reported(name, report)

    def _linked(self, live: LiveCluster, name: str, said: Linked) -> None:
        if said.peer not in (*live.plan.members, COORDINATOR) and said.peer not in self.state.ring_members:
            raise FrameError("it has a link to somebody who is neither of its cluster nor of its rings")
        made = LinkMade(self.now_s(), live.id, name, said.peer, said.how[:20], said.reason[:500], said.hint[:500])
        known = self.state.clusters[live.id].links.get((name, said.peer))
        if known != LinkRecord(made.how, made.reason, made.hint):  # else it says so once more
            self.record(made)

    # feeds

    def feed_for(self, name: str, said: Introduction) -> LiveCluster:
        """The cluster whose root dials; raises `FrameError` for anybody else."""
        live = self.cluster_of(name)
        if live is None or live.stage_of(name) != 0:
            raise FrameError(f"{name} is no root of a cluster")
        if said != Introduction.of(live.generation, feed_purpose(live.id)):
            raise FrameError(f"{name} came for another cluster or generation than its own, which is {live.generation}")
        if live.is_fed:
            raise FrameError(f"{name} came again while its cluster is being fed")
        return live


@dataclass(frozen=True)
class _Made:
    """A cluster that was planned, its files, and what it goes on from."""

    cluster: Cluster
    files: Sequence[StageFiles]
    beginning: Beginning


def _begun(cluster: Cluster, beginning: Beginning) -> Cluster:
    """The cluster with where it begins, and why."""
    if not beginning.updates:
        return cluster
    return msgspec.structs.replace(cluster, begin=beginning.updates, begins=beginning.words)


def _check_where(where: Whereabouts) -> None:
    """Others will dial these; whatever is no address would be their trouble. Raises `ValueError`."""
    for address in (*where.addresses, *([where.observed] if where.observed is not None else [])):
        check_address(address)
