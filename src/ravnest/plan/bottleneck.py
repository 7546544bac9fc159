"""Where to cut if it is known how many microbatches are in flight: an exact dynamic programme.

Let t_j(i, k) be the seconds of the stage from place i to place k on node j, or of its line if that takes longer, and
l_j(k) those of the link behind it. The least bottleneck of the first j nodes, with the last of them ending at k, is

    B_j(k) = min over i < k, with memory_j(i, k) <= memory of node j, of  max(B_{j-1}(i), t_j(i, k), l_j(k))

A last pass keeps to stages, lines and links within the best bottleneck, and of those takes the fewest bytes over cuts,
then the least sum of squared stage seconds (the best balance). Both sums split at every cut, so this is exact. Where a
line is the bottleneck, stages may take as long as the line without making it worse; but what stages take is only
estimated, so a pass between the two finds how little the slowest could compute, and none may take a tenth more.
Since compute grows as i falls, a pass looks at a place's predecessors from the nearest on, while that can help.
"""

from __future__ import annotations

from math import inf

from .fit import Room
from .parts import Parts

__all__ = ["best_cuts"]

_SPARE = 1.1  # times the least that the slowest stage could compute


def best_cuts(parts: Parts, in_flight: tuple[int, ...]) -> tuple[int, ...] | None:
    """Cuts with the least bottleneck among those with memory for so many in flight; None if there are none."""
    rooms = [
        Room(parts.needs, node.memory_bytes, depth) for node, depth in zip(parts.problem.nodes, in_flight, strict=True)
    ]
    bottlenecks = _bottlenecks(parts, rooms)
    best = bottlenecks[-1][parts.places.end]
    if best == inf:
        return None
    cap = best * (1 + parts.problem.tolerance)
    least_s = parts.upto_s[-1] / sum(node.speed for node in parts.problem.nodes)
    cuts = _cheapest(parts, rooms, bottlenecks, cap, cap)
    slowest_s = max(parts.stage_seconds(j, i, k) for j, (i, k) in enumerate(parts.stretches(cuts)))
    if slowest_s <= _SPARE * least_s:
        return cuts
    compute = _bottlenecks(parts, rooms, cap)[-1][parts.places.end]
    return _cheapest(parts, rooms, bottlenecks, cap, min(cap, _SPARE * compute))


def _bottlenecks(parts: Parts, rooms: list[Room], cap: float = inf) -> list[list[float]]:
    """B_j(k) for j = 0 (no node) to the number of nodes; with a `cap`, of compute alone, lines and links within it."""
    is_capped = cap < inf
    upto_s, rows = parts.upto_s, [[0.0, *[inf] * parts.places.end]]
    for j, node in enumerate(parts.problem.nodes):
        room, before, row = rooms[j], rows[-1], [inf] * (parts.places.end + 1)
        up_start, up_end, down_start, down_end = parts.line_s[j]
        for k in parts.ends(j):
            best, link_s = inf, parts.link_s[j][k]
            for i in range(k - 1, room.never[k] - 1, -1):
                seconds = (upto_s[k] - upto_s[i]) / node.speed
                if seconds >= best:
                    break
                wires_s = max(link_s, up_start[i] + up_end[k], down_start[i] + down_end[k])
                slowest = max(before[i], seconds, wires_s)
                if is_capped:
                    slowest = inf if wires_s > cap else max(before[i], seconds)
                if slowest < best and (i >= room.sure[k] or room.fits(i, k)):
                    best = slowest
            row[k] = best
        rows.append(row)
    return rows


def _cheapest(
    parts: Parts, rooms: list[Room], bottlenecks: list[list[float]], cap: float, most_s: float
) -> tuple[int, ...]:
    """Cuts with no line or link over `cap` seconds and no stage over `most_s`: fewest bytes, then best balanced."""
    sizes = [parts.problem.chain.cut_bytes(b) for b in parts.places.bounds]
    states: dict[int, tuple[int, float]] = {0: (0, 0.0)}
    parents: list[dict[int, int]] = []
    for j, node in enumerate(parts.problem.nodes):
        room, reached, came_from = rooms[j], dict[int, tuple[int, float]](), dict[int, int]()
        up_start, up_end, down_start, down_end = parts.line_s[j]
        for k in parts.ends(j):
            if bottlenecks[j + 1][k] > cap:
                continue
            for i in range(k - 1, room.never[k] - 1, -1):
                seconds = (parts.upto_s[k] - parts.upto_s[i]) / node.speed
                if seconds > most_s:
                    break
                if i not in states or up_start[i] + up_end[k] > cap or down_start[i] + down_end[k] > cap:
                    continue
                cost = states[i][0] + sizes[k], states[i][1] + seconds * seconds
                if (k not in reached or cost < reached[k]) and (i >= room.sure[k] or room.fits(i, k)):
                    reached[k], came_from[k] = cost, i
        states = reached
        parents.append(came_from)
    path = [parts.places.end]
    for came_from in reversed(parents):
        path.append(came_from[path[-1]])
    return tuple(parts.places.bounds[i] for i in reversed(path[1:-1]))
