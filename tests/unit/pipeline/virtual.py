"""Schedules on a virtual clock, with given durations of stages and links."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ravnest.core.schedule import Action, PipelineSchedule, StageSchedule

Seconds = Callable[[int, str], float]  # of (stage, kind of action)


@dataclass
class Trace:
    """The actions of each stage with their start and end times."""

    actions: list[list[tuple[float, float, Action]]] = field(default_factory=list)
    schedules: list[PipelineSchedule] = field(default_factory=list)
    most_in_flight: list[int] = field(default_factory=list)

    def idle(self, stage: int, after_update: int) -> float:
        """The fraction of the time after an update in which a stage was idle."""
        acted = self.actions[stage]
        start = next(end for _, end, a in acted if a.kind == "step" and a.number == after_update)
        last = max(end for _, end, _ in acted)
        busy = sum(end - begin for begin, end, _ in acted if begin >= start)
        return 1 - busy / (last - start)


def simulate(rules: Sequence[StageSchedule], steps: int, seconds: Seconds, link_s: Callable[[int], float]) -> Trace:
    """Run a number of optimizer steps through stages that follow `rules`."""
    count, total = len(rules), steps * rules[0].accumulate
    trace = Trace(
        [[] for _ in rules],
        [PipelineSchedule(r, is_last_stage=i == count - 1) for i, r in enumerate(rules)],
        [0] * count,
    )
    busy = [False] * count
    events: list[tuple[float, int, str, int, Action | None]] = []
    order = 0

    def at(when: float, what: str, stage: int, action: Action | None = None) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (when, order, what, stage, action))

    def begin(now: float, stage: int) -> None:
        if busy[stage]:
            return
        action = trace.schedules[stage].next()
        if action.kind == "wait":
            return
        check(trace.schedules[stage], action)
        busy[stage] = True
        end = now + seconds(stage, action.kind)
        trace.actions[stage].append((now, end, action))
        at(end, "done", stage, action)

    for schedule in trace.schedules:
        schedule.end = steps
    for _ in range(total):
        trace.schedules[0].input_arrived()
    begin(0.0, 0)
    while events:
        now, _, what, stage, action = heapq.heappop(events)
        schedule = trace.schedules[stage]
        if what == "input":
            schedule.input_arrived()
        elif what == "gradient":
            schedule.gradient_arrived()
        else:
            assert action is not None
            busy[stage] = False
            schedule.done(action)
            trace.most_in_flight[stage] = max(trace.most_in_flight[stage], schedule.in_flight)
            if action.kind == "forward" and stage + 1 < count:
                at(now + link_s(stage), "input", stage + 1)
            if action.kind == "backward" and stage:
                at(now + link_s(stage - 1), "gradient", stage - 1)
        begin(now, stage)
    return trace


def check(schedule: PipelineSchedule, action: Action) -> None:
    """Check the invariants of a chosen action."""
    rule = schedule.rule
    if action.kind in ("forward", "backward"):
        step = rule.step_of(action.number)
        assert action.version == rule.version(step)
        assert schedule.updates >= action.version, "the version does not exist yet"
        assert step - action.version <= rule.delay
        assert action.version >= schedule.updates - rule.delay, "the version has been released"
    if action.kind == "forward":
        assert schedule.in_flight < rule.depth
    if action.kind == "step":
        assert schedule.backwards >= (action.number + 1) * rule.accumulate
