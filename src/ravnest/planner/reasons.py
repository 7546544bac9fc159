"""Writes the sentences that plans and errors of the planner carry."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from ravnest.core.units import format_bytes, format_seconds
from ravnest.planner.memory import stage_memory

if TYPE_CHECKING:
    from ravnest.planner.fleet import ClusterPlan, Machine, Task
    from ravnest.planner.partition.solver import Partition
    from ravnest.planner.problem import Problem
    from ravnest.planner.replan import StateTransfers
    from ravnest.planner.rings import Ring

__all__ = [
    "count",
    "describe_misfit",
    "describe_remedies",
    "explain_clusters",
    "explain_idle_machine",
    "explain_partition",
    "explain_rings",
    "explain_row",
    "format_rate",
    "format_transfers",
]


def count(number: int, noun: str) -> str:
    """1, `"node"` -> `"1 node"`; 2 -> `"2 nodes"`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.3g} samples/s"


def format_transfers(moved: StateTransfers) -> str:
    if not moved.num_bytes:
        return "nothing moves"
    took = "less than 1 ms" if moved.longest_s < 1e-3 else format_seconds(moved.longest_s)
    return f"{format_bytes(moved.num_bytes)} move in {took}"


def explain_partition(problem: Problem, found: Partition) -> str:
    """The bottleneck, the fraction of the nodes' speed that is used, and the stage with the least memory left."""
    speeds = [node.speed for node in problem.nodes]
    ideal_s = sum(s * speed for s, speed in zip(found.stage_seconds, speeds, strict=True)) / sum(speeds)
    fraction = ideal_s / found.interval_s if found.interval_s else 1.0
    text = f"{_bottleneck(problem, found)}: {fraction:.0%} of what the nodes could do without links and limits"
    fullest = max(range(len(speeds)), key=lambda j: found.memory[j].total / problem.nodes[j].memory_bytes)
    used, limit = found.memory[fullest].total, problem.nodes[fullest].memory_bytes
    if limit < inf:
        text += f"; stage {fullest} is the fullest, {format_bytes(used)} of {format_bytes(limit)}"
    return text


def _bottleneck(problem: Problem, found: Partition) -> str:
    """The part that must become faster first for a faster run."""
    duration = f"{format_seconds(found.interval_s)} per microbatch"
    if found.interval_s > found.bottleneck_s:
        is_capped = problem.max_depth is not None and max(found.depths) >= problem.max_depth
        why = f"the limit is {problem.max_depth}" if is_capped else "there is no memory for more"
        return f"too few microbatches are in flight to fill the pipeline ({why}), {duration}"
    stages = range(len(found.stage_seconds))
    slowest = max(stages, key=found.stage_seconds.__getitem__)
    if found.stage_seconds[slowest] == found.bottleneck_s:
        return f"stage {slowest} is the slowest, {duration}"
    j = max(range(len(found.link_seconds)), key=lambda j: found.link_seconds[j].interval_s)
    if found.link_seconds[j].interval_s == found.bottleneck_s:
        size = format_bytes(problem.chain.cut_bytes(found.cuts[j]))
        return f"the link from stage {j} to stage {j + 1} is the slowest, {duration} for {size} both ways"
    j = max(stages, key=lambda j: found.line_seconds[j].interval_s)
    is_upload = found.line_seconds[j].up_s == found.bottleneck_s
    node = problem.nodes[j]
    bandwidth = format_bytes(node.up_bytes_per_s if is_upload else node.down_bytes_per_s)
    return f"the {'upload' if is_upload else 'download'} of stage {j} is the slowest, {duration} at {bandwidth}/s"


def explain_row(machines: Sequence[Machine], found: Partition) -> str:
    regions = sorted({machine.region for machine in machines if machine.region})
    where = f" in {' and '.join(regions)}" if regions else ""
    return f"{count(len(machines), 'machine')}{where}: {found.reason}"


def explain_clusters(
    task: Task, clusters: Sequence[ClusterPlan], num_spares: int, num_left_out: int, *, work_s: float, min_stages: int
) -> str:
    """`work_s` is the time of a microbatch on a machine of speed 1, `min_stages` the limit that was possible."""
    sizes = sorted(len(cluster.members) for cluster in clusters)
    size = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
    total = sum(cluster.samples_per_s for cluster in clusters)
    ideal = sum(machine.speed for machine in task.fleet.machines) * task.microbatch / (work_s or 1.0)
    text = (
        f"{count(len(clusters), 'cluster')} of {size}, {format_rate(total)}: "
        f"{total / ideal:.0%} of what all machines could do without links and limits; "
        f"{num_spares} spare, {num_left_out} left out"
    )
    if min_stages < task.min_stages:
        wanted = task.min_stages
        text += f"; clusters smaller than {wanted} are allowed, because no {wanted} machines can share this model"
    if num_spares < task.num_spares:
        text += f"; {count(task.num_spares, 'spare')} requested, but no more can be held back"
    return text


def explain_idle_machine(
    machine: Machine, cluster: str, before: float, after: float, *, is_limited_by_line: bool
) -> str:
    """Why a machine is in no cluster; the best one for it would go from `before` to `after` samples/s with it."""
    if after == 0:
        return f"it does not fit into any cluster: that of {cluster}, for one, has no room for another stage"
    change = f"from {before:.3g} to {format_rate(after)}"
    if after >= before:
        return f"it would not help: the cluster of {cluster}, where it helps most, would go {change}"
    subject = "it"
    if is_limited_by_line:
        line = min(machine.up_bytes_per_s, machine.down_bytes_per_s)
        subject = f"its {'upload' if line == machine.up_bytes_per_s else 'download'} of {format_bytes(line)}/s"
    return f"{subject} would slow the cluster of {cluster}, where it costs least, {change}"


def describe_misfit(problem: Problem) -> str:
    """The memory of the nodes, and that of the whole model."""
    cut_points = problem.chain.cut_points(1)
    whole = stage_memory(cut_points.share(0, cut_points.end), 1, problem.memory)
    return (
        f"the nodes have {format_bytes(sum(n.memory_bytes for n in problem.nodes))} in all; the whole model on one, "
        f"with one microbatch in flight, takes {whole}"
    )


def describe_remedies(remedies: tuple[str, ...], num_more_nodes: int) -> str:
    if remedies:
        return "It would fit " + ", or ".join(remedies) + "."
    return (
        f"Neither memory mode small nor half the microbatch nor {num_more_nodes} more nodes like the largest is "
        "enough: give the nodes more memory."
    )


def explain_rings(rings: Sequence[Ring], num_clusters: int, line: str, line_s: float) -> str:
    """The longest part of a round: the busiest line, or the slowest ring alone."""
    if not rings:
        return "no parameters: there is nothing to average"
    text = f"{count(len(rings), 'ring')} of {num_clusters}"
    slowest = max(rings, key=lambda ring: ring.seconds)
    if line_s >= slowest.seconds and line:
        return f"{text}: {line}, is the longest part of a round, {line_s:.3g} s"
    size, segment = format_bytes(slowest.segment.parameter_bytes), slowest.segment
    ring = f"the ring of ops {segment.start} to {segment.stop}, {size}"
    return f"{text}: {ring}, is the slowest, {slowest.seconds:.3g} s a round"
