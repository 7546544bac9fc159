"""Renders a fleet plan: as a report of plain numbers for JSON, and as tables for a terminal.

The tables are one per cluster, or one line per kind of cluster where there are many nodes; then the totals follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ravnest.core.schedule import stage_schedules
from ravnest.core.units import format_bytes, format_seconds
from ravnest.planner.fleet import ClusterPlan, FleetPlan, IdleMachine, Task
from ravnest.planner.rings import choose_rings, find_segments
from ravnest.planner.upgrade import Upgrade
from ravnest.simulator.results import Simulation

__all__ = ["plan_page", "PlanReport", "make_report", "simulation_report"]


@dataclass(frozen=True)
class PlannedLink:
    """Link to the next stage: bytes of a microbatch both ways, seconds forward, and the share of time in use."""

    to: str
    forward_bytes: int
    backward_bytes: int
    seconds: float
    used: float


@dataclass(frozen=True)
class PlannedStage:
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
    link: PlannedLink | None


@dataclass(frozen=True)
class ClusterReport:
    """One cluster; `update_microbatches` and `update_samples` are those of one optimizer step."""

    samples_per_s: float
    interval_s: float
    update_microbatches: int
    update_samples: int
    staleness: int
    reason: str
    stages: tuple[PlannedStage, ...]


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
    clusters = tuple(_cluster_content(task, cluster) for cluster in plan.clusters)
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


def simulation_report(simulation: Simulation) -> SimulationReport:
    return SimulationReport(
        duration_s=simulation.duration_s,
        samples_per_s=simulation.samples_per_s,
        steady_samples_per_s=simulation.steady_samples_per_s,
        bubble=simulation.bubble,
        staleness=dict(sorted(simulation.staleness.items())),
        microbatches_trained=simulation.totals.trained,
        microbatches_lost=simulation.totals.lost,
        microbatches_repeated=simulation.totals.repeated,
        happenings=tuple(f"{event.time_s:.1f} s: {event.text}" for event in simulation.events),
    )


def _cluster_content(task: Task, cluster: ClusterPlan) -> ClusterReport:
    partition = cluster.partition
    update = task.accumulate or max(partition.depths)
    delays = [rule.delay for rule in stage_schedules(partition.depths, update, max_staleness=task.max_staleness)]
    return ClusterReport(
        samples_per_s=cluster.samples_per_s,
        interval_s=partition.interval_s,
        update_microbatches=update,
        update_samples=update * task.microbatch,
        staleness=max(delays),
        reason=cluster.reason,
        stages=tuple(_stages(task, cluster, delays)),
    )


def _stages(task: Task, cluster: ClusterPlan, delays: list[int]) -> Iterator[PlannedStage]:
    partition = cluster.partition
    bounds = (0, *partition.cuts, task.chain.num_ops)
    held = find_segments(task.chain, [partition.cuts])  # of one cluster alone, segments are stages
    for j, (start, stop) in enumerate(pairwise(bounds)):
        yield PlannedStage(
            node=cluster.members[j],
            first_op=start,
            num_ops=stop - start,
            parameter_bytes=held[j].parameter_bytes,
            memory_bytes=partition.memory[j].total,
            memory_limit_bytes=task.fleet[cluster.members[j]].memory_bytes,
            seconds=partition.stage_seconds[j],
            busy=partition.stage_seconds[j] / partition.interval_s,
            line_used=partition.line_seconds[j].interval_s / partition.interval_s,
            in_flight=partition.depths[j],
            staleness=delays[j],
            link=_link_content(task, cluster, j) if j + 1 < len(cluster.members) else None,
        )


def _link_content(task: Task, cluster: ClusterPlan, j: int) -> PlannedLink:
    partition = cluster.partition
    link, cut = partition.link_seconds[j], partition.cuts[j]
    return PlannedLink(
        to=cluster.members[j + 1],
        forward_bytes=task.chain.forward_bytes[cut],
        backward_bytes=task.chain.backward_bytes[cut],
        seconds=link.forward_s + link.latency_s,
        used=link.interval_s / partition.interval_s,
    )


# tables

_MANY_NODES = 24  # with more nodes, a cluster is one line
_MAX_LINES = 24
_MAX_NAMES = 8
_MAX_EVENTS = 6


def plan_page(report: PlanReport) -> RenderableType:
    """Return the whole plan for a terminal."""
    parts: list[RenderableType] = []
    if sum(len(cluster.stages) for cluster in report.clusters) > _MANY_NODES:
        parts.append(_many_clusters(report.clusters))
    else:
        parts += [_cluster(i, cluster) for i, cluster in enumerate(report.clusters)]
    return Group(*parts, _totals(report))


def _cluster(number: int, cluster: ClusterReport) -> Table:
    update = f"{_counted(cluster.update_microbatches, 'microbatch')} ({_counted(cluster.update_samples, 'sample')})"
    table = Table(
        title=f"cluster {number}: {_counted(len(cluster.stages), 'node')}, {_rate(cluster.samples_per_s)}, "
        f"{update} an update, {_late(cluster.staleness)}",
        caption=cluster.reason,
        title_justify="left",
        caption_justify="left",
        collapse_padding=True,
        expand=True,
    )
    for name in ("stage", "node", "ops", "weights", "memory", "busy", "line", "to the next", "in flight", "late"):
        table.add_column(name, justify="left" if name == "node" else "right", overflow="fold", no_wrap=name != "node")
    for j, stage in enumerate(cluster.stages):
        table.add_row(str(j), *_stage(stage))
    return table


def _stage(stage: PlannedStage) -> Iterator[str]:
    yield stage.node
    yield f"{stage.first_op}-{stage.first_op + stage.num_ops - 1}"
    yield format_bytes(stage.parameter_bytes)
    yield f"{format_bytes(stage.memory_bytes)} of {format_bytes(stage.memory_limit_bytes)}"
    yield f"{stage.busy:.0%}"
    yield f"{stage.line_used:.0%}"
    yield _link(stage.link) if stage.link is not None else ""
    yield str(stage.in_flight)
    yield str(stage.staleness)


def _link(link: PlannedLink) -> str:
    return f"{format_bytes(link.forward_bytes)}, {format_seconds(link.seconds)}, {link.used:.0%}"


def _many_clusters(clusters: Sequence[ClusterReport]) -> Table:
    """Return a table with a line per kind of cluster; clusters that differ only in names share one."""
    table = Table(title=f"{len(clusters)} clusters", title_justify="left", expand=True)
    for name in ("clusters", "nodes", "samples/s each", "fullest memory", "in flight", "late", "what limits it"):
        table.add_column(name, justify="left" if name == "what limits it" else "right")
    lines = groupby(sorted(clusters, key=lambda c: -c.samples_per_s), _summary)
    rows = [(summary, len(list(alike))) for summary, alike in lines]
    for summary, count in rows[:_MAX_LINES]:
        table.add_row(str(count), *summary)
    if len(rows) > _MAX_LINES:
        table.caption = f"and {sum(count for _, count in rows[_MAX_LINES:])} slower ones; --json shows all"
    return table


def _summary(cluster: ClusterReport) -> tuple[str, ...]:
    fullest = max(stage.memory_bytes / stage.memory_limit_bytes for stage in cluster.stages)
    return (
        str(len(cluster.stages)),
        f"{cluster.samples_per_s:.3g}",
        f"{fullest:.0%}",
        str(max(stage.in_flight for stage in cluster.stages)),
        str(cluster.staleness),
        cluster.reason,
    )


def _totals(report: PlanReport) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for name, text in _facts(report):
        grid.add_row(name, Text(text))
    return grid


def _facts(report: PlanReport) -> Iterator[tuple[str, str]]:
    working = sum(len(cluster.stages) for cluster in report.clusters)
    yield (
        "in all",
        f"{_rate(report.samples_per_s)} from {_counted(len(report.clusters), 'cluster')} of "
        f"{_counted(working, 'node')}, microbatches of {_counted(report.microbatch, 'sample')}, "
        f"{_late(report.staleness)}",
    )
    yield "because", report.reason
    for name, idle in (("spare", report.spares), ("left out", report.left_out)):
        for reason, names in _by_reason(idle):
            yield name, f"{names}: {reason}"
    yield "averaging", _averaging(report)
    if report.upgrade is not None:
        yield "upgrade first", _upgrade(report.upgrade)
    if report.simulation is not None:
        yield from _simulated(report.simulation)
    yield (
        "measured here",
        f"{report.measured_gflops:.3g} GFLOP/s at this model, {report.microbatch_gflop:.3g} GFLOP a microbatch",
    )


def _upgrade(upgrade: Upgrade) -> str:
    gives = f"would give {_rate(upgrade.samples_per_s)}, {upgrade.gain:+.1%}"
    return f"{upgrade.name}: {upgrade.change}, {gives} ({upgrade.reason})"


def _simulated(report: SimulationReport) -> Iterator[tuple[str, str]]:
    bubble = "" if report.bubble is None else f", bubble {report.bubble:.1%}"
    late = ", ".join(f"{late}: {count:,}" for late, count in report.staleness.items())
    yield (
        f"simulated {format_seconds(report.duration_s)}",
        f"{_rate(report.samples_per_s)}, with full pipelines {_rate(report.steady_samples_per_s)}{bubble}; "
        f"gradients by updates late {late}; microbatches: {report.microbatches_trained:,} trained, "
        f"{report.microbatches_lost:,} lost, {report.microbatches_repeated:,} of them repeated"
        f"{'' if report.happenings else '; no failures'}",
    )
    for text in report.happenings[:_MAX_EVENTS]:
        yield "", text
    if (more := len(report.happenings) - _MAX_EVENTS) > 0:
        yield "", f"and {more} more events; --json shows all"


def _averaging(report: PlanReport) -> str:
    rings = report.rings
    if not rings.num_rings:
        return rings.reason
    return (
        f"{_counted(rings.num_rings, 'segment')}, a ring each; a node sends up to "
        f"{format_bytes(rings.max_sent_bytes)} a round, which takes {format_seconds(rings.round_s)} ({rings.reason})"
    )


def _by_reason(idle: Iterable[IdleMachine]) -> Iterator[tuple[str, str]]:
    """Yield each reason with the machines that it applies to."""
    by_reason: dict[str, list[str]] = {}
    for machine in idle:
        by_reason.setdefault(machine.reason, []).append(machine.name)
    for reason, names in by_reason.items():
        more = len(names) - _MAX_NAMES
        yield reason, ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _late(staleness: int) -> str:
    return f"gradients {_counted(staleness, 'update')} late" if staleness else "no gradient late"


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.3g} samples/s" if samples_per_s < 1000 else f"{samples_per_s:,.0f} samples/s"


def _counted(number: int, what: str) -> str:
    plural = "microbatches" if what == "microbatch" else f"{what}s"
    return f"{number} {what if number == 1 else plural}"
