"""A fleet plan in plain numbers: what a person's tables and a program's JSON are both made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from .core.schedule import rules
from .plan.fleet import ClusterPlan, FleetPlan, Idle, Task
from .plan.outcome import Simulation
from .plan.rings import choose_rings
from .plan.segments import find_segments
from .plan.upgrade import Upgrade

__all__ = [
    "ClusterReport", "LinkReport", "Report", "RingsReport", "SimulationReport", "StageReport", "make_report",
    "simulation_report",
]  # fmt: skip


@dataclass(frozen=True)
class LinkReport:
    """To the next stage: bytes of a microbatch there and back, its way there, and the share of time it is in use."""

    to: str
    forward_bytes: int
    backward_bytes: int
    seconds: float
    used: float


@dataclass(frozen=True)
class StageReport:
    """What a node would do. `busy` and `line_used` are shares of the time; `staleness` is in updates."""

    node: str
    first_op: int
    num_ops: int
    parameter_bytes: int
    memory_bytes: int
    memory_limit_bytes: float
    seconds: float
    busy: float
    line_used: float
    in_flight: int
    staleness: int
    link: LinkReport | None


@dataclass(frozen=True)
class ClusterReport:
    """One copy of the model. So many microbatches and samples go into one of its updates."""

    samples_per_s: float
    interval_s: float
    update_microbatches: int
    update_samples: int
    staleness: int
    reason: str
    stages: tuple[StageReport, ...]


@dataclass(frozen=True)
class RingsReport:
    """Averaging between the clusters: rings, what the busiest node sends in a round, and how long one takes."""

    num_rings: int
    max_sent_bytes: float
    round_s: float
    reason: str
    sent_bytes: dict[str, float]


@dataclass(frozen=True)
class SimulationReport:
    """A run on a virtual clock. `samples_per_s` is with all that went wrong, `steady_samples_per_s` with full pipes.

    `staleness` counts gradients by how many updates late they were; `happenings` tells of failures and returns.
    """

    duration_s: float
    samples_per_s: float
    steady_samples_per_s: float
    bubble: float | None
    staleness: dict[int, int]
    microbatches_trained: int
    microbatches_lost: int
    microbatches_repeated: int
    happenings: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The whole plan, and what it was made from: a speed measured here, and the work of a microbatch."""

    samples_per_s: float
    staleness: int
    reason: str
    clusters: tuple[ClusterReport, ...]
    spares: tuple[Idle, ...]
    left_out: tuple[Idle, ...]
    rings: RingsReport
    microbatch: int
    microbatch_gflop: float
    measured_gflops: float
    upgrade: Upgrade | None = None
    simulation: SimulationReport | None = None


def make_report(task: Task, plan: FleetPlan, *, microbatch_flops: int, reference_gflops: float) -> Report:
    clusters = tuple(_cluster(task, cluster) for cluster in plan.clusters)
    rings = choose_rings(task, plan.clusters)
    return Report(
        samples_per_s=plan.samples_per_s,
        staleness=max((cluster.staleness for cluster in clusters), default=0),
        reason=plan.reason,
        clusters=clusters,
        spares=plan.spares,
        left_out=plan.left_out,
        rings=RingsReport(
            num_rings=len(rings.rings),
            max_sent_bytes=max(rings.sent_bytes.values(), default=0.0),
            round_s=rings.round_s,
            reason=rings.reason,
            sent_bytes=dict(rings.sent_bytes),
        ),
        microbatch=task.microbatch,
        microbatch_gflop=microbatch_flops / 1e9,
        measured_gflops=reference_gflops,
    )


def simulation_report(found: Simulation) -> SimulationReport:
    return SimulationReport(
        duration_s=found.duration_s,
        samples_per_s=found.samples_per_s,
        steady_samples_per_s=found.steady_samples_per_s,
        bubble=found.bubble,
        staleness=dict(sorted(found.staleness.items())),
        microbatches_trained=found.totals.trained,
        microbatches_lost=found.totals.lost,
        microbatches_repeated=found.totals.repeated,
        happenings=tuple(f"{h.time_s:.1f} s: {h.text}" for h in found.happenings),
    )


def _cluster(task: Task, cluster: ClusterPlan) -> ClusterReport:
    found = cluster.partition
    update = task.accumulate or max(found.depths)
    delays = [rule.delay for rule in rules(found.depths, update, max_staleness=task.max_staleness)]
    return ClusterReport(
        samples_per_s=cluster.samples_per_s,
        interval_s=found.interval_s,
        update_microbatches=update,
        update_samples=update * task.microbatch,
        staleness=max(delays),
        reason=cluster.reason,
        stages=tuple(_stages(task, cluster, delays)),
    )


def _stages(task: Task, cluster: ClusterPlan, delays: list[int]) -> Iterator[StageReport]:
    found = cluster.partition
    bounds = (0, *found.cuts, task.chain.num_ops)
    held = find_segments(task.chain, [found.cuts])  # of one cluster alone, segments are stages
    for j, (start, stop) in enumerate(pairwise(bounds)):
        yield StageReport(
            node=cluster.members[j],
            first_op=start,
            num_ops=stop - start,
            parameter_bytes=held[j].parameter_bytes,
            memory_bytes=found.memory[j].total,
            memory_limit_bytes=task.fleet[cluster.members[j]].memory_bytes,
            seconds=found.stage_seconds[j],
            busy=found.stage_seconds[j] / found.interval_s,
            line_used=found.line_seconds[j].interval_s / found.interval_s,
            in_flight=found.depths[j],
            staleness=delays[j],
            link=_link(task, cluster, j) if j + 1 < len(cluster.members) else None,
        )


def _link(task: Task, cluster: ClusterPlan, j: int) -> LinkReport:
    found = cluster.partition
    link, cut = found.link_seconds[j], found.cuts[j]
    return LinkReport(
        to=cluster.members[j + 1],
        forward_bytes=task.chain.forward_bytes[cut],
        backward_bytes=task.chain.backward_bytes[cut],
        seconds=link.forward_s + link.latency_s,
        used=link.interval_s / found.interval_s,
    )
