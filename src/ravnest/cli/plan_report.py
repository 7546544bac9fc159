"""A fleet plan in plain numbers, for the tables and for the JSON of `ravnest plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ravnest.core.schedule import stage_schedules
from ravnest.planner.fleet import ClusterPlan, FleetPlan, IdleMachine, Task
from ravnest.planner.rings import choose_rings, find_segments
from ravnest.planner.upgrade import Upgrade
from ravnest.simulator.results import Simulation

__all__ = [
    "ClusterReport",
    "LinkReport",
    "PlanReport",
    "RingsReport",
    "SimulationReport",
    "StageReport",
    "make_report",
    "simulation_report",
]


@dataclass(frozen=True)
class LinkReport:
    """Link to the next stage: bytes of a microbatch both ways, seconds forward, and the share of time in use."""

    to: str
    forward_bytes: int
    backward_bytes: int
    seconds: float
    used: float


@dataclass(frozen=True)
class StageReport:
    """The stage of a node. `busy` and `line_used` are shares of the time; `staleness` is in updates."""

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
    """One copy of the model; `update_microbatches` and `update_samples` are those of one optimizer step."""

    samples_per_s: float
    interval_s: float
    update_microbatches: int
    update_samples: int
    staleness: int
    reason: str
    stages: tuple[StageReport, ...]


@dataclass(frozen=True)
class RingsReport:
    """Averaging between the clusters: rings, bytes that the busiest node sends per round, and seconds per round."""

    num_rings: int
    max_sent_bytes: float
    round_s: float
    reason: str
    sent_bytes: dict[str, float]


@dataclass(frozen=True)
class SimulationReport:
    """A run on a virtual clock. `samples_per_s` includes failures, `steady_samples_per_s` is with full pipelines.

    `staleness` counts gradients by how many updates late they were; `happenings` are failures and returns.
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
class PlanReport:
    """The whole plan, and its inputs: the speed measured on this machine, and the work of a microbatch."""

    samples_per_s: float
    staleness: int
    reason: str
    clusters: tuple[ClusterReport, ...]
    spares: tuple[IdleMachine, ...]
    left_out: tuple[IdleMachine, ...]
    rings: RingsReport
    microbatch: int
    microbatch_gflop: float
    measured_gflops: float
    upgrade: Upgrade | None = None
    simulation: SimulationReport | None = None


def make_report(task: Task, plan: FleetPlan, *, microbatch_flops: int, reference_gflops: float) -> PlanReport:
    clusters = tuple(_cluster(task, cluster) for cluster in plan.clusters)
    rings = choose_rings(task, plan.clusters)
    return PlanReport(
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
        happenings=tuple(f"{h.time_s:.1f} s: {h.text}" for h in found.events),
    )


def _cluster(task: Task, cluster: ClusterPlan) -> ClusterReport:
    found = cluster.partition
    update = task.accumulate or max(found.depths)
    delays = [rule.delay for rule in stage_schedules(found.depths, update, max_staleness=task.max_staleness)]
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
