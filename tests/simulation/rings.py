"""Averaging of a simulated stage, like `worker.averaging`, with a string in place of weights.

In each ring every member sends its value to all others of the attempt; a member with all values has the average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ravnest.protocol.commands import (
    AbortAveraging,
    AverageApplied,
    AverageReady,
    AveragingFailed,
    AveragingStarted,
    CommitAverage,
    FormRings,
    RingsReady,
    StartAveraging,
)
from tests.simulation.world import SimulatedLink

if TYPE_CHECKING:
    from tests.simulation.node import Node
    from tests.simulation.stage import Stage

_REACH_AGAIN_S = 5.0

RingOrder = FormRings | StartAveraging | CommitAverage | AbortAveraging


class _Value(NamedTuple):
    """A value sent to another member of a ring."""

    round: int
    attempt: int
    ring: int
    sender: str
    value: str


class SimulatedAveraging:
    """Executes orders one after the other; a failed link stays failed until new rings are formed."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.host: Node = stage.host
        self._rings: FormRings | None = None
        self._links: dict[str, SimulatedLink] = {}
        self._lost: set[str] = set()
        self._is_ready = False  # all links were established
        self._order: StartAveraging | None = None  # the current attempt
        self._snapshot: tuple[int, str] | None = None  # of this round
        self._values: dict[tuple[int, int, int], dict[str, str]] = {}
        self._closed_round = 0
        self._reports: list[AveragingStarted | AverageReady | AveragingFailed | AverageApplied] = []
        self._is_done = False  # with this attempt

    def order(self, order: RingOrder) -> None:
        match order:
            case FormRings():
                self._form(order)
            case StartAveraging():
                self._average(order)
            case CommitAverage(round=number, attempt=attempt):
                now = self._order
                if now is not None and (now.round, now.attempt) == (number, attempt):
                    self._order, self._snapshot, self._closed_round = None, None, number
                    self._stage.ask(lambda: self._report(AverageApplied(number)))
                else:
                    self._repeat_reports(number)
            case AbortAveraging(round=number):
                if self._order is not None and self._order.round <= number:
                    self._order = self._snapshot = None
                self._closed_round = max(self._closed_round, number)

    def _report(self, report: AveragingStarted | AverageReady | AveragingFailed | AverageApplied) -> None:
        self._reports = [*(message for message in self._reports if message.round == report.round), report]
        self._stage.report(report)

    def _repeat_reports(self, number: int) -> None:
        for report in self._reports:
            if report.round == number:
                self._stage.report(report)

    def close(self) -> None:
        """Close all ring links."""
        rings, self._rings = self._rings, None
        if rings is not None:
            for peer in rings.peers:
                self.host.fleet.world.leave(self._place(rings, peer.name), self)
        for link in self._links.values():
            link.close("the ring's member has ended")
        self._links, self._lost, self._order, self._snapshot, self._is_ready = {}, set(), None, None, False

    def _place(self, rings: FormRings, peer: str) -> tuple[str, int, str, str]:
        return "ring", rings.generation, min(peer, self.host.name), max(peer, self.host.name)

    def _form(self, rings: FormRings) -> None:
        if self._rings == rings:
            if self._is_ready:
                self._stage.report(RingsReady(rings.generation))
            return
        self.close()
        self._rings = rings
        self._check_ready(rings)
        for peer in rings.peers:
            self._reach(rings, peer.name)

    def _reach(self, rings: FormRings, name: str) -> None:
        if self._rings is rings:
            self.host.fleet.world.meet(self._place(rings, name), self, lambda link: self._met(rings, name, link))

    def _met(self, rings: FormRings, name: str, link: SimulatedLink) -> None:
        if self._rings is not rings:
            link.close("it has other rings now")
            return
        self._links[name] = link
        self._check_ready(rings)

    def _check_ready(self, rings: FormRings) -> None:
        if len(self._links) == len(rings.peers):
            self._is_ready = True
            self._stage.report(RingsReady(rings.generation))

    def _average(self, order: StartAveraging) -> None:
        if self._rings is None or order.generation != self._rings.generation or order.round <= self._closed_round:
            self._repeat_reports(order.round)
            return
        now = self._order
        if now is not None and now.round == order.round and order.attempt <= now.attempt:
            self._repeat_reports(order.round)
            return
        self._order, self._is_done = order, False
        if self._snapshot is None or self._snapshot[0] != order.round:
            self._stage.ask(lambda: self._begin(order))
        else:
            self._attempt(order)

    def _begin(self, order: StartAveraging) -> None:
        if self._order is not None and self._order.round == order.round:
            self._snapshot = order.round, f"{self.host.name} {self._stage.updates}"
            self._report(AveragingStarted(order.round))
            self._attempt(self._order)

    def _attempt(self, order: StartAveraging) -> None:
        assert self._rings is not None
        assert self._snapshot is not None
        for position in self._rings.seats:
            value = _Value(order.round, order.attempt, position.ring, self.host.name, self._snapshot[1])
            self._start_stage(value)
            for name in position.members:
                if name in order.weights and name != self.host.name:
                    if name in self._lost:
                        self._fail(order, name)
                        return
                    self._links[name].send(self, value)
        self._check_complete()

    def receive(self, link: SimulatedLink, what: Any) -> None:
        assert isinstance(what, _Value)
        self._start_stage(what)
        self._check_complete()

    def _start_stage(self, value: _Value) -> None:
        self._values.setdefault((value.round, value.attempt, value.ring), {})[value.sender] = value.value

    def _check_complete(self) -> None:
        """Report the average if all values of all rings have arrived."""
        now = self._order
        if now is None or self._rings is None or self._snapshot is None or self._is_done:
            return
        digests: dict[int, str] = {}
        for position in self._rings.seats:
            here = self._values.get((now.round, now.attempt, position.ring), {})
            wanted = [name for name in position.members if name in now.weights]
            if not here.keys() >= set(wanted):
                return
            digests[position.ring] = " ".join(here[name] for name in wanted)
        self._values = {key: held for key, held in self._values.items() if key[:2] > (now.round, now.attempt)}
        self._is_done = True
        self._report(AverageReady(round=now.round, attempt=now.attempt, digests=digests))

    def lost(self, link: SimulatedLink, reason: str) -> None:
        name = next((name for name, known in self._links.items() if known is link), None)
        rings = self._rings
        if name is None or rings is None:
            return
        if not self._is_ready:  # retried until all are established
            del self._links[name]
            self._stage.later(_REACH_AGAIN_S, lambda: self._reach(rings, name))
            return
        del self._links[name]
        self._lost.add(name)
        now = self._order
        if now is not None and self._snapshot is not None and name in now.weights:
            self._fail(now, name)

    def _fail(self, order: StartAveraging, name: str) -> None:
        if self._is_done:
            return
        self._is_done = True
        self._report(AveragingFailed(order.round, order.attempt, f"{name} is gone", name))
