"""The simulated step of a plan keeps to its times and its schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ravnest.core.schedule import stage_schedules
from ravnest.planner.partition.depth import LinkSeconds
from ravnest.run.plan import PipelinePlan, StagePlan
from ravnest.run.plan_preview import simulate_plan


def plan(*seconds: float, accumulate: int = 4, synchronous: bool = False) -> PipelinePlan:
    count = len(seconds)
    rules = tuple(stage_schedules(tuple(range(count, 0, -1)), accumulate, synchronous=synchronous))
    stages = tuple(
        StagePlan(
            node=f"node-{i}", first_op=i, num_ops=1, parameter_bytes=1, memory_bytes=1, memory={}, seconds=one,
            sends_bytes=1, depth=rules[i].depth, delay=rules[i].delay,
        )
        for i, one in enumerate(seconds)
    )  # fmt: skip
    return PipelinePlan((), stages, rules, tuple(range(1, count)), accumulate, 1, 1.0, "")


@pytest.mark.parametrize("seconds", [(1.0,), (1.0, 1.0), (0.5, 1.0, 0.25), (1.0, 0.1, 0.1, 0.9)])
def test_an_asynchronous_step_takes_as_long_as_its_slowest_stage(seconds: tuple[float, ...]) -> None:
    found = simulate_plan(plan(*seconds), ())
    assert found is not None
    assert found["step_s"] == pytest.approx(4 * max(seconds), rel=0.05)
    assert found["busy_s"] == pytest.approx([4 * one for one in seconds], rel=0.1)
    for stage, one in enumerate(seconds):
        spans = sorted(span for span in found["spans"] if span[0] == stage)
        assert {span[1] for span in spans} == {"forward", "backward"}
        assert sum(end - start for _, _, start, end in spans) == pytest.approx(4 * one, rel=0.3)
        times = sorted((start, end) for _, _, start, end in spans)
        assert all(0 <= start <= end <= found["step_s"] + 1e-6 for start, end in times)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(times)), "one action at a time"


def test_a_synchronous_step_waits_for_the_pipeline_to_fill_and_drain() -> None:
    found = simulate_plan(plan(1.0, 1.0, 1.0, synchronous=True), ())
    assert found is not None
    assert found["step_s"] > 4.5
    assert found["busy_s"] == pytest.approx([4.0, 4.0, 4.0], rel=0.05)


def test_slow_links_limit_the_step() -> None:
    found = simulate_plan(plan(0.1, 0.1), (LinkSeconds(1.0, 1.0),))
    assert found is not None
    assert found["step_s"] >= 3.9


def test_a_plan_without_times_has_no_simulation() -> None:
    assert simulate_plan(plan(0.0, 0.0), ()) is None
