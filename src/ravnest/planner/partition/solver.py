"""Cuts a program for nodes in a given order, and chooses how many microbatches each has in flight.

One microbatch in flight per stage needs the least memory, so the best bottleneck with that (`best_cuts`) is a lower
bound. If its stages have memory for the depths that leave no bubble, that is the answer. Otherwise other cuts may be as
good and have it; and if there are none, cuts and depths are searched together (`fill_pipeline`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ravnest.planner.memory import StageMemory, stage_memory
from ravnest.planner.partition.cuts import StageTimes, best_cuts, fill_pipeline
from ravnest.planner.partition.depth import LineSeconds, LinkSeconds, bottleneck_s, depths, interval_s
from ravnest.planner.partition.fit import does_not_fit
from ravnest.planner.problem import Problem, TooManyNodes
from ravnest.planner.reasons import count, explain_partition

__all__ = ["Partition", "partition"]


@dataclass(frozen=True)
class Partition:
    """Stages between `cuts`, one per node, each with its seconds, memory and microbatches in flight.

    `line_seconds` are those of each node's line, which its links share. `bottleneck_s` is that of the slowest stage,
    link or line: the interval with enough microbatches in flight. `interval_s` is the interval with these `depths`.
    `reason` is a sentence on the bottleneck.
    """

    cuts: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    link_seconds: tuple[LinkSeconds, ...]
    line_seconds: tuple[LineSeconds, ...]
    memory: tuple[StageMemory, ...]
    depths: tuple[int, ...]
    bottleneck_s: float
    interval_s: float
    reason: str


def partition(problem: Problem) -> Partition:
    """The best cuts. Raises `TooManyNodes` or `DoesNotFit`.

    If depths are not given, as many microbatches are in flight as leave no bubble, as far as memory and `max_depth` go.
    """
    at_most = len(problem.chain.cuts) + 1
    if len(problem.nodes) > at_most:
        raise TooManyNodes(
            f"{count(len(problem.nodes), 'node')} given, but the program can be cut into {at_most} stages at most: "
            f"use {at_most} {'node' if at_most == 1 else 'nodes or fewer'}"
        )
    times = StageTimes(problem)
    cuts = best_cuts(times, problem.depths or (1,) * len(problem.nodes))
    if cuts is None:
        raise does_not_fit(problem)
    found = _Layout(times, cuts)
    if problem.depths is None:
        found = _with_memory(found)
    return found.partition()


def _with_memory(found: _Layout) -> _Layout:
    """Cuts as good with memory for the wanted depths; if there are none, the best compromise of both."""
    problem, least_s = found.times.problem, found.bottleneck_s
    good_enough_s = least_s * (1 + problem.tolerance)
    if found.depths == found.wanted and found.interval_s <= good_enough_s:
        return found
    others = best_cuts(found.times, found.wanted)
    if others is not None:
        other = _Layout(found.times, others)
        found = other if other.interval_s <= max(good_enough_s, found.interval_s) else found
    if found.interval_s <= good_enough_s:
        return found
    filled = fill_pipeline(problem, least_s / (1 + problem.tolerance), found.interval_s)
    return found if filled is None else min(found, _Layout(found.times, filled), key=lambda layout: layout.interval_s)


class _Layout:
    """Given cuts, and the times, depths and memory that follow."""

    def __init__(self, times: StageTimes, cuts: tuple[int, ...]) -> None:
        self.times, self.cuts, problem = times, cuts, times.problem
        ranges = times.stage_ranges(cuts)
        self.shares = [times.cut_points.share(i, k) for i, k in ranges]
        self.stage_s = tuple(times.stage_seconds(j, i, k) for j, (i, k) in enumerate(ranges))
        self.link_s = tuple(times.link(j, cut) for j, cut in enumerate(cuts))
        self.line_s = tuple(times.line_seconds(j, i, k) for j, (i, k) in enumerate(ranges))
        self.bottleneck_s = bottleneck_s(self.stage_s, self.link_s, self.line_s)
        self.wanted = depths(self.stage_s, self.link_s, self.line_s, slack=problem.slack, max_depth=problem.max_depth)
        self.depths = problem.depths or tuple(map(self._depth_that_fits, range(len(ranges))))
        self.interval_s = interval_s(self.stage_s, self.link_s, self.depths, self.line_s)

    def _depth_that_fits(self, j: int) -> int:
        """The wanted depth of a stage, or as much as its memory allows."""
        node, model = self.times.problem.nodes[j], self.times.problem.memory
        below = range(self.wanted[j], 1, -1)
        return next((d for d in below if stage_memory(self.shares[j], d, model).total <= node.memory_bytes), 1)

    def partition(self) -> Partition:
        memory = (
            stage_memory(share, depth, self.times.problem.memory)
            for share, depth in zip(self.shares, self.depths, strict=True)
        )
        found = Partition(
            cuts=self.cuts,
            stage_seconds=self.stage_s,
            link_seconds=self.link_s,
            line_seconds=self.line_s,
            memory=tuple(memory),
            depths=self.depths,
            bottleneck_s=self.bottleneck_s,
            interval_s=self.interval_s,
            reason="",
        )
        return replace(found, reason=explain_partition(self.times.problem, found))
