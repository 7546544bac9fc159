"""What a local plan expects of its run: the rate from seconds, and the work that no operation shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ravnest
from ravnest.config import TrainingConfig
from ravnest.core.schedule import StageSchedule, stage_schedules
from ravnest.graph import Costs, Program, measure_costs, trace
from ravnest.graph.timing import OpSeconds
from ravnest.pipeline import staleness as corrections
from ravnest.pipeline.config import TrainerConfig
from ravnest.pipeline.optimizers import SGD, AdamW, Optimizer
from ravnest.pipeline.staleness import Correction
from ravnest.planner.fleet import Machine
from ravnest.profiling.overhead import StageOverhead, measure_overhead, with_overhead
from ravnest.profiling.speed import Workload
from ravnest.run import plan as plan_module
from ravnest.run.checkpoint.start import StartWeights
from ravnest.run.cluster_builder import FleetClusterBuilder
from ravnest.run.fleet_plan import time_job
from ravnest.run.job import Job
from ravnest.run.plan import Cores, LocalPlanOptions, PipelinePlan, chain_of, expected_rate, plan_local, time_local

FREE = Cores(count=64)
seconds = st.floats(min_value=1e-4, max_value=10.0)


def deep(num: int, accumulate: int) -> list[StageSchedule]:
    """More in flight than any stages need."""
    return stage_schedules([accumulate] * (num - 1) + [1], accumulate)


@given(st.lists(seconds, min_size=1, max_size=5))
def test_the_slowest_node_sets_the_pace(work_s: list[float]) -> None:
    accumulate = 200_000  # as many in flight as the most uneven of these stages need
    chosen = [StageSchedule(accumulate=accumulate, depth=accumulate, delay=1)] * len(work_s)
    rate = expected_rate(work_s, [1.0] * len(work_s), chosen, FREE, accumulate)
    assert rate == pytest.approx(1 / max(work_s))


@given(st.lists(st.tuples(seconds, st.floats(0.1, 1.0)), min_size=2, max_size=5), st.integers(2, 8))
def test_more_of_anything_is_never_slower(nodes: list[tuple[float, float]], accumulate: int) -> None:
    work_s, speeds = zip(*nodes, strict=True)
    chosen = deep(len(nodes), accumulate)
    rate = expected_rate(work_s, speeds, chosen, Cores(count=2), accumulate)
    assert expected_rate(work_s, [1.0] * len(nodes), chosen, Cores(count=2), accumulate) >= rate
    assert expected_rate(work_s, speeds, chosen, FREE, accumulate) >= rate
    assert expected_rate(work_s, speeds, chosen, Cores(count=2, threads=2), accumulate) <= rate


def test_cores_that_are_shared() -> None:
    chosen = deep(3, 8)
    assert expected_rate([1.0, 1.0, 1.0], [1.0] * 3, chosen, Cores(count=2), 8) == pytest.approx(2 / 3)
    pinned = Cores(count=2, pinned=(0, 1, 1))
    assert expected_rate([1.0, 0.7, 0.5], [1.0] * 3, chosen, pinned, 8) == pytest.approx(1 / 1.2)
    assert expected_rate([1.5, 0.7, 0.5], [1.0] * 3, chosen, pinned, 8) == pytest.approx(1 / 1.5)


def test_a_flush_costs_the_first_trip() -> None:
    chosen = stage_schedules([4, 1], 4, synchronous=True)
    assert expected_rate([1.0, 1.0], [1.0, 1.0], chosen, FREE, 4) == pytest.approx(4 / 5)


def test_what_parameters_cost_goes_to_who_reads_them_first() -> None:
    upkeep = StageOverhead(add_s=1e-9, update_s=5e-9, move_s=0.0)
    assert upkeep.parameters_s(10**9, accumulate=1) == pytest.approx(5.0)
    assert upkeep.parameters_s(10**9, accumulate=4) == pytest.approx((3 + 5) / 4)
    program = model()
    chain = chain_of(program, measure_costs(program, 4))
    more = with_overhead(chain, upkeep, accumulate=1)
    assert sum(more.backward_s) - sum(chain.backward_s) == pytest.approx(5e-9 * 4 * program.num_parameters)
    assert more.forward_s == chain.forward_s


def model(width: int = 256) -> Program:
    build = lambda: nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))  # noqa: E731
    return trace(build, nn.functional.mse_loss, (torch.zeros(8, 16), torch.zeros(8, 4)))


def test_upkeep_is_measured(processor_time: None) -> None:
    program = model(100_000)
    plain = measure_overhead(program, SGD(0.1), corrections.none(), delay=0)
    adam = measure_overhead(program, AdamW(1e-3), corrections.DEFAULT, delay=1)
    for found in (plain, adam):
        assert min(found.add_s, found.update_s, found.move_s) > 1e-12
        assert max(found.add_s, found.update_s, found.move_s) < 1e-6, "a byte takes nanoseconds"
        assert 1e-6 < found.message_s < 1e-2
    assert adam.update_s > plain.update_s, "it passes over more memory"


def planned(program: Program, optimizer: Optimizer, correction: Correction, **options: Any) -> PipelinePlan:
    timings = time_local(program, optimizer, correction, LocalPlanOptions(**options))
    return plan_local(timings, timings.options.groups[0])


def test_a_plan_says_what_it_expects() -> None:
    options: dict[str, Any] = {"nodes": 2, "batch_size": 8, "accumulate": 4, "cores": Cores(count=2)}
    plan = planned(model(2000), AdamW(1e-3), corrections.DEFAULT, **options)
    slowest = max(p.seconds for p in plan.plans)
    assert 0 < plan.samples_per_s <= 2 / slowest * 1.001
    assert plan.content()["samples_per_s"] == plan.samples_per_s


def test_a_plan_of_a_tiny_model_counts_messages(fixed_op_times: None, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"nodes": 2, "batch_size": 8, "accumulate": 4, "cores": Cores(count=2)}
    rates = []
    for message_s in (0.0, 1e-4):
        overhead = StageOverhead(1e-10, 5e-10, 1e-10, message_s)
        monkeypatch.setattr(plan_module, "measure_overhead", lambda *args, found=overhead, **more: found)
        plan = planned(model(4), AdamW(1e-3), corrections.DEFAULT, **options)
        assert all(row.seconds >= overhead.microbatch_s for row in plan.plans)
        rates.append(plan.samples_per_s)
    assert rates[1] == pytest.approx(2 / ((2 * 24 + 20) / 2 * 1e-4), rel=0.01), "two samples a microbatch, two cores"
    assert rates[0] > 100 * rates[1]


def test_several_clusters_share_the_nodes_and_the_cores() -> None:
    options = LocalPlanOptions(nodes=5, clusters=2, batch_size=8, cores=Cores(count=2))
    assert options.groups == [[0, 1], [2, 3, 4]]
    timings = time_local(model(2000), AdamW(1e-3), corrections.DEFAULT, options)
    plans = [plan_local(timings, group) for group in options.groups]
    assert [[row.node for row in plan.plans] for plan in plans] == [
        ["node-0", "node-1"], ["node-2", "node-3", "node-4"],
    ]  # fmt: skip
    assert {plan.accumulate for plan in plans} == {4}, "a step has as many microbatches in every cluster"


def test_slower_nodes_get_less_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def given_seconds(program: Program, batch: int, *, budget_s: float, costs: Costs) -> tuple[OpSeconds, ...]:
        return tuple(OpSeconds(op.forward_flops * 1e-10, op.backward_flops * 1e-10) for op in costs.ops)

    monkeypatch.setattr(plan_module, "measure_seconds", given_seconds)
    monkeypatch.setattr(plan_module, "measure_slowdown", lambda *args, budget_s: 1.0)
    monkeypatch.setattr(plan_module, "measure_overhead", lambda *args, **more: StageOverhead(1e-10, 5e-10, 1e-10))
    wishes: dict[str, Any] = {"nodes": 2, "batch_size": 8, "accumulate": 4, "cores": Cores(count=2)}
    build = lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))  # noqa: E731
    program = trace(build, nn.functional.mse_loss, (torch.zeros(8, 256), torch.zeros(8, 256)))
    fair = planned(program, SGD(0.1), corrections.none(), **wishes)
    uneven = planned(program, SGD(0.1), corrections.none(), speeds=(1.0, 0.25), **wishes)
    assert uneven.plans[1].num_ops < fair.plans[1].num_ops
    assert uneven.samples_per_s < fair.samples_per_s


@pytest.mark.parametrize("speeds", ["1", "1,2,3", "fast,slow", "1,0", "1,-1", "1,nan", "1,inf"])
def test_speeds_that_are_none(speeds: str) -> None:
    job = Job(lambda: nn.Linear(4, 2), nn.functional.mse_loss, [(torch.zeros(4, 4), torch.zeros(4, 2))])
    with pytest.raises(ValueError, match="speeds"):
        job.train(TrainingConfig(steps=1, on="local:2", speeds=speeds))


def test_speeds_are_for_each_node() -> None:
    assert ravnest.TrainingConfig(on="local:3", speeds="1,0.5,0.25").speed_of == (1.0, 0.5, 0.25)


def test_members_are_compared_with_this_machine_on_one_measure(fixed_op_times: None, tmp_path: Path) -> None:
    program = model()
    config = TrainingConfig(on=":7700")
    timed = time_job(Workload(program, 4), AdamW(1e-3), config, accumulate=2)
    trainer = TrainerConfig(optimizer=AdamW(1e-3), correction=corrections.DEFAULT)
    machines = [Machine(name="as-fast", speed=20.0), Machine(name="half", speed=10.0)]
    for reference, speeds in ((20.0, [1.0, 0.5]), (None, [20.0 / timed.gflops, 10.0 / timed.gflops])):
        builder = FleetClusterBuilder(
            program, timed, trainer, tmp_path, StartWeights(program, 0), synchronous=False, min_stages=2,
            reference_gflops=reference,
        )  # fmt: skip
        assert [machine.speed for machine in builder._task(machines).fleet.machines] == pytest.approx(speeds)
