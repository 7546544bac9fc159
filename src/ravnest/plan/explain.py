"""What limits a partition, in words."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from ..core.config import format_bytes
from .problem import Problem

if TYPE_CHECKING:
    from .partition import Partition

__all__ = ["explain", "format_seconds"]


def explain(problem: Problem, found: Partition) -> str:
    """What is slowest, how far that is from what the nodes could do, and who is fullest."""
    speeds = [node.speed for node in problem.nodes]
    ideal_s = sum(s * speed for s, speed in zip(found.stage_seconds, speeds, strict=True)) / sum(speeds)
    share = ideal_s / found.interval_s if found.interval_s else 1.0
    text = f"{_limit(problem, found)}: {share:.0%} of what the nodes could do without links and limits"
    fullest = max(range(len(speeds)), key=lambda j: found.memory[j].total / problem.nodes[j].memory_bytes)
    taken, room = found.memory[fullest].total, problem.nodes[fullest].memory_bytes
    if room < inf:
        text += f"; stage {fullest} is the fullest, {format_bytes(taken)} of {format_bytes(room)}"
    return text


def _limit(problem: Problem, found: Partition) -> str:
    """What a faster run would have to change first."""
    duration = f"{format_seconds(found.interval_s)} per microbatch"
    if found.interval_s > found.bottleneck_s:
        capped = problem.max_depth is not None and max(found.depths) >= problem.max_depth
        why = f"no more than {problem.max_depth} may be" if capped else "memory for more is wanting"
        return f"too few microbatches are in flight to fill the pipe ({why}), {duration}"
    stages = range(len(found.stage_seconds))
    slowest = max(stages, key=found.stage_seconds.__getitem__)
    if found.stage_seconds[slowest] == found.bottleneck_s:
        return f"stage {slowest} is the slowest, {duration}"
    j = max(range(len(found.link_seconds)), key=lambda j: found.link_seconds[j].interval_s)
    if found.link_seconds[j].interval_s == found.bottleneck_s:
        size = format_bytes(problem.chain.cut_bytes(found.cuts[j]))
        return f"the link from stage {j} to stage {j + 1} is the slowest, {duration} for {size} both ways"
    j = max(stages, key=lambda j: found.line_seconds[j].interval_s)
    up = found.line_seconds[j].up_s == found.bottleneck_s
    node = problem.nodes[j]
    bandwidth = format_bytes(node.up_bytes_per_s if up else node.down_bytes_per_s)
    return f"the {'upload' if up else 'download'} of stage {j} is the slowest, {duration} at {bandwidth}/s"


def format_seconds(seconds: float) -> str:
    """0.0123 -> `"12.3 ms"`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
