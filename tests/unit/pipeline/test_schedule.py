"""The schedule: no deadlock, no stale version, no bubble, whatever the times of stages and links."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.core.schedule import Action, PipelineSchedule, StageSchedule, stage_schedules
from tests.unit.pipeline.virtual import simulate

times = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.0, 1.0, 2.0, 7.0])


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(1, 6),
    accumulate=st.integers(1, 8),
    extra=st.integers(-3, 3),
    bound=st.one_of(st.none(), st.integers(0, 5)),
    synchronous=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_durations(
    count: int, accumulate: int, extra: int, bound: int | None, synchronous: bool, seed: int
) -> None:
    """Every microbatch comes back, every step is applied, and staleness stays within the bound."""
    rng = random.Random(seed)
    depths = [max(1, count - i + extra) for i in range(count)]
    given_rules = stage_schedules(depths, accumulate, synchronous=synchronous, max_staleness=bound)
    trace = simulate(
        given_rules, 5, lambda stage, kind: rng.choice([0.0, 0.1, 1.0, 1.0, 2.0, 5.0]), lambda link: rng.random() * 3
    )
    for schedule, rule, most in zip(trace.schedules, given_rules, trace.most_in_flight, strict=True):
        assert schedule.updates == 5
        assert schedule.backwards == schedule.forwards == 5 * accumulate
        assert sum(schedule.staleness.values()) == 5 * accumulate
        assert max(schedule.staleness) <= (0 if synchronous else rule.delay)
        assert bound is None or max(schedule.staleness) <= bound
        assert most <= rule.depth


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_equal_stages_have_no_bubble(count: int) -> None:
    """N - j + 1 microbatches in flight at stage j leave none, once the pipeline is full."""
    given_rules = stage_schedules([count - i for i in range(count)], count)
    trace = simulate(given_rules, 12, lambda stage, kind: 0.0 if kind == "step" else 1.0, lambda link: 0.0)
    idle = [trace.idle(stage, after_update=2) for stage in range(count)]
    # the pipeline drains after the last step: these idle intervals are not bubbles of the schedule
    assert max(idle) < 2.5 * count / (9 * count * 2)
    assert trace.schedules[0].staleness == {0: count, 1: 11 * count}


def test_slow_links_need_more_in_flight_and_then_cost_nothing() -> None:
    """A link of 3 units each way between stages of 1 + 1: the round trip takes 4 intervals more."""

    def first_stage_idle(depth: int) -> float:
        given_rules = stage_schedules([depth, 1], 8)
        trace = simulate(given_rules, 12, lambda stage, kind: 0.0 if kind == "step" else 1.0, lambda link: 3.0)
        return trace.idle(0, after_update=2)

    assert first_stage_idle(2) > 0.4
    assert first_stage_idle(5) < 0.05


def test_the_papers_schedule() -> None:
    """One update per microbatch: the delay at stage j is its depth less one, never more than 2 (N - j)."""
    depths = [4, 3, 2, 1]
    trace = simulate(
        stage_schedules(depths, 1), 40, lambda stage, kind: 0.0 if kind == "step" else 1.0, lambda link: 0.1
    )
    for j, schedule in enumerate(trace.schedules):
        assert max(schedule.staleness) == depths[j] - 1 <= 2 * (3 - j)
        assert schedule.staleness[depths[j] - 1] >= 30


def test_the_order_of_actions() -> None:
    trace = simulate(
        stage_schedules([2, 1], 2), 2, lambda stage, kind: 0.0 if kind == "step" else 1.0, lambda link: 0.0
    )
    rows = [[action for _, _, action in stage] for stage in trace.actions]
    assert ["".join(str(action).ljust(4) for action in row).rstrip() for row in rows] == [
        "F0  F1  B0  F2  B1  S0  F3  B2  B3  S1",
        "F0  B0  F1  B1  S0  F2  B2  F3  B3  S1",
    ]


def test_steps_wait_for_permission() -> None:
    schedule = PipelineSchedule(
        StageSchedule(accumulate=1, depth=2, delay=1), is_last_stage=True, steps_need_permission=True
    )
    schedule.input_arrived()
    for kind in ("forward", "backward"):
        action = schedule.next()
        assert action.kind == kind
        schedule.done(action)
    assert schedule.next().kind == "wait"
    schedule.allow_step()
    assert schedule.next() == Action("step", 0)


def test_evaluations_keep_their_place() -> None:
    schedule = PipelineSchedule(StageSchedule(accumulate=1, depth=1, delay=1), is_last_stage=False)
    schedule.input_arrived()
    schedule.evaluation_arrived(7, fresh=False)
    schedule.evaluation_arrived(8, fresh=True)
    schedule.done(schedule.next())
    action = schedule.next()
    assert (action.kind, action.number, action.version) == ("evaluate", 7, 0)
    schedule.done(action)
    assert schedule.next().kind == "wait", "a fresh evaluation waits for the update before it"
    schedule.gradient_arrived()
    for kind in ("backward", "step"):
        action = schedule.next()
        assert action.kind == kind
        schedule.done(action)
    assert schedule.next() == Action("evaluate", 8, 1)


@pytest.mark.parametrize("wrong", [{"accumulate": 0}, {"depth": 0}, {"delay": -1}])
def test_invalid_rules_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be >="):
        StageSchedule(**{"accumulate": 1, "depth": 1, "delay": 0, **wrong})


def test_delays() -> None:
    def delays(depths: list[int], accumulate: int, bound: int | None = None) -> list[int]:
        return [rule.delay for rule in stage_schedules(depths, accumulate, max_staleness=bound)]

    assert delays([4, 3, 1], 4) == [1, 1, 1]
    assert delays([5, 3, 1], 1) == [4, 2, 0]
    assert delays([5, 3, 1], 2) == [2, 1, 0]
    assert delays([5, 3, 1], 1, bound=2) == [2, 2, 0]
    assert delays([1], 4) == [0]
