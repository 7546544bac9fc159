"""Cuts a program for nodes in a given order, and chooses how many microbatches each has in flight.

One microbatch in flight per stage needs the least memory, so the best bottleneck with that (`best_cuts`) is a lower
bound. If its stages have memory for the depths that leave no bubble, that is the answer. Otherwise other cuts may be
equally good and have the memory; if there are none, cuts and depths are searched together (`fill_pipeline`).

**Stage times.** A node in the middle sends the activations of the cut behind its stage and the gradients of the cut
before it over one line:

    up_j(i, k)   = (forward(k) + backward(i)) / upload of node j
    down_j(i, k) = (forward(i) + backward(k)) / download of node j

where only cuts whose links use the line count. The chain's bytes are those on the wire, after any compression.

**Known depths** (`best_cuts`): an exact dynamic programme. Let t_j(i, k) be the seconds of the stage from cut point i
to cut point k on node j, or of its line if that takes longer, and l_j(k) those of the link behind it. The least
bottleneck of the first j nodes, with the last of them ending at k, is

    B_j(k) = min over i < k, with memory_j(i, k) <= memory of node j, of  max(B_{j-1}(i), t_j(i, k), l_j(k))

A last pass keeps to stages, lines and links within the best bottleneck, and of those takes the fewest bytes over cuts,
then the least sum of squared stage seconds (the best balance). Both sums split at every cut, so this is exact. Where a
line is the bottleneck, stages may take as long as the line without making it worse; but stage times are estimates, so a
pass between the two finds the least time of the slowest stage, and none may take a tenth more. Since compute grows as i
falls, a pass visits the predecessors of a cut point from the nearest on, while that can help.

**Limited depths** (`fill_pipeline`), where memory or a limit on depth leaves a bubble. A microbatch can be done every T
seconds if every stage, line and link takes at most T, and every stage has as many in flight as fill its trip:
depth_j = ceil(trip_j / T), within memory and `max_depth`. A trip is a sum over later stages, and a shorter one needs no
more memory, here or before. So of all ways from cut point i to the end only the shortest trip counts, and one pass from
the last stage to the first decides whether T is possible:

    V_j(i) = min over k of  t_j(i, k) + round trip over link j at k + V_{j+1}(k)     of those allowed at T

The least T is found by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from ravnest.planner.chain import CutPoints
from ravnest.planner.memory import StageMemory, stage_memory
from ravnest.planner.partition.depth import LineSeconds, LinkSeconds, bottleneck_s, depths, interval_s, needed_depth
from ravnest.planner.partition.fit import FitChecker, does_not_fit, memory_table
from ravnest.planner.problem import Problem, TooManyNodes
from ravnest.planner.reasons import count, explain_partition

__all__ = ["Partition", "partition", "try_partition"]


class StageTimes:
    """Seconds of every possible stage, line and link.

    Stages are given by indices of cut points, `0 <= i < k <= cut_points.end`; links and nodes by their number.
    """

    def __init__(self, problem: Problem, max_cut_points: int | None = None) -> None:
        self.problem = problem
        self.cut_points: CutPoints = problem.chain.cut_points(max_cut_points or problem.num_cut_points)
        self.upto_s = self.cut_points.upto_s(recompute=problem.memory.recompute)
        self.needs = memory_table(self.cut_points, problem.memory)
        num, bounds = len(problem.nodes), self.cut_points.bounds
        self.links = [[self.link(j, b) for b in bounds] for j in range(num - 1)]
        self.link_s = [[link.interval_s for link in row] for row in self.links]
        self.link_s.append([0.0] * len(bounds))  # after the last stage
        self.line_s = [self._line(j) for j in range(num)]

    def link(self, j: int, cut: int) -> LinkSeconds:
        chain = self.problem.chain
        return self.problem.all_links[j].seconds(chain.forward_bytes[cut], chain.backward_bytes[cut])

    def _line(self, j: int) -> tuple[list[float], list[float], list[float], list[float]]:
        """Of node j: up by its start and by its end, down by its start and by its end, for each cut point."""
        chain, node, all_links = self.problem.chain, self.problem.nodes[j], self.problem.all_links
        forward = [chain.forward_bytes[b] for b in self.cut_points.bounds]
        backward = [chain.backward_bytes[b] for b in self.cut_points.bounds]
        before = float(j > 0 and all_links[j - 1].uses_line)
        behind = float(j < len(all_links) and all_links[j].uses_line)

        def seconds(sizes: list[int], used: float, bytes_per_s: float) -> list[float]:
            return [size * used / bytes_per_s for size in sizes]

        return (
            seconds(backward, before, node.up_bytes_per_s), seconds(forward, behind, node.up_bytes_per_s),
            seconds(forward, before, node.down_bytes_per_s), seconds(backward, behind, node.down_bytes_per_s),
        )  # fmt: skip

    def stage_seconds(self, j: int, i: int, k: int) -> float:
        return (self.upto_s[k] - self.upto_s[i]) / self.problem.nodes[j].speed

    def line_seconds(self, j: int, i: int, k: int) -> LineSeconds:
        up_start, up_end, down_start, down_end = self.line_s[j]
        return LineSeconds(up_start[i] + up_end[k], down_start[i] + down_end[k])

    def starts(self, j: int, k: int) -> range:
        """Starts of stage j if it ends at k, nearest first: every stage before it needs one cut point."""
        return range(k - 1, j - 1, -1) if j else range(0, -1, -1)

    def ends(self, j: int) -> range:
        """Ends of stage j: every later stage needs one cut point, and the last one ends at the end."""
        last = self.cut_points.end - (len(self.problem.nodes) - 1 - j)
        return range(j + 1 if last < self.cut_points.end else last, last + 1)

    def stage_ranges(self, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
        """The stages between cuts, as pairs of indices."""
        return list(pairwise(self.cut_points.bounds.index(c) for c in (0, *cuts, self.cut_points.bounds[-1])))


_MAX_SLOWER = 1.1  # times the least possible seconds of the slowest stage
_ROUNDING = 1e-9  # sums of seconds in another order differ by less: they are equal


def best_cuts(times: StageTimes, in_flight: tuple[int, ...]) -> tuple[int, ...] | None:
    """Cuts with the least bottleneck among those with memory for `in_flight`; None if there are none."""
    fits_by_node = [
        FitChecker(times.needs, node.memory_bytes, depth)
        for node, depth in zip(times.problem.nodes, in_flight, strict=True)
    ]
    bottlenecks = _bottlenecks(times, fits_by_node)
    best = bottlenecks[-1][times.cut_points.end]
    if best == inf:
        return None
    cap = best * (1 + max(times.problem.tolerance, _ROUNDING))
    least_s = times.upto_s[-1] / sum(node.speed for node in times.problem.nodes)
    cuts = _cheapest(times, fits_by_node, bottlenecks, cap, cap)
    slowest_s = max(times.stage_seconds(j, i, k) for j, (i, k) in enumerate(times.stage_ranges(cuts)))
    if slowest_s <= _MAX_SLOWER * least_s:
        return cuts
    compute = _bottlenecks(times, fits_by_node, cap)[-1][times.cut_points.end]
    return _cheapest(times, fits_by_node, bottlenecks, cap, min(cap, _MAX_SLOWER * compute * (1 + _ROUNDING)))


def _bottlenecks(times: StageTimes, fits_by_node: list[FitChecker], cap: float = inf) -> list[list[float]]:
    """B_j(k) for j = 0 (no node) to the number of nodes; with a `cap`, of compute alone, lines and links within it."""
    is_capped = cap < inf
    upto_s, rows = times.upto_s, [[0.0, *[inf] * times.cut_points.end]]
    for j, node in enumerate(times.problem.nodes):
        fit, before, row = fits_by_node[j], rows[-1], [inf] * (times.cut_points.end + 1)
        up_start, up_end, down_start, down_end = times.line_s[j]
        for k in times.ends(j):
            best, link_s = inf, times.link_s[j][k]
            for i in range(k - 1, fit.never[k] - 1, -1):
                seconds = (upto_s[k] - upto_s[i]) / node.speed
                if seconds >= best:
                    break
                wires_s = max(link_s, up_start[i] + up_end[k], down_start[i] + down_end[k])
                slowest = max(before[i], seconds, wires_s)
                if is_capped:
                    slowest = inf if wires_s > cap else max(before[i], seconds)
                if slowest < best and (i >= fit.sure[k] or fit.fits(i, k)):
                    best = slowest
            row[k] = best
        rows.append(row)
    return rows


def _cheapest(
    times: StageTimes, fits_by_node: list[FitChecker], bottlenecks: list[list[float]], cap: float, most_s: float
) -> tuple[int, ...]:
    """Cuts with no line or link over `cap` seconds and no stage over `most_s`: fewest bytes, then best balanced."""
    sizes = [times.problem.chain.cut_bytes(b) for b in times.cut_points.bounds]
    states: dict[int, tuple[int, float]] = {0: (0, 0.0)}
    parents: list[dict[int, int]] = []
    for j, node in enumerate(times.problem.nodes):
        fit, reached, came_from = fits_by_node[j], dict[int, tuple[int, float]](), dict[int, int]()
        up_start, up_end, down_start, down_end = times.line_s[j]
        for k in times.ends(j):
            if bottlenecks[j + 1][k] > cap:
                continue
            for i in range(k - 1, fit.never[k] - 1, -1):
                seconds = (times.upto_s[k] - times.upto_s[i]) / node.speed
                if seconds > most_s:
                    break
                if i not in states or up_start[i] + up_end[k] > cap or down_start[i] + down_end[k] > cap:
                    continue
                cost = states[i][0] + sizes[k], states[i][1] + seconds * seconds
                if (k not in reached or cost < reached[k]) and (i >= fit.sure[k] or fit.fits(i, k)):
                    reached[k], came_from[k] = cost, i
        states = reached
        parents.append(came_from)
    path = [times.cut_points.end]
    for came_from in reversed(parents):
        path.append(came_from[path[-1]])
    return tuple(times.cut_points.bounds[i] for i in reversed(path[1:-1]))


_MAX_PLACES = 128  # a pass is slow, and there are many
_PRECISION = 1e-6  # of the interval, if no tolerance is given


def fill_pipeline(problem: Problem, least_s: float, most_s: float) -> tuple[int, ...] | None:
    """Cuts of the least interval between `least_s` and `most_s`; None if none is below `most_s`."""
    times = StageTimes(problem, min(problem.num_cut_points, max(_MAX_PLACES, 4 * len(problem.nodes))))
    tried = _TripSearch(times)
    precision = max(problem.tolerance / 2, _PRECISION)
    found = None
    while most_s > least_s * (1 + precision) and most_s > 0:
        middle = (least_s + most_s) / 2
        cuts = tried.within(middle)
        if cuts is None:
            least_s = middle
        else:
            found, most_s = cuts, middle
    return found


class _TripSearch:
    """Searches the shortest trips within an interval."""

    def __init__(self, times: StageTimes) -> None:
        self.times = times
        self.num = len(times.problem.nodes)
        self.most = times.problem.max_depth or inf

    def within(self, every_s: float) -> tuple[int, ...] | None:
        """Cuts with which a microbatch is done every `every_s`, or None."""
        trips, followers = {self.times.cut_points.end: 0.0}, list[dict[int, int]]()
        for j in reversed(range(self.num)):
            trips, follower = self._stage(j, trips, every_s)
            followers.append(follower)
        if 0 not in trips:
            return None
        path = [0]
        for follower in reversed(followers):
            path.append(follower[path[-1]])
        return tuple(self.times.cut_points.bounds[i] for i in path[1:-1])

    def _stage(self, j: int, trips: dict[int, float], every_s: float) -> tuple[dict[int, float], dict[int, int]]:
        """V_j from V_{j+1}, and where stage j ends."""
        times, found, follower = self.times, dict[int, float](), dict[int, int]()
        speed, fit, total = times.problem.nodes[j].speed, times.problem.nodes[j].memory_bytes, times.needs.total
        for k, behind_s in trips.items():
            after_s = behind_s + (times.links[j][k].round_trip_s if j < self.num - 1 else 0.0)
            for i in times.starts(j, k):
                seconds = (times.upto_s[k] - times.upto_s[i]) / speed
                trip_s = after_s + seconds
                depth = needed_depth(trip_s, every_s)
                if seconds > every_s or depth > self.most:
                    break
                if trip_s < found.get(i, inf) and self._passes(j, i, k, every_s) and total(i, k, depth) <= fit:
                    found[i], follower[i] = trip_s, k
        return found, follower

    def _passes(self, j: int, i: int, k: int, every_s: float) -> bool:
        link_s = self.times.link_s[j - 1][i] if j else 0.0
        return link_s <= every_s and self.times.line_seconds(j, i, k).interval_s <= every_s


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
    found = try_partition(problem)
    if found is None:
        raise does_not_fit(problem)
    return found


def try_partition(problem: Problem) -> Partition | None:
    """As `partition`; None instead of an error, whose explanation takes many times as long as the attempt."""
    if len(problem.nodes) > len(problem.chain.cuts) + 1:
        return None
    times = StageTimes(problem)
    cuts = best_cuts(times, problem.depths or (1,) * len(problem.nodes))
    if cuts is None:
        return None
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
