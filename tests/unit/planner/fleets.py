"""Small random fleets and tasks, and what must hold of any plan for them."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import strategies as st

from ravnest.planner import ClusterPlan, Fleet, FleetPlan, Machine, Problem, Task, interval_s, stage_memory
from tests.unit.planner.instances import chains, models, share, stage_seconds, stretches


@st.composite
def fleets(draw: st.DrawFn, max_machines: int = 9) -> Fleet:
    count = draw(st.integers(1, max_machines))
    bandwidths = st.sampled_from([inf, 40.0, 15.0, 5.0])
    machines = [
        Machine(
            name=f"m{i}",
            memory_bytes=draw(st.sampled_from([inf, 900.0, 400.0, 150.0, 60.0])),
            speed=draw(st.sampled_from([0.5, 1.0, 3.0])),
            up_bytes_per_s=draw(bandwidths),
            down_bytes_per_s=draw(bandwidths),
            latency_s=draw(st.sampled_from([0.0, 0.5])),
            region=draw(st.sampled_from(["eu", "us"])),
            site=draw(st.sampled_from(["", "", "lab"])),
        )
        for i in range(count)
    ]
    return Fleet(machines=tuple(machines), far_s=0.5, lan_bytes_per_s=100.0)


@st.composite
def tasks(draw: st.DrawFn, max_machines: int = 9) -> Task:
    return Task(
        chain=draw(chains()),
        fleet=draw(fleets(max_machines)),
        memory=draw(models),
        microbatch=draw(st.integers(1, 4)),
        accumulate=draw(st.integers(0, 3)),
        max_staleness=draw(st.integers(1, 2)),
        min_stages=draw(st.integers(1, 3)),
        num_spares=draw(st.integers(0, 2)),
        slack=draw(st.integers(0, 1)),
    )


def check(task: Task, plan: FleetPlan) -> None:
    """Every machine once, every op once per cluster, memory and depths kept, figures that agree."""
    members = [name for cluster in plan.clusters for name in cluster.members]
    idle = [machine.name for machine in (*plan.spares, *plan.left_out)]
    assert sorted([*members, *idle]) == sorted(machine.name for machine in task.fleet.machines)
    assert plan.samples_per_s == sum(cluster.samples_per_s for cluster in plan.clusters)
    assert plan.clusters
    assert plan.reason
    assert all(machine.reason for machine in (*plan.spares, *plan.left_out))
    for cluster in plan.clusters:
        _check_cluster(task, cluster)
    stages = [memory.total for cluster in plan.clusters for memory in cluster.partition.memory]
    assert all(task.fleet[spare.name].memory_bytes >= min(stages) for spare in plan.spares)
    assert all(task.fleet[other.name].memory_bytes < min(stages) for other in plan.left_out)


def _check_cluster(task: Task, cluster: ClusterPlan) -> None:
    found, chain = cluster.partition, task.chain
    machines = [task.fleet[name] for name in cluster.members]
    assert cluster.reason
    assert len(found.cuts) == len(machines) - 1
    assert set(found.cuts) <= set(chain.cuts)
    pieces = stretches(chain, found.cuts)
    assert [op for start, stop in pieces for op in range(start, stop)] == list(range(chain.num_ops))
    for (start, stop), machine, depth in zip(pieces, machines, found.depths, strict=True):
        assert stage_memory(share(chain, start, stop), depth, task.memory).total <= machine.memory_bytes
    assert max(found.depths) <= (task.max_depth or inf)
    links = tuple(task.fleet.link(a, b) for a, b in pairwise(machines))
    problem = Problem(chain=chain, nodes=tuple(m.node for m in machines), links=links, memory=task.memory)
    assert list(found.stage_seconds) == pytest.approx(stage_seconds(problem, found.cuts))
    assert found.interval_s == interval_s(found.stage_seconds, found.link_seconds, found.depths, found.line_seconds)
    if found.interval_s:
        assert cluster.samples_per_s == pytest.approx(task.microbatch / found.interval_s)
