"""Where to cut a program for nodes in a given order, and how many microbatches each has in flight.

The fewest in flight need the least memory, so the best bottleneck with one in flight per stage (`bottleneck`) is the
best there can be. If its stages have memory for the depths that leave no bubble, that is the answer. Else there may be
cuts as good that have it; and if there are none, cuts and depths are searched together (`filling`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .bottleneck import best_cuts
from .depth import LineSeconds, LinkSeconds, bottleneck_s, depths, interval_s
from .explain import explain
from .filling import fill
from .fit import does_not_fit
from .memory import StageMemory, stage_memory
from .parts import Parts
from .problem import Problem, TooManyNodes

__all__ = ["Partition", "partition"]


@dataclass(frozen=True)
class Partition:
    """Stages between `cuts`, one per node, root first, each with its seconds, memory and microbatches in flight.

    `line_seconds` are those of each node's own line, which its links share. `bottleneck_s` is of the slowest stage,
    link or line, and with enough microbatches in flight one is done that often; with `depths` as they are, one is done
    every `interval_s`. `reason` says in words what limits it.
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
            f"{len(problem.nodes)} nodes, but the program can be cut into {at_most} stages at most: "
            f"use {at_most} {'node' if at_most == 1 else 'nodes or fewer'}"
        )
    parts = Parts(problem)
    cuts = best_cuts(parts, problem.depths or (1,) * len(problem.nodes))
    if cuts is None:
        raise does_not_fit(problem)
    found = _Layout(parts, cuts)
    if problem.depths is None:
        found = _with_room(found)
    return found.partition()


def _with_room(found: _Layout) -> _Layout:
    """Of all cuts as good, ones with memory for the depths they want; if depth is scarce, the best trade."""
    problem, least_s = found.parts.problem, found.bottleneck_s
    good_enough_s = least_s * (1 + problem.tolerance)
    if found.depths == found.wanted and found.interval_s <= good_enough_s:
        return found
    roomier = best_cuts(found.parts, found.wanted)
    if roomier is not None:
        other = _Layout(found.parts, roomier)
        found = other if other.interval_s <= max(good_enough_s, found.interval_s) else found
    if found.interval_s <= good_enough_s:
        return found
    filled = fill(problem, least_s / (1 + problem.tolerance), found.interval_s)
    return found if filled is None else min(found, _Layout(found.parts, filled), key=lambda layout: layout.interval_s)


class _Layout:
    """Given cuts, and what follows from them."""

    def __init__(self, parts: Parts, cuts: tuple[int, ...]) -> None:
        self.parts, self.cuts, problem = parts, cuts, parts.problem
        stretches = parts.stretches(cuts)
        self.shares = [parts.places.share(i, k) for i, k in stretches]
        self.stage_s = tuple(parts.stage_seconds(j, i, k) for j, (i, k) in enumerate(stretches))
        self.link_s = tuple(parts.link(j, cut) for j, cut in enumerate(cuts))
        self.line_s = tuple(parts.line_seconds(j, i, k) for j, (i, k) in enumerate(stretches))
        self.bottleneck_s = bottleneck_s(self.stage_s, self.link_s, self.line_s)
        self.wanted = depths(self.stage_s, self.link_s, self.line_s, slack=problem.slack, max_depth=problem.max_depth)
        self.depths = problem.depths or tuple(map(self._as_deep_as_fits, range(len(stretches))))
        self.interval_s = interval_s(self.stage_s, self.link_s, self.depths, self.line_s)

    def _as_deep_as_fits(self, j: int) -> int:
        """The wanted depth of a stage, or less if there is no memory for it."""
        node, model = self.parts.problem.nodes[j], self.parts.problem.memory
        below = range(self.wanted[j], 1, -1)
        return next((d for d in below if stage_memory(self.shares[j], d, model).total <= node.memory_bytes), 1)

    def partition(self) -> Partition:
        memory = (
            stage_memory(share, depth, self.parts.problem.memory)
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
        return replace(found, reason=explain(self.parts.problem, found))
