"""A simulated stage's part in averaging: as `node.ringdesk`, with a number in place of weights.

In each ring every member sends its number to all others of the attempt; who has them all has the average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ravnest.core.orders import (
    Abandon,
    Average,
    Averaged,
    Begun,
    Commit,
    LayRings,
    NotAveraged,
    RingsReady,
    Shifted,
)
from tests.traces.world import Line

if TYPE_CHECKING:
    from tests.traces.node import Node
    from tests.traces.stage import Stage

_REACH_AGAIN_S = 5.0

RingOrder = LayRings | Average | Commit | Abandon


class _Value(NamedTuple):
    """What a member sends to another of a ring."""

    round: int
    attempt: int
    ring: int
    sender: str
    value: str


class RingDesk:
    """Orders are carried out one after the other; a line that broke stays broken until rings are laid anew."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.being: Node = stage.being
        self._laid: LayRings | None = None
        self._lines: dict[str, Line] = {}
        self._lost: set[str] = set()
        self._is_ready = False  # all lines have been there
        self._order: Average | None = None  # the attempt under way
        self._snapshot: tuple[int, str] | None = None  # of this round
        self._values: dict[tuple[int, int, int], dict[str, str]] = {}
        self._closed_round = 0
        self._said: list[Begun | Averaged | NotAveraged | Shifted] = []  # of the latest round
        self._is_done = False  # with this attempt, for better or worse

    def order(self, order: RingOrder) -> None:
        match order:
            case LayRings():
                self._lay(order)
            case Average():
                self._average(order)
            case Commit(round=number, attempt=attempt):
                now = self._order
                if now is not None and (now.round, now.attempt) == (number, attempt):
                    self._order, self._snapshot, self._closed_round = None, None, number
                    self._stage.ask(lambda: self._say(Shifted(number)))
                else:
                    self._say_again(number)
            case Abandon(round=number):
                if self._order is not None and self._order.round <= number:
                    self._order = self._snapshot = None
                self._closed_round = max(self._closed_round, number)

    def _say(self, report: Begun | Averaged | NotAveraged | Shifted) -> None:
        self._said = [*(said for said in self._said if said.round == report.round), report]
        self._stage.tell(report)

    def _say_again(self, number: int) -> None:
        for report in self._said:
            if report.round == number:
                self._stage.tell(report)

    def close(self) -> None:
        """Neighbours in rings see the lines close."""
        laid, self._laid = self._laid, None
        if laid is not None:
            for peer in laid.peers:
                self.being.fleet.world.leave(self._place(laid, peer.name), self)
        for line in self._lines.values():
            line.close("the ring's member has ended")
        self._lines, self._lost, self._order, self._snapshot, self._is_ready = {}, set(), None, None, False

    def _place(self, laid: LayRings, peer: str) -> tuple[str, int, str, str]:
        return "ring", laid.generation, min(peer, self.being.name), max(peer, self.being.name)

    def _lay(self, laid: LayRings) -> None:
        if self._laid == laid:
            if self._is_ready:
                self._stage.tell(RingsReady(laid.generation))
            return
        self.close()
        self._laid = laid
        self._look_if_ready(laid)
        for peer in laid.peers:
            self._reach(laid, peer.name)

    def _reach(self, laid: LayRings, name: str) -> None:
        if self._laid is laid:
            self.being.fleet.world.meet(self._place(laid, name), self, lambda line: self._met(laid, name, line))

    def _met(self, laid: LayRings, name: str, line: Line) -> None:
        if self._laid is not laid:
            line.close("it has other rings now")
            return
        self._lines[name] = line
        self._look_if_ready(laid)

    def _look_if_ready(self, laid: LayRings) -> None:
        if len(self._lines) == len(laid.peers):
            self._is_ready = True
            self._stage.tell(RingsReady(laid.generation))

    def _average(self, order: Average) -> None:
        if self._laid is None or order.generation != self._laid.generation or order.round <= self._closed_round:
            self._say_again(order.round)
            return
        now = self._order
        if now is not None and now.round == order.round and order.attempt <= now.attempt:
            self._say_again(order.round)
            return
        self._order, self._is_done = order, False
        if self._snapshot is None or self._snapshot[0] != order.round:
            self._stage.ask(lambda: self._begin(order))
        else:
            self._attempt(order)

    def _begin(self, order: Average) -> None:
        if self._order is not None and self._order.round == order.round:
            self._snapshot = order.round, f"{self.being.name} {self._stage.updates}"
            self._say(Begun(order.round))
            self._attempt(self._order)

    def _attempt(self, order: Average) -> None:
        assert self._laid is not None
        assert self._snapshot is not None
        for seat in self._laid.seats:
            value = _Value(order.round, order.attempt, seat.ring, self.being.name, self._snapshot[1])
            self._take(value)
            for name in seat.members:
                if name in order.weights and name != self.being.name:
                    if name in self._lost:
                        self._fail(order, name)
                        return
                    self._lines[name].send(self, value)
        self._look()

    def hear(self, line: Line, what: Any) -> None:
        assert isinstance(what, _Value)
        self._take(what)
        self._look()

    def _take(self, value: _Value) -> None:
        self._values.setdefault((value.round, value.attempt, value.ring), {})[value.sender] = value.value

    def _look(self) -> None:
        """Whether all numbers of all rings are there."""
        now = self._order
        if now is None or self._laid is None or self._snapshot is None or self._is_done:
            return
        digests: dict[int, str] = {}
        for seat in self._laid.seats:
            here = self._values.get((now.round, now.attempt, seat.ring), {})
            wanted = [name for name in seat.members if name in now.weights]
            if not here.keys() >= set(wanted):
                return
            digests[seat.ring] = " ".join(here[name] for name in wanted)
        self._values = {key: held for key, held in self._values.items() if key[:2] > (now.round, now.attempt)}
        self._is_done = True
        self._say(Averaged(round=now.round, attempt=now.attempt, digests=digests))

    def lost(self, line: Line, reason: str) -> None:
        name = next((name for name, known in self._lines.items() if known is line), None)
        laid = self._laid
        if name is None or laid is None:
            return
        if not self._is_ready:  # it is tried again until all are there
            del self._lines[name]
            self._stage.later(_REACH_AGAIN_S, lambda: self._reach(laid, name))
            return
        del self._lines[name]
        self._lost.add(name)
        now = self._order
        if now is not None and self._snapshot is not None and name in now.weights:
            self._fail(now, name)

    def _fail(self, order: Average, name: str) -> None:
        if self._is_done:
            return
        self._is_done = True
        self._say(NotAveraged(order.round, order.attempt, f"{name} is gone", name))
