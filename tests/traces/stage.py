"""A simulated stage: it gets ready, then does what the runtime's own `Schedule` says, each action in its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ravnest.core.control import Part, Source
from ravnest.core.metrics import StageMetrics
from ravnest.core.orders import (
    Abandon,
    Average,
    Commit,
    EndAfter,
    Failed,
    LayRings,
    Order,
    Ready,
    Save,
    Saved,
    Updated,
)
from ravnest.core.schedule import Action, Rule, Schedule
from tests.traces.copies import Transfer
from tests.traces.feed import Feed
from tests.traces.rings import RingDesk
from tests.traces.world import Line

if TYPE_CHECKING:
    from tests.traces.node import Node

_REACH_S = 20.0


class Stage:
    """Of one node and one part, from being told to be it until nothing is left of it."""

    def __init__(self, node: Node, part: Part) -> None:
        self.being, self.part, self._world = node, part, node.fleet.world
        self.has_run = False
        self._is_over = self._is_orphan = False
        self._schedule: Schedule | None = None
        self._doing: Action | None = None
        self._asked: list[Callable[[], None]] = []
        self._early: list[Order] = []
        self._feed: Feed | None = None
        self._before: Line | None = None
        self._after: Line | None = None
        self.rings = RingDesk(self)
        self._sources = list(part.sources)
        self.later(node.ready_s, self._load)

    @property
    def updates(self) -> int:
        return self._schedule.updates if self._schedule is not None else 0

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.being.later(delay_s, lambda: None if self._is_over else what())

    def tell(self, report: Any) -> None:
        if not self._is_over:
            self.being.report(self.part.generation, report)

    # getting ready

    def _load(self) -> None:
        fleet = self.being.fleet
        if fleet.is_down or self.being.is_cut_off:  # its files are fetched when the coordinator is there again
            self.later(1.0, self._load)
            return
        brief = fleet.coordinator.blobs.get(self.part.brief.digest)
        if brief is None:
            self.fail("its file is not there", is_consequence=False)
            return
        assert isinstance(brief, bytes)
        self._rule = msgspec.msgpack.decode(brief, type=Rule)
        self._gather()

    def _gather(self) -> None:
        """One source after the other."""
        if self._is_over:
            return
        if not self._sources:
            self._connect()
            return
        source = self._sources.pop(0)
        if source.giver is None:
            has = self.being.shelf.get((source.copy.cluster, source.copy.stage))
            assert has is not None, f"{self.being.name} is to begin from a copy that it does not keep"
            self._gather()
        else:
            Transfer(self.being, source.transfer).take(lambda updates: self._got(source, updates))

    def _got(self, source: Source, updates: int | None) -> None:
        if self._is_over:
            return
        if updates is None:
            self.fail(f"what {source.giver} had learnt cannot be had", is_consequence=True)
        else:
            self._gather()

    def _place(self, stage: int) -> tuple[str, int, int]:
        return "stage", self.part.generation, stage

    def _connect(self) -> None:
        part, meet = self.part, self._world.meet
        if part.before is None:
            self._dial_feed()
            if self._is_over:
                return
        else:
            meet((self.part.cluster, *self._place(part.stage)), self, self._met_before)
        if part.after is not None:
            meet((self.part.cluster, *self._place(part.stage + 1)), self, self._met_after)
        self.later(_REACH_S, self._reach_late)
        self._run_if_ready()

    def _dial_feed(self) -> None:
        fleet = self.being.fleet
        if fleet.is_down or self.being.is_cut_off:
            self.later(1.0, self._dial_feed)
            return
        self._feed = fleet.dial_feed(self)
        if self._feed is None:
            self.fail("the feed is not there", is_consequence=True)
        else:
            self._run_if_ready()

    def _met_before(self, line: Line) -> None:
        self._met(line)
        self._before = line
        self._run_if_ready()

    def _met_after(self, line: Line) -> None:
        self._met(line)
        self._after = line
        self._run_if_ready()

    def _met(self, line: Line) -> None:
        if self._is_over:
            line.close("it is gone")

    def _reach_late(self) -> None:
        if not self.has_run:
            self.fail("a neighbour cannot be reached", is_consequence=True)

    def _run_if_ready(self) -> None:
        part = self.part
        has_before = self._feed is not None if part.before is None else self._before is not None
        if self._is_over or self.has_run or not has_before or (part.after is not None and self._after is None):
            return
        self.has_run = True
        self._schedule = Schedule(self._rule, is_leaf=part.after is None, first_update=part.begin)
        self.tell(Ready(part.stage))
        for order in self._early:
            self.order(order)

    # training

    def input_arrived(self) -> None:
        if not self._is_over:
            assert self._schedule is not None
            self._schedule.input_arrived()
            self._act()

    def hear(self, line: Line, what: Any) -> None:
        if self._is_over:
            return
        assert self._schedule is not None, "a neighbour sends before this stage is ready"
        if line is self._before:
            self._schedule.input_arrived()
        else:
            self._schedule.gradient_arrived()
        self._act()

    def ask(self, what: Callable[[], None]) -> None:
        """Between two actions."""
        self._asked.append(what)
        self._act()

    def _act(self) -> None:
        if self._is_over or self._doing is not None or self._schedule is None:
            return
        while self._asked:
            self._asked.pop(0)()
        action = self._schedule.next()
        if action.kind == "wait" and self._is_orphan:
            self.fail("the coordinator is gone, and all is trained", is_consequence=True)
        elif action.kind != "wait":
            self._doing = action
            self.later(self.being.fleet.action_s * self.being.rng.uniform(0.5, 1.5), lambda: self._done(action))

    def _done(self, action: Action) -> None:
        assert self._schedule is not None
        self._schedule.done(action)
        self._doing = None
        match action.kind:
            case "forward" if self._after is not None:
                self._after.send(self, action.number)
            case "backward" if self._before is not None:
                self._before.send(self, action.number)
            case "backward":
                assert self._feed is not None
                self._feed.acknowledge(action.number)
            case "step":
                self.tell(Updated(StageMetrics(stage=self.part.stage, updates=self.updates)))
        self._act()

    def order(self, order: Order) -> None:
        if self._schedule is None:
            self._early.append(order)
            return
        match order:
            case EndAfter(updates=updates):
                self._schedule.end = updates
            case Save():
                self.tell(Saved(self.part.stage, self.updates))
            case LayRings() | Average() | Commit() | Abandon():
                self.rings.order(order)

    # the end

    def lost(self, line: Line, reason: str) -> None:
        if not self._is_over and line in (self._before, self._after):
            self.fail(f"a neighbour is gone: {reason}", is_consequence=True)

    def feed_lost(self, reason: str) -> None:
        """The line to the coordinator broke, at either end."""
        if self._feed is not None:
            self._feed.break_off(reason)

    def train_to_the_end(self) -> None:
        """The feed is gone: what has come is trained, then there is nothing to be."""
        if not self.has_run:
            self.fail("the feed is gone", is_consequence=True)
        self._is_orphan = True
        self._act()

    def fail(self, reason: str, *, is_consequence: bool) -> None:
        self._end(Failed(reason, is_consequence))

    def end(self) -> None:
        """It is to be something else, or nothing."""
        self._end(None)

    def _end(self, failure: Failed | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        for stage in (self.part.stage, self.part.stage + 1):
            self._world.leave((self.part.cluster, *self._place(stage)), self)
        for line in (self._before, self._after):
            if line is not None:
                line.close("the neighbour has ended")
        self.feed_lost("the root ended")
        self.rings.close()
        self.being.stage_over(self, failure)
