"""The coordinator: keeps the state, carries out what `decide` says, and hears what nodes say.

Everything that happens is an event: it changes the state (`apply`) and is kept in the journal. All of this lives in one
asyncio loop. Each kind of work has its own desk: clusters that run (`Running`), plans (`Planner`), averages
(`Averaging`), copies (`Copies`), and what an earlier life of this coordinator left (`Orphans`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ..core.config import require
from ..core.control import Beat, Copied, Hello, Leave, LetGo, Moved, Report, Said, Told, Welcome, Whereabouts
from ..core.errors import FrameError
from ..core.orders import (
    Averaged,
    Begun,
    Evaluated,
    Failed,
    Linked,
    Lost,
    NotAveraged,
    Ready,
    RingsReady,
    Saved,
    Shifted,
    Updated,
)
from ..net.addresses import check_address
from ..net.hub import HubConfig, RelayHub
from .averaging import Averaging
from .blobs import Blobs
from .clusters import LiveCluster
from .copies import Copies
from .copying import CopyWishes
from .decide import Decision, EndCluster, LetLeave, LoseNode, MakePlan, Reconsider, Wishes, decide, next_look_s
from .events import (
    CallerRefused,
    Event,
    LeaseGranted,
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
    Noted,
    RoundClosed,
)
from .orphans import Orphans
from .patience import Patience
from .people import COORDINATOR
from .planner import Planner
from .records import ClusterRecord, LinkRecord
from .refusals import Refusals
from .requester import Requester
from .rounds import AveragingWishes
from .running import Running
from .sessions import Session
from .state import State, apply

__all__ = ["Coordinator"]

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
        self._keep = keep
        self._start_s, self._started = clock(), time.monotonic()
        self._wake = asyncio.Event()
        self.refusals = Refusals(self.record, self.now_s, (patience or Patience()).tell_s)
        self.refused = self.refusals.add
        self.hub = RelayHub(HubConfig(on_refused=self.refused))
        self.blobs = Blobs()
        self.sessions: dict[str, Session] = {}
        self.running = Running(self)
        self.averaging = Averaging(self, averaging or AveragingWishes())
        self.copies = Copies(self, copying or CopyWishes())
        self._planner = Planner(self)
        self._orphans: Orphans | None = None

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

    def tell(self, name: str, told: Told) -> None:
        """To one node, if it is connected."""
        if (session := self.sessions.get(name)) is not None:
            session.tell(told)

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
            self._look(now_s)
            await asyncio.sleep(_REST_S)
            if self._wake.is_set():
                continue
            due_s = next_look_s(self.state, now_s, self.wishes)
            wait_s = min(max(due_s - self.now_s(), 0.0), self.beat_s / 2)  # well within what counts as standing still
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _look(self, now_s: float) -> None:
        for decision in decide(self.state, now_s, self.wishes):
            self._carry_out(decision)
        if self._orphans:
            self._orphans.look()
            return
        self.running.end_retired()
        self.averaging.look()
        self.copies.look()
        self._planner.look()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case LoseNode(name=name, reason=reason):
                self.lose(name, reason, polite=False)
            case LetLeave(name=name, reason=reason):
                self.lose(name, reason, polite=True)
            case EndCluster(cluster=cluster, reason=reason, blamed=blamed):
                if (live := self.running.clusters.get(cluster)) is not None:
                    self.running.broken(live, reason, blamed)
            case MakePlan() | Reconsider():
                if not self._orphans:  # whose members are about to be free
                    self._planner.carry_out(decision)

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
            self.running.tell_desired(name)
        self.running.more()

    def average_for_the_last_time(self) -> None:
        """Training is over: what was trained since the last round is averaged."""
        self.averaging.is_last = True
        self._wake.set()

    # who comes and goes

    def arrived(self, session: Session, hello: Hello) -> None:
        name, now_s = session.name, self.now_s()
        _check_where(hello.where)
        older = self.sessions.pop(name, None)
        if older is not None:
            self.note(f"{name} came again from {session.address}: its connection from {older.address} is closed")
            older.dismiss("this node came again from elsewhere", again=False)
        self.sessions[name] = session
        live = self.running.of(name)
        if live is not None and live.is_training and hello.holding != live.generation:
            self.running.broken(live, f"{name} came back without its stage")
        self.record(
            NodeConnected(now_s, name, hello.profile, hello.where, session.address, hello.holding, hello.copies)
        )
        self.state.heard(name, now_s, "")
        session.tell(Welcome(run=self.state.run, beat_s=self.beat_s))
        self.running.tell_desired(name)

    def left(self, session: Session, reason: str) -> None:
        """Its connection is gone; the node may train on and come back. Whether it is lost is decided later."""
        if self.sessions.get(session.name) is session:
            del self.sessions[session.name]
            self.state.broke_off(session.name)
            self.note(f"the connection to {session.name} ended: {reason}")

    def lose(self, name: str, reason: str, *, polite: bool) -> None:
        self.record(NodeGone(self.now_s(), name, reason, polite))
        self._without(name, f"{name} is gone: {reason}")
        session = self.sessions.pop(name, None)
        if session is not None:
            session.dismiss(reason, again=not polite)

    def kick(self, name: str, reason: str) -> None:
        """It does not come in again, and is in no roster from now on."""
        require(name in self.state.members, f"there is no node {name!r}: see `ravnest status`")
        self.record(NodeKicked(self.now_s(), name, reason))
        self._without(name, f"{name} was kicked: {reason}")
        session = self.sessions.pop(name, None)
        if session is not None:
            session.dismiss(f"the requester has removed this node: {reason}", again=False)

    def blame(self, cluster: str, stage: int, reason: str) -> None:
        """What a stage reported cannot be: its node is at fault."""
        if (live := self.running.clusters.get(cluster)) is not None:
            name = live.plan.members[stage]
            self.record(NodeBlamed(self.now_s(), name, reason))
            self.running.broken(live, f"{name} is at fault: {reason}")

    def _without(self, name: str, reason: str) -> None:
        if (live := self.running.of(name)) is not None:
            self.running.broken(live, reason)

    def _leaves(self, name: str, reason: str) -> None:
        """Its cluster trains what it has and ends; the node goes when others have taken over."""
        if self.state.nodes[name].leaving_s is None:
            self.record(NodeLeaving(self.now_s(), name, reason))
            if (live := self.running.of(name)) is not None:
                self.running.retire(live.id, f"{name} is leaving")

    # what nodes say

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
                live = self.running.of(name)
                if live is not None and said.generation == live.generation:  # else of a part that is no more
                    self._reported(name, live, said)
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

    def _reported(self, name: str, live: LiveCluster, said: Report) -> None:
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
                self.running.broken(live, f"{name} (stage {stage}) failed: {reason[:500]}")
            case Lost() | Evaluated() if not is_leaf:
                raise FrameError(f"a {type(said.report).__name__} comes from the last stage only")
            case Evaluated() as report:
                live.feeder.evaluated()
                self.requester.reported(live.id, stage, report)
                live.pump()
            case Updated(metrics=metrics) as report:
                live.metrics[stage] = metrics
                self._planner.heard(name, live.plan, stage, metrics)
                self.requester.reported(live.id, stage, report)
                if live.retires is not None:
                    self._wake.set()
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


def _check_where(where: Whereabouts) -> None:
    """Others will dial these; whatever is no address would be their trouble. Raises `ValueError`."""
    for address in (*where.addresses, *([where.observed] if where.observed is not None else [])):
        check_address(address)
