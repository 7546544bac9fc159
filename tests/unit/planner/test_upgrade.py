"""The one change that helps most, against all changes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.planner import MemoryModel
from ravnest.planner.fleet import ClusterPlan, Fleet, FleetPlan, Machine, Task, plan_row
from ravnest.planner.upgrade import best_upgrade
from tests.unit.planner.test_partition import chain_of, heavy_chain, large_chain

MB = 1_000_000
MODEL = MemoryModel(base_bytes=0, correction_copies=0)


def task_of(machines: Sequence[Machine]) -> Task:
    """Sixteen ops of 3 s, 100 bytes over each cut, weights of 1 MB and activations of 10 MB at each."""
    return Task(chain=heavy_chain(16), fleet=Fleet(machines=tuple(machines)), memory=MODEL)


def plan_of(task: Task, *rows: Sequence[str]) -> FleetPlan:
    clusters = tuple(plan_row(task, row) for row in rows)
    return FleetPlan(clusters, (), (), sum(cluster.samples_per_s for cluster in clusters), "")


def test_the_slowest_computer() -> None:
    chain = chain_of(2, forward_s=(1.0, 5.0), backward_s=(1.0, 5.0))
    task = Task(chain=chain, fleet=Fleet(machines=(Machine(name="a"), Machine(name="b"))), memory=MODEL)
    found = best_upgrade(task, plan_of(task, "ab"))
    assert found is not None
    assert (found.name, found.change) == ("b", "a computer twice as fast")
    assert found.gain == pytest.approx(1.0)
    assert found.samples_per_s == pytest.approx(0.2)
    assert found.reason == (
        "in cluster 0, stage 1 is the slowest, 10 s per microbatch; then stage 1 is the slowest, 5 s per microbatch"
    )


def test_the_slowest_line_of_all_clusters() -> None:
    estimator = Machine(name="d", up_bytes_per_s=1e3, down_bytes_per_s=1e3)
    slow = [replace(estimator, name=name, speed=0.1) for name in "ab"]
    task = task_of([*slow, replace(estimator, name="c", up_bytes_per_s=2.5), estimator])
    found = best_upgrade(task, plan_of(task, "ab", "cd"))
    assert found is not None
    assert found.name == "c"
    assert found.change == "twice the upload, 40 bit/s"
    assert "in cluster 1, the link from stage 0 to stage 1 is the slowest" in found.reason


def test_memory_that_keeps_work_from_the_fast() -> None:
    task = task_of([Machine(name="fast", speed=8.0, memory_bytes=60 * MB), Machine(name="slow", memory_bytes=1e12)])
    found = best_upgrade(task, plan_of(task, ["fast", "slow"]))
    assert found is not None
    assert (found.name, found.change) == ("slow", "a computer twice as fast")
    poorer = task_of([Machine(name="fast", speed=8.0, memory_bytes=150 * MB), Machine(name="slow", memory_bytes=1e12)])
    found = best_upgrade(poorer, plan_of(poorer, ["fast", "slow"]))
    assert found is not None
    assert (found.name, found.change) == ("fast", "twice the memory, 300.0 MB")


def test_latency_if_only_few_may_be_in_flight() -> None:
    far = [Machine(name="a", latency_s=1.0), Machine(name="b", latency_s=50.0)]
    task = replace(task_of(far), accumulate=2)
    found = best_upgrade(task, plan_of(task, "ab"))
    assert found is not None
    assert (found.name, found.change) == ("b", "half the latency, 25 s")
    assert "the limit is 2" in found.reason


def test_nothing_single_helps() -> None:
    lines = [Machine(name=name, speed=1e6, up_bytes_per_s=1.0, down_bytes_per_s=1.0) for name in "ab"]
    task = task_of(lines)
    assert best_upgrade(task, plan_of(task, "ab")) is None  # both ends of the link are as slow


machines = st.builds(
    Machine,
    name=st.just("x"),
    memory_bytes=st.sampled_from([150.0 * MB, 300.0 * MB, inf]),
    speed=st.sampled_from([0.5, 1.0, 3.0]),
    up_bytes_per_s=st.sampled_from([5.0, 20.0, 100.0]),
    down_bytes_per_s=st.sampled_from([10.0, 100.0]),
    latency_s=st.sampled_from([0.0, 1.0]),
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Task, FleetPlan]:
    fleet = [replace(m, name=f"m{i}") for i, m in enumerate(draw(st.lists(machines, min_size=4, max_size=6)))]
    fleet[0] = replace(fleet[0], memory_bytes=inf)  # so that it fits
    fleet[-1] = replace(fleet[-1], memory_bytes=inf)
    task = replace(task_of(fleet), accumulate=draw(st.sampled_from([0, 3])))
    names, half = [m.name for m in fleet], len(fleet) // 2
    return task, plan_of(task, names[:half], names[half:])


def all_gains(task: Task, plan: FleetPlan) -> dict[tuple[str, str], float]:
    """What every change of every member would gain, in samples/s."""
    doubled = ("memory_bytes", "up_bytes_per_s", "down_bytes_per_s", "speed")
    gains = {}
    for cluster in plan.clusters:
        for name in cluster.members:
            machine = task.fleet[name]
            changes = [(field, 2 * getattr(machine, field)) for field in doubled]
            for field, value in (*changes, ("latency_s", machine.latency_s / 2)):
                then = with_machine(task, cluster, replace(machine, **{field: value}))
                gains[name, field] = then.samples_per_s - cluster.samples_per_s
    return gains


def with_machine(task: Task, cluster: ClusterPlan, changed: Machine) -> ClusterPlan:
    machines = tuple(changed if m.name == changed.name else m for m in task.fleet.machines)
    return plan_row(replace(task, fleet=replace(task.fleet, machines=machines)), cluster.members)


@given(case=plans())
@settings(max_examples=20, deadline=None)
def test_no_other_change_helps_more(case: tuple[Task, FleetPlan]) -> None:
    task, plan = case
    gains, found = all_gains(task, plan), best_upgrade(task, plan)
    most = max(gains.values())
    if found is None:
        assert all(gain <= 0.0101 * cluster_of(plan, name).samples_per_s for (name, _), gain in gains.items())
        return
    gained = found.samples_per_s - plan.samples_per_s
    assert found.gain == pytest.approx(gained / plan.samples_per_s)
    fields = {"memory": "memory_bytes", "upload": "up_bytes_per_s", "download": "down_bytes_per_s"}
    fields |= {"latency": "latency_s", "fast": "speed"}
    field = next(field for word, field in fields.items() if word in found.change)
    assert gained == pytest.approx(gains[found.name, field])
    assert gained == pytest.approx(most)


def cluster_of(plan: FleetPlan, name: str) -> ClusterPlan:
    return next(cluster for cluster in plan.clusters if name in cluster.members)


@pytest.mark.parametrize("seed", range(3))
def test_a_quick_look_finds_about_as_much(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"m{i}" for i in range(24)]
    task = Task(chain=large_chain(6), fleet=Fleet(machines=tuple(home_pc(rng, name) for name in names)))
    plan = plan_of(task, *(names[first : first + 3] for first in range(0, 24, 3)))
    found = best_upgrade(task, plan)
    assert found is not None
    assert found.samples_per_s - plan.samples_per_s >= 0.95 * max(all_gains(task, plan).values())


def home_pc(rng: random.Random, name: str) -> Machine:
    return Machine(
        name=name,
        memory_bytes=rng.choice([16e9, 32e9]),
        speed=rng.uniform(0.5, 5),
        up_bytes_per_s=rng.uniform(1e6, 5e7),
        down_bytes_per_s=rng.uniform(5e6, 1e8),
        latency_s=rng.uniform(0.002, 0.04),
    )


def test_a_thousand_machines_are_looked_at_quickly() -> None:
    rng = random.Random(1)
    thirty = [home_pc(rng, "x") for _ in range(30)]
    fleet = Fleet(machines=tuple(replace(thirty[i % 30], name=f"m{i}") for i in range(999)))
    task = Task(chain=large_chain(24), fleet=fleet)
    rows = [tuple(f"m{j}" for j in range(first, first + 3)) for first in range(0, 999, 3)]
    known = [plan_row(task, row) for row in rows[:10]]
    clusters = tuple(replace(known[i % 10], members=row) for i, row in enumerate(rows))
    plan = FleetPlan(clusters, (), (), sum(cluster.samples_per_s for cluster in clusters), "")
    began = time.process_time()
    assert best_upgrade(task, plan) is not None
    assert time.process_time() - began < 4  # about 0.7 s
