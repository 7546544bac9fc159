"""Simulated plans without faults."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.core.schedule import Kind, PipelineSchedule, stage_schedules
from ravnest.planner.fleet import Fleet, Machine, Task
from ravnest.simulator.pipeline import PipelineSimulation, Route
from ravnest.simulator.simulation import SimulationSettings, simulate
from tests.unit.pipeline import virtual
from tests.unit.simulator.simulated import PLAIN, chain_of, deepened, plan_of, random_task

SEEDS = st.integers(0, 2**32)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 5), accumulate=st.integers(1, 6), seed=SEEDS)
def test_a_pipeline_follows_its_schedules(count: int, accumulate: int, seed: int) -> None:
    """The same actions at the same times as a plain loop over the same schedules, written apart from it."""
    rng = random.Random(seed)
    seconds: list[dict[Kind, float]] = [
        {"forward": rng.random(), "backward": rng.random(), "step": rng.random()} for _ in range(count)
    ]
    latencies = [rng.random() for _ in range(count - 1)]
    given_rules = stage_schedules([max(1, count - i + rng.randint(-1, 2)) for i in range(count)], accumulate)
    expected = virtual.simulate(
        given_rules, 4, lambda stage, kind: seconds[stage][cast("Kind", kind)], latencies.__getitem__
    )
    schedules = [PipelineSchedule(rule, is_last_stage=i == count - 1) for i, rule in enumerate(given_rules)]
    for schedule in schedules:
        schedule.end = 4
    routes = [Route((), latency) for latency in latencies for _ in range(2)]
    pipeline = PipelineSimulation(schedules, seconds, routes, record_until_s=1e9)
    pipeline.run(1e9)
    for stage, actions in enumerate(expected.actions):
        assert [(s.start_s, s.end_s, s.action) for s in pipeline.actions if s.stage == stage] == actions
    assert pipeline.ended
    assert pipeline.trained == pipeline.fed == 4 * accumulate
    assert pipeline.max_in_flight == expected.most_in_flight


@settings(max_examples=40, deadline=None)
@given(machines=st.integers(1, 5), seed=SEEDS)
def test_a_full_pipeline_is_as_fast_as_its_bottleneck(machines: int, seed: int) -> None:
    task = random_task(seed, machines=machines)
    plan = deepened(plan_of(task, [[m.name for m in task.fleet.machines]]))
    found = plan.clusters[0].partition
    period = simulate(task, plan, duration_s=30 * max(found.depths) * found.interval_s).clusters[0].periods[0]
    assert period.steady_interval_s == pytest.approx(found.interval_s, rel=0.02)
    slowest = max(range(machines), key=found.stage_seconds.__getitem__)
    if found.stage_seconds[slowest] == found.bottleneck_s:
        bubble = period.stages[slowest].bubble
        assert bubble is not None
        assert bubble < 0.02
    for stage, seconds in zip(period.stages, found.stage_seconds, strict=True):
        assert stage.bubble == pytest.approx(1 - seconds / found.interval_s, abs=0.02)


@settings(max_examples=60, deadline=None)
@given(machines=st.integers(1, 5), accumulate=st.integers(0, 4), max_staleness=st.integers(1, 3), seed=SEEDS)
def test_nothing_exceeds_what_was_planned(machines: int, accumulate: int, max_staleness: int, seed: int) -> None:
    """Staleness, microbatches in flight and memory stay within the plan, however times vary, and all is trained."""
    task = random_task(seed, machines=machines, accumulate=accumulate, max_staleness=max_staleness)
    plan = plan_of(task, [[m.name for m in task.fleet.machines]])
    found = plan.clusters[0].partition
    simulation = simulate(task, plan, microbatches=50, seed=seed, jitter=0.5)
    window = accumulate or max(found.depths)
    assert 50 <= simulation.totals.trained < 50 + window
    assert simulation.totals.trained == simulation.totals.fed
    assert simulation.samples_per_s <= task.microbatch / (found.bottleneck_s * 0.5)
    period = simulation.clusters[0].periods[0]
    for stage, depth, memory in zip(period.stages, found.depths, found.memory, strict=True):
        assert max(stage.staleness) <= max_staleness
        assert sum(stage.staleness.values()) == simulation.totals.trained
        assert 1 <= stage.max_in_flight <= depth
        assert stage.peak_memory_bytes <= memory.total
        assert stage.busy_s + stage.idle_s == pytest.approx(period.end_s)
    for use in period.links:
        assert use.num_bytes == sum(use.bytes_over_time) == simulation.totals.trained * task.chain.forward_bytes[1]
        assert 0 <= use.utilisation < 2


def test_the_seed_determines_the_simulation() -> None:
    task = random_task(1, machines=3)
    plan = plan_of(task, [["m0", "m1", "m2"]])
    one, same, other = (simulate(task, plan, duration_s=60, jitter=0.2, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_both_neighbours_share_a_line() -> None:
    """The middle one sends 100 bytes each way over 40 bytes/s: 5 s, though each link alone would take 2.5 s."""
    machines = tuple(Machine(name=n, up_bytes_per_s=40.0 if n == "b" else 1000.0) for n in "abc")
    task = Task(chain=chain_of([0.2, 0.2, 0.2], message_bytes=100), fleet=Fleet(machines=machines), memory=PLAIN)
    plan = deepened(plan_of(task, ["abc"]))
    assert plan.clusters[0].partition.bottleneck_s == 5.0
    period = simulate(task, plan, duration_s=1000).clusters[0].periods[0]
    assert period.steady_interval_s == pytest.approx(5.0, rel=0.01)
    shares = {(use.sender, use.receiver): use.utilisation for use in period.links}
    assert shares["b", "c"] + shares["b", "a"] == pytest.approx(1.0, abs=0.05)
    assert shares["a", "b"] < 0.1


def test_a_site_has_its_own_network() -> None:
    """With b and c in one home the line of b has but one message to send: 2.5 s."""
    machines = tuple(
        Machine(name=n, up_bytes_per_s=40.0 if n == "b" else 1000.0, site="" if n == "a" else "home") for n in "abc"
    )
    task = Task(chain=chain_of([0.2, 0.2, 0.2], message_bytes=100), fleet=Fleet(machines=machines), memory=PLAIN)
    period = simulate(task, deepened(plan_of(task, ["abc"])), duration_s=1000).clusters[0].periods[0]
    assert period.steady_interval_s == pytest.approx(2.5, rel=0.01)


def test_optimizer_steps_take_time() -> None:
    """One machine, 3 s a microbatch, and 4 s an update after every 2."""
    task = Task(chain=chain_of([1.0]), fleet=Fleet(machines=(Machine(name="a"),)), memory=PLAIN, accumulate=2)
    plan = plan_of(task, ["a"])
    for step_s in (4.0, lambda machine, share: 4.0 * machine.speed + share.parameter_bytes):
        simulation = simulate(task, plan, duration_s=1000, settings=SimulationSettings(step_s=step_s))
        assert simulation.steady_samples_per_s == pytest.approx(2 / (2 * 3 + 4))
        assert simulation.bubble == pytest.approx(0.0, abs=1e-9)


def test_clusters_add_up() -> None:
    machines = tuple(Machine(name=n, speed=s) for n, s in [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)])
    task = Task(chain=chain_of([1.0, 1.0]), fleet=Fleet(machines=machines), memory=PLAIN, microbatch=8)
    simulation = simulate(task, plan_of(task, ["ab", "cd"]), duration_s=3000)
    slow, quick = simulation.clusters
    assert quick.steady_samples_per_s == pytest.approx(8 / 1.5, rel=0.01)
    assert slow.steady_samples_per_s == pytest.approx(8 / 3, rel=0.01)
    assert simulation.steady_samples_per_s == pytest.approx(8.0, rel=0.01)
    assert simulation.samples_per_s == pytest.approx(8.0, rel=0.02)
    assert simulation.totals.trained == slow.totals.trained + quick.totals.trained
    until_done = simulate(task, plan_of(task, ["ab", "cd"]), microbatches=1000)
    assert [run.samples_per_s for run in until_done.clusters] == pytest.approx([8 / 3, 8 / 1.5], rel=0.02)
    assert until_done.duration_s == until_done.clusters[0].duration_s
    assert simulation.bubble == pytest.approx(0.0, abs=0.01)
    assert set(simulation.staleness) == {0, 1}


def test_link_use_over_time() -> None:
    task = Task(
        chain=chain_of([1.0, 1.0], message_bytes=70),
        fleet=Fleet(machines=(Machine(name="a", up_bytes_per_s=100.0), Machine(name="b"))),
        memory=PLAIN,
    )
    simulation = simulate(task, plan_of(task, ["ab"]), duration_s=6000)
    there, back = simulation.clusters[0].periods[0].links
    assert (there.sender, there.receiver, back.sender, back.receiver) == ("a", "b", "b", "a")
    assert simulation.bucket_s == 100.0
    assert len(there.bytes_over_time) == 60
    assert all(abs(a - b) <= 2 * 70 for a, b in pairwise(there.bytes_over_time[1:]))
    assert there.utilisation == pytest.approx(0.7 / 3, rel=0.02)
    assert back.utilisation == 0.0, "nothing limits b"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"duration_s": 1.0, "microbatches": 1},
        {"duration_s": 0.0},
        {"duration_s": float("inf")},
        {"microbatches": 0},
        {"duration_s": 1.0, "jitter": 1.0},
    ],
)
def test_invalid_arguments_are_rejected(wrong: dict[str, Any]) -> None:
    task = random_task(0, machines=2)
    with pytest.raises(ValueError, match=r"duration_s|microbatches|jitter"):
        simulate(task, plan_of(task, [["m0", "m1"]]), **wrong)


def test_invalid_plans_and_settings_are_rejected() -> None:
    task = Task(chain=chain_of([0.0]), fleet=Fleet(machines=(Machine(name="a"),)), memory=PLAIN)
    plan = plan_of(task, ["a"])
    with pytest.raises(ValueError, match="interval_s of every cluster must be"):
        simulate(task, plan, duration_s=1.0)
    with pytest.raises(ValueError, match="at least one cluster"):
        simulate(task, replace(plan, clusters=()), duration_s=1.0)
    task = random_task(0, machines=2)
    with pytest.raises(ValueError, match="not in the fleet"):
        simulate(
            replace(task, fleet=Fleet(machines=task.fleet.machines[:1])), plan_of(task, [["m0", "m1"]]), duration_s=1
        )
    wrong: list[dict[str, Any]] = [{"step_s": -1.0}, {"detection_s": -1.0}, {"record_s": -1.0}]
    for setting in wrong:
        with pytest.raises(ValueError, match="must be >= 0"):
            SimulationSettings(**setting)
