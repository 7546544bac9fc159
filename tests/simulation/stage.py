"""A simulated stage: it gets ready, then executes the actions of a real `PipelineSchedule`, each with a duration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ravnest.core.metrics import StageMetrics
from ravnest.core.schedule import Action, PipelineSchedule, StageSchedule
from ravnest.protocol.commands import (
    AbortAveraging,
    Command,
    CommitAverage,
    EndAfter,
    FormRings,
    SaveState,
    StageFailed,
    StageReady,
    StartAveraging,
    StateSaved,
    StepReport,
)
from ravnest.protocol.control import Assignment, ReplicaSource
from tests.simulation.feed import Feed
from tests.simulation.replicas import Transfer
from tests.simulation.rings import SimulatedAveraging
from tests.simulation.world import SimulatedLink

if TYPE_CHECKING:
    from tests.simulation.node import Node

_REACH_S = 20.0


class Stage:
    """Of one node and one assignment, from its order to its release."""

    def __init__(self, node: Node, assignment: Assignment) -> None:
        self.host, self.assignment, self._world = node, assignment, node.fleet.world
        self.has_run = False
        self._is_over = self._is_orphan = False
        self._schedule: PipelineSchedule | None = None
        self._doing: Action | None = None
        self._asked: list[Callable[[], None]] = []
        self._early: list[Command] = []
        self._feed: Feed | None = None
        self._before: SimulatedLink | None = None
        self._after: SimulatedLink | None = None
        self.rings = SimulatedAveraging(self)
        self._sources = list(assignment.sources)
        self.later(node.ready_s, self._load)

    @property
    def updates(self) -> int:
        return self._schedule.updates if self._schedule is not None else 0

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.host.later(delay_s, lambda: None if self._is_over else what())

    def report(self, report: Any) -> None:
        if not self._is_over:
            self.host.report(self.assignment.generation, report)

    # getting ready

    def _load(self) -> None:
        fleet = self.host.fleet
        if fleet.is_down or self.host.is_cut_off:  # files are fetched when the coordinator is reachable
            self.later(1.0, self._load)
            return
        config = fleet.coordinator.blobs.get(self.assignment.config.digest)
        if config is None:
            self.fail("its file is not there", is_consequence=False)
            return
        assert isinstance(config, bytes)
        self._rule = msgspec.msgpack.decode(config, type=StageSchedule)
        self._gather()

    def _gather(self) -> None:
        """One source after the other."""
        if self._is_over:
            return
        if not self._sources:
            self._connect()
            return
        source = self._sources.pop(0)
        if source.source is None:
            has = self.host.replicas.get((source.replica.cluster, source.replica.stage))
            assert has is not None, f"{self.host.name} has no replica to restore from"
            self._gather()
        else:
            Transfer(self.host, source.transfer).take(lambda updates: self._got(source, updates))

    def _got(self, source: ReplicaSource, updates: int | None) -> None:
        if self._is_over:
            return
        if updates is None:
            self.fail(f"cannot fetch the state from {source.source}", is_consequence=True)
        else:
            self._gather()

    def _place(self, stage: int) -> tuple[str, int, int]:
        return "stage", self.assignment.generation, stage

    def _connect(self) -> None:
        assignment, meet = self.assignment, self._world.meet
        if assignment.before is None:
            self._dial_feed()
            if self._is_over:
                return
        else:
            meet((self.assignment.cluster, *self._place(assignment.stage)), self, self._met_before)
        if assignment.after is not None:
            meet((self.assignment.cluster, *self._place(assignment.stage + 1)), self, self._met_after)
        self.later(_REACH_S, self._reach_late)
        self._run_if_ready()

    def _dial_feed(self) -> None:
        fleet = self.host.fleet
        if fleet.is_down or self.host.is_cut_off:
            self.later(1.0, self._dial_feed)
            return
        self._feed = fleet.dial_feed(self)
        if self._feed is None:
            self.fail("the feed is not there", is_consequence=True)
        else:
            self._run_if_ready()

    def _met_before(self, link: SimulatedLink) -> None:
        self._met(link)
        self._before = link
        self._run_if_ready()

    def _met_after(self, link: SimulatedLink) -> None:
        self._met(link)
        self._after = link
        self._run_if_ready()

    def _met(self, link: SimulatedLink) -> None:
        if self._is_over:
            link.close("it is gone")

    def _reach_late(self) -> None:
        if not self.has_run:
            self.fail("a neighbour cannot be reached", is_consequence=True)

    def _run_if_ready(self) -> None:
        assignment = self.assignment
        has_before = self._feed is not None if assignment.before is None else self._before is not None
        if self._is_over or self.has_run or not has_before or (assignment.after is not None and self._after is None):
            return
        self.has_run = True
        self._schedule = PipelineSchedule(
            self._rule, is_last_stage=assignment.after is None, first_update=assignment.first_update
        )
        self.report(StageReady(assignment.stage))
        for order in self._early:
            self.order(order)

    # training

    def input_arrived(self) -> None:
        if not self._is_over:
            assert self._schedule is not None
            self._schedule.input_arrived()
            self._act()

    def receive(self, link: SimulatedLink, what: Any) -> None:
        if self._is_over:
            return
        assert self._schedule is not None, "a neighbour sends before this stage is ready"
        if link is self._before:
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
            self.fail("the coordinator is gone and all microbatches are trained", is_consequence=True)
        elif action.kind != "wait":
            self._doing = action
            self.later(self.host.fleet.action_s * self.host.rng.uniform(0.5, 1.5), lambda: self._done(action))

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
                self.report(StepReport(StageMetrics(stage=self.assignment.stage, updates=self.updates)))
        self._act()

    def order(self, order: Command) -> None:
        if self._schedule is None:
            self._early.append(order)
            return
        match order:
            case EndAfter(updates=updates):
                self._schedule.end = updates
            case SaveState():
                self.report(StateSaved(self.assignment.stage, self.updates))
            case FormRings() | StartAveraging() | CommitAverage() | AbortAveraging():
                self.rings.order(order)

    # the end

    def lost(self, link: SimulatedLink, reason: str) -> None:
        if not self._is_over and link in (self._before, self._after):
            self.fail(f"a neighbour is gone: {reason}", is_consequence=True)

    def feed_lost(self, reason: str) -> None:
        """The feed failed, at either end."""
        if self._feed is not None:
            self._feed.cut(reason)

    def finish_training(self) -> None:
        """The feed failed: train the microbatches that have arrived, then end."""
        if not self.has_run:
            self.fail("the feed is gone", is_consequence=True)
        self._is_orphan = True
        self._act()

    def fail(self, reason: str, *, is_consequence: bool) -> None:
        self._end(StageFailed(reason, is_consequence))

    def end(self) -> None:
        """It gets another assignment or none."""
        self._end(None)

    def _end(self, failure: StageFailed | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        for stage in (self.assignment.stage, self.assignment.stage + 1):
            self._world.leave((self.assignment.cluster, *self._place(stage)), self)
        for link in (self._before, self._after):
            if link is not None:
                link.close("the neighbour has ended")
        self.feed_lost("the first stage ended")
        self.rings.close()
        self.host.stage_over(self, failure)
