"""Small fleets with clusters, ready to be simulated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ravnest.planner import Chain, MemoryModel, Storage
from ravnest.planner.fleet import ClusterPlan, Fleet, FleetPlan, IdleMachine, Machine, Task, plan_row

PLAIN = MemoryModel(base_bytes=0, correction_copies=0, optimizer_ratio=0.0, link_buffers=0)


def chain_of(forward_s: Sequence[float], *, message_bytes: int = 0, weight_bytes: int = 0) -> Chain:
    """Ops that take twice as long back, with equal messages over all cuts and equal weights; each saves 1 byte."""
    num = len(forward_s)
    messages = (0, *[message_bytes] * (num - 1), 0)
    return Chain(
        forward_s=tuple(forward_s),
        backward_s=tuple(2 * s for s in forward_s),
        cuts=tuple(range(1, num)),
        forward_bytes=messages,
        backward_bytes=messages,
        weights=tuple(Storage(weight_bytes, (i,)) for i in range(num)),
        saved=tuple(Storage(1, (i,)) for i in range(num)),
    )


def plan_of(task: Task, rows: Sequence[Sequence[str]]) -> FleetPlan:
    """These machines as clusters, all others as spares."""
    clusters = tuple(plan_row(task, row) for row in rows)
    busy = {name for row in rows for name in row}
    spares = tuple(IdleMachine(m.name, "not needed") for m in task.fleet.machines if m.name not in busy)
    return FleetPlan(clusters, spares, (), sum(c.samples_per_s for c in clusters), "")


def deepened(plan: FleetPlan) -> FleetPlan:
    """With enough microbatches in flight that only the bottleneck limits the rate."""

    def deep(cluster: ClusterPlan) -> ClusterPlan:
        found, num = cluster.partition, len(cluster.members)
        depths = (*(depth + 4 * (num - j) for j, depth in enumerate(found.depths[:-1])), found.depths[-1])
        return replace(cluster, partition=replace(found, depths=depths, interval_s=found.bottleneck_s))

    return replace(plan, clusters=tuple(map(deep, plan.clusters)))


def random_task(seed: int, *, machines: int = 4, **task: object) -> Task:
    """Uneven machines with uneven lines, some of one site, and a chain that needs them."""
    rng = random.Random(seed)
    fleet = Fleet(
        machines=tuple(
            Machine(
                name=f"m{i}",
                speed=rng.uniform(0.5, 2.0),
                up_bytes_per_s=rng.choice([400.0, 1000.0, inf]),
                down_bytes_per_s=rng.choice([800.0, 2000.0, inf]),
                latency_s=rng.choice([0.0, 0.05, 0.3]),
                site=rng.choice(["", "", "home"]),
            )
            for i in range(machines)
        ),
        lan_bytes_per_s=5000.0,
    )
    chain = chain_of([rng.uniform(0.1, 0.5) for _ in range(3 * machines)], message_bytes=rng.choice([0, 50, 500]))
    return Task(chain=chain, fleet=fleet, memory=PLAIN, **task)  # type: ignore[arg-type]
