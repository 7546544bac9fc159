"""Where to cut if memory or a cap on depth leaves too few microbatches in flight: cuts and depths together.

A microbatch can be done every T seconds if every stage, line and link takes at most T, and every stage has as many in
flight as fill its trip: depth_j = ceil(trip_j / T), within memory and `max_depth`. A trip is a sum over later stages,
and a shorter one needs no more memory, here or before. So of all ways to go from place i to the end only the shortest
trip counts, and one pass from the leaf to the root decides whether T can be held:

    V_j(i) = min over k of  t_j(i, k) + there and back over link j at k + V_{j+1}(k)     of those allowed at T

The least T is found by bisection.
"""

from __future__ import annotations

from math import inf

from .depth import needed_depth
from .parts import Parts
from .problem import Problem

__all__ = ["fill"]

_MAX_PLACES = 128  # a pass is slow, and many are made
_PRECISION = 1e-6  # of the interval, if no tolerance is given


def fill(problem: Problem, least_s: float, most_s: float) -> tuple[int, ...] | None:
    """Cuts of the least interval between `least_s` and `most_s`; None if none is below `most_s`."""
    parts = Parts(problem, min(problem.num_places, max(_MAX_PLACES, 4 * len(problem.nodes))))
    tried = _Trips(parts)
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


class _Trips:
    """The shortest trips that hold an interval."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.num = len(parts.problem.nodes)
        self.most = parts.problem.max_depth or inf

    def within(self, every_s: float) -> tuple[int, ...] | None:
        """Cuts that let a microbatch pass that often, or None."""
        trips, followers = {self.parts.places.end: 0.0}, list[dict[int, int]]()
        for j in reversed(range(self.num)):
            trips, follower = self._stage(j, trips, every_s)
            followers.append(follower)
        if 0 not in trips:
            return None
        path = [0]
        for follower in reversed(followers):
            path.append(follower[path[-1]])
        return tuple(self.parts.places.bounds[i] for i in path[1:-1])

    def _stage(self, j: int, trips: dict[int, float], every_s: float) -> tuple[dict[int, float], dict[int, int]]:
        """V_j from V_{j+1}, and where stage j ends."""
        parts, found, follower = self.parts, dict[int, float](), dict[int, int]()
        speed, room, total = parts.problem.nodes[j].speed, parts.problem.nodes[j].memory_bytes, parts.needs.total
        for k, behind_s in trips.items():
            after_s = behind_s + (parts.links[j][k].round_trip_s if j < self.num - 1 else 0.0)
            for i in parts.starts(j, k):
                seconds = (parts.upto_s[k] - parts.upto_s[i]) / speed
                trip_s = after_s + seconds
                depth = needed_depth(trip_s, every_s)
                if seconds > every_s or depth > self.most:
                    break
                if trip_s < found.get(i, inf) and self._passes(j, i, k, every_s) and total(i, k, depth) <= room:
                    found[i], follower[i] = trip_s, k
        return found, follower

    def _passes(self, j: int, i: int, k: int, every_s: float) -> bool:
        link_s = self.parts.link_s[j - 1][i] if j else 0.0
        return link_s <= every_s and self.parts.line_seconds(j, i, k).interval_s <= every_s
