"""Where to cut a program for nodes in a given order: an exact dynamic programme.

Let t_j(i, k) be the seconds of the stage from place i to place k on node j, and l_j(k) those of the link behind it.
The least bottleneck of the first j nodes, with the last of them ending at k, is

    B_j(k) = min over i < k, with memory_j(i, k) <= memory of node j, of  max(B_{j-1}(i), t_j(i, k), l_j(k))

A second pass keeps to stages and links within the best bottleneck, and of those takes the fewest bytes over cuts,
then the least sum of squared stage seconds (the best balance). Both sums split at every cut, so this is exact too.
Since t_j grows as i falls, a pass looks at a place's predecessors from the nearest on, and no further than it helps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from ..core.config import format_bytes
from .depth import LinkSeconds, depths, interval_s
from .fit import Room, does_not_fit
from .memory import StageMemory, stage_memory
from .problem import Problem, TooManyNodes

__all__ = ["Partition", "partition"]

_ATTEMPTS = 4  # at depths and cuts that agree


@dataclass(frozen=True)
class Partition:
    """Stages between `cuts`, one per node, root first, each with its seconds, memory and microbatches in flight.

    `bottleneck_s` is of the slowest stage or link, and with enough microbatches in flight one is done that often;
    with `depths` as they are, one is done every `interval_s`. `reason` says in words what limits it.
    """

    cuts: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    link_seconds: tuple[LinkSeconds, ...]
    memory: tuple[StageMemory, ...]
    depths: tuple[int, ...]
    bottleneck_s: float
    interval_s: float
    reason: str


def partition(problem: Problem) -> Partition:
    """The best cuts. Raises `TooManyNodes` or `DoesNotFit`.

    If depths are not given, room is made for as many microbatches in flight as leave no bubble, as far as memory goes.
    """
    at_most = len(problem.chain.cuts) + 1
    if len(problem.nodes) > at_most:
        raise TooManyNodes(
            f"{len(problem.nodes)} nodes, but the program can be cut into {at_most} stages at most: "
            f"use {at_most} {'node' if at_most == 1 else 'nodes or fewer'}"
        )
    found = _Search(problem, problem.assumed_depths).run()
    limit = max(problem.assumed_depths)
    while found is None and problem.depths is None and limit > 1:
        limit //= 2
        found = _Search(problem, tuple(min(limit, d) for d in problem.assumed_depths)).run()
    if found is None:
        raise does_not_fit(problem)
    return found if problem.depths is not None else _with_own_depths(problem, found)


def _with_own_depths(problem: Problem, found: Partition) -> Partition:
    """The partition with the depths it needs; cut anew, with room for them, if that makes it faster."""
    best = None
    for _ in range(_ATTEMPTS):
        wanted = depths(found.stage_seconds, found.link_seconds, slack=problem.slack)
        settled = _Search(problem, _as_deep_as_fits(problem, found, wanted)).describe(found.cuts)
        if best is None or settled.interval_s < best.interval_s:
            best = settled
        if settled.depths == wanted:
            break
        again = _Search(problem, tuple(map(max, wanted, found.depths))).run()
        if again is None:
            break
        found = again
    assert best is not None
    return best


def _as_deep_as_fits(problem: Problem, found: Partition, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The wanted depths, less where there is no memory for them."""
    search = _Search(problem, wanted)
    allowed = []
    for (i, k), node, most in zip(search.stretches(found.cuts), problem.nodes, wanted, strict=True):
        share = search.places.share(i, k)
        fitting = (d for d in range(most, 1, -1) if stage_memory(share, d, problem.memory).total <= node.memory_bytes)
        allowed.append(next(fitting, 1))
    return tuple(allowed)


class _Search:
    """One chain, its places, and what every node can do with them."""

    def __init__(self, problem: Problem, in_flight: tuple[int, ...]) -> None:
        self.problem = problem
        self.depths = in_flight
        self.places = problem.chain.places(problem.num_places)
        self.upto_s = self.places.upto_s(recompute=problem.memory.recompute)
        self.bytes = [problem.chain.cut_bytes(b) for b in self.places.bounds]
        self.link_s = [[self._link(j, b).interval_s for b in self.places.bounds] for j in range(len(problem.wires))]
        self.link_s.append([0.0] * len(self.places.bounds))  # behind the leaf

    def run(self) -> Partition | None:
        """The best partition, or None if none fits."""
        nodes = zip(self.problem.nodes, self.depths, strict=True)
        self.rooms = [Room(self.places, node.memory_bytes, depth, self.problem.memory) for node, depth in nodes]
        bottlenecks = self._bottlenecks()
        best = bottlenecks[-1][self.places.end]
        if best == inf:
            return None
        return self.describe(self._cheapest(bottlenecks, best * (1 + self.problem.tolerance)))

    def _ends(self, j: int) -> range:
        """Where stage j may end: one place at least for every other stage, and the last stage at the end."""
        last = self.places.end - (len(self.problem.nodes) - 1 - j)
        return range(j + 1 if last < self.places.end else last, last + 1)

    def _bottlenecks(self) -> list[list[float]]:
        """B_j(k) for j = 0 (no node) to the number of nodes."""
        upto_s, rows = self.upto_s, [[0.0, *[inf] * self.places.end]]
        for j, node in enumerate(self.problem.nodes):
            room, before, row = self.rooms[j], rows[-1], [inf] * (self.places.end + 1)
            for k in self._ends(j):
                best, link_s = inf, self.link_s[j][k]
                for i in range(k - 1, room.never[k] - 1, -1):
                    seconds = (upto_s[k] - upto_s[i]) / node.speed
                    if seconds >= best:
                        break
                    slowest = max(before[i], seconds, link_s)
                    if slowest < best and (i >= room.sure[k] or room.fits(i, k)):
                        best = slowest
                row[k] = best
            rows.append(row)
        return rows

    def _cheapest(self, bottlenecks: list[list[float]], cap: float) -> tuple[int, ...]:
        """Cuts with no stage or link over `cap` seconds: fewest bytes, then best balanced."""
        states: dict[int, tuple[int, float]] = {0: (0, 0.0)}
        parents: list[dict[int, int]] = []
        for j, node in enumerate(self.problem.nodes):
            room, reached, came_from = self.rooms[j], dict[int, tuple[int, float]](), dict[int, int]()
            for k in self._ends(j):
                if bottlenecks[j + 1][k] > cap:
                    continue
                for i in range(k - 1, room.never[k] - 1, -1):
                    seconds = (self.upto_s[k] - self.upto_s[i]) / node.speed
                    if seconds > cap:
                        break
                    if i not in states:
                        continue
                    cost = states[i][0] + self.bytes[k], states[i][1] + seconds * seconds
                    if (k not in reached or cost < reached[k]) and (i >= room.sure[k] or room.fits(i, k)):
                        reached[k], came_from[k] = cost, i
            states = reached
            parents.append(came_from)
        path = [self.places.end]
        for came_from in reversed(parents):
            path.append(came_from[path[-1]])
        return tuple(self.places.bounds[i] for i in reversed(path[1:-1]))

    def describe(self, cuts: tuple[int, ...]) -> Partition:
        """The numbers of a partition that is given."""
        stretches = self.stretches(cuts)
        speeds = [node.speed for node in self.problem.nodes]
        stage_s = tuple(
            (self.upto_s[k] - self.upto_s[i]) / speed for (i, k), speed in zip(stretches, speeds, strict=True)
        )
        link_s = tuple(self._link(j, cut) for j, cut in enumerate(cuts))
        found = Partition(
            cuts=cuts,
            stage_seconds=stage_s,
            link_seconds=link_s,
            memory=tuple(
                stage_memory(self.places.share(i, k), depth, self.problem.memory)
                for (i, k), depth in zip(stretches, self.depths, strict=True)
            ),
            depths=self.depths,
            bottleneck_s=max(*stage_s, *(link.interval_s for link in link_s), 0.0),
            interval_s=interval_s(stage_s, link_s, self.depths),
            reason="",
        )
        return replace(found, reason=_explain(self.problem, found))

    def stretches(self, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
        """The stages between cuts, as pairs of places."""
        return list(pairwise(self.places.bounds.index(c) for c in (0, *cuts, self.places.bounds[-1])))

    def _link(self, j: int, cut: int) -> LinkSeconds:
        chain = self.problem.chain
        return self.problem.wires[j].seconds(chain.forward_bytes[cut], chain.backward_bytes[cut])


def _explain(problem: Problem, found: Partition) -> str:
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
    duration = f"{_seconds(found.interval_s)} per microbatch"
    if found.interval_s > found.bottleneck_s:
        return f"too few microbatches are in flight to fill the pipe, {duration}"
    slowest = max(range(len(found.stage_seconds)), key=found.stage_seconds.__getitem__)
    if found.stage_seconds[slowest] == found.bottleneck_s:
        return f"stage {slowest} is the slowest, {duration}"
    j = max(range(len(found.link_seconds)), key=lambda j: found.link_seconds[j].interval_s)
    size = format_bytes(problem.chain.cut_bytes(found.cuts[j]))
    return f"the link from stage {j} to stage {j + 1} is the slowest, {duration} for {size} both ways"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
