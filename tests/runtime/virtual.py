"""Schedules on a virtual clock: stages and links take the times they are given, and nothing waits for real."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ravnest.core.schedule import Action, Rule, Schedule

Seconds = Callable[[int, str], float]  # of (stage, kind of action)


@dataclass
class Trace:
    """What happened: each stage's actions with their beginnings and ends."""

    actions: list[list[tuple[float, float, Action]]] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    most_in_flight: list[int] = field(default_factory=list)

    def idle(self, stage: int, after_update: int) -> float:
        """The part of the time from an update on in which a stage did nothing."""
        acted = self.actions[stage]
        start = next(end for _, end, a in acted if a.kind == "step" and a.number == after_update)
        last = max(end for _, end, _ in acted)
        busy = sum(end - begin for begin, end, _ in acted if begin >= start)
        return 1 - busy / (last - start)


def simulate(rules: Sequence[Rule], windows: int, seconds: Seconds, link_s: Callable[[int], float]) -> Trace:
    """Run `windows` windows through stages that follow `rules`."""
    count, total = len(rules), windows * rules[0].accumulate
    trace = Trace([[] for _ in rules], [Schedule(r, is_leaf=i == count - 1) for i, r in enumerate(rules)], [0] * count)
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
        schedule.end = windows
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


def check(schedule: Schedule, action: Action) -> None:
    """What must hold whenever an action is chosen."""
    rule = schedule.rule
    if action.kind in ("forward", "backward"):
        window = rule.window(action.number)
        assert action.version == rule.version(window)
        assert schedule.updates >= action.version, "the version does not exist yet"
        assert window - action.version <= rule.delay
        assert action.version >= schedule.updates - rule.delay, "the version is gone already"
    if action.kind == "forward":
        assert schedule.in_flight < rule.depth
    if action.kind == "step":
        assert schedule.backwards >= (action.number + 1) * rule.accumulate
