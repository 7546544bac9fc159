"""Whether a row of machines can do a microbatch every T seconds: going from the leaf to the root.

    of each stage  its seconds <= T,   its memory at ceil(trip / T) in flight <= memory
    and            its line <= T,   the link before it <= T

`greedy` lets every stage start as early as it may. Seconds and trips grow with a stage, so both limits are found by
bisection in sums, and memory in a table. If every cut costs the same bytes and all speeds are equal this is exact: a
stage that starts earlier leaves less to the others and hinders none. Else it is all but exact if places are many: a
later cut could be cheaper, and a trip shorter with more on a fast machine. `all_places` follows every start, with the
shortest trip to it, and is exact; for a program with few places, where one of them makes a difference.

Either way, what is found can be held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf
from operator import neg

from .needs import Needs

__all__ = ["Hold", "Room", "Stop", "Tables"]

# A machine in a row: its speed, memory, upload and download; of the link before it seconds per byte there and back (0
# for the root), latency there and back, and whether it uses the line; and whether the link behind it does.
Stop = tuple[float, "Room", float, float, float, float, float, bool, bool]
_Table = list[list[int]]
_ROUNDING = 1e-9


class Hold:
    """A chain's sums and bytes at its places. Rows come as stops, the leaf first."""

    def __init__(
        self, upto_s: list[float], forward_bytes: Sequence[int], backward_bytes: Sequence[int], max_depth: int | None
    ) -> None:
        self.upto_s, self.forward, self.backward = upto_s, forward_bytes, backward_bytes
        self.most = max_depth or inf

    def greedy(self, stops: list[Stop], every_s: float) -> bool:
        """Each stage from the leaf on starts as early as it may."""
        upto_s, forward, backward, most = self.upto_s, self.forward, self.backward, self.most
        k, after_s, left = len(upto_s) - 1, 0.0, len(stops) - 1
        for speed, room, up, down, before_forward, before_backward, before_latency_s, before_line, behind_line in stops:
            i = bisect_left(upto_s, upto_s[k] - every_s * speed * (1 + _ROUNDING))
            if i < left:
                i = left
            if i >= k:
                return False
            depth = ceil((after_s + (upto_s[k] - upto_s[i]) / speed) / every_s - _ROUNDING) or 1
            if depth > most:
                depth = int(most)
                i = bisect_left(upto_s, upto_s[k] - (depth * every_s - after_s) * speed * (1 + _ROUNDING))
            starts, needs = room.at(depth)
            lowest = starts[k]
            if lowest > i:
                if depth > 1:  # one less in flight: less memory, but a shorter trip to fill
                    by_trip = bisect_left(upto_s, upto_s[k] - ((depth - 1) * every_s - after_s) * speed)
                    fewer_starts, fewer_needs = room.at(depth - 1)
                    other = max(i, by_trip, fewer_starts[k])
                    if other < lowest:
                        lowest, needs = other, fewer_needs
                i = lowest
            if not left:
                return i <= 0
            up_bytes, down_bytes = every_s * up, every_s * down
            if behind_line:
                up_bytes -= forward[k]
                down_bytes -= backward[k]
            while i < k and (
                forward[i] * before_forward > every_s
                or backward[i] * before_backward > every_s
                or (before_line and (backward[i] > up_bytes or forward[i] > down_bytes))
                or (needs is not None and needs[k][i] > room.memory_bytes)
            ):
                i += 1
            if i >= k:
                return False
            after_s += (upto_s[k] - upto_s[i]) / speed
            after_s += forward[i] * before_forward + backward[i] * before_backward + before_latency_s
            k, left = i, left - 1
        raise AssertionError("a row has a root")

    def all_places(self, stops: list[Stop], every_s: float) -> bool:
        """Each stage starts wherever it may; of all ways to a place the shortest trip counts."""
        trips = {len(self.upto_s) - 1: 0.0}
        for left, stop in zip(range(len(stops) - 1, -1, -1), stops, strict=True):
            trips = self._starts(stop, left, trips, every_s)
        return 0 in trips

    def _starts(self, stop: Stop, left: int, trips: dict[int, float], every_s: float) -> dict[int, float]:
        """Where a stage may start, and the trip from there on, with the link before it."""
        speed, room, up, down, before_forward, before_backward, before_latency_s, before_line, behind_line = stop
        upto_s, forward, backward, found = self.upto_s, self.forward, self.backward, dict[int, float]()
        for k, after_s in trips.items():
            up_bytes = every_s * up - (forward[k] if behind_line else 0)
            down_bytes = every_s * down - (backward[k] if behind_line else 0)
            for i in range(k - 1, left - 1, -1) if left else (0,):
                seconds = (upto_s[k] - upto_s[i]) / speed
                depth = ceil((after_s + seconds) / every_s - _ROUNDING) or 1
                if seconds > every_s * (1 + _ROUNDING) or depth > self.most:
                    break
                there_s, back_s = forward[i] * before_forward, backward[i] * before_backward
                if there_s > every_s or back_s > every_s:
                    continue
                if before_line and (backward[i] > up_bytes or forward[i] > down_bytes):
                    continue
                trip_s = after_s + seconds + there_s + back_s + before_latency_s
                if trip_s < found.get(i, inf) and room.fits(i, k, depth):
                    found[i] = trip_s
        return found


class Tables:
    """Memory of every stretch, by depth: made when first asked for."""

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._known: dict[int, tuple[_Table, bool]] = {}

    def at(self, depth: int) -> tuple[_Table, bool]:
        """[k][i]: bytes of the stage from i to k with so many in flight; and whether these only fall with i."""
        if depth not in self._known:
            total, ends = self._needs.total, range(self._needs.places.end + 1)
            table = [[total(i, k, depth) for i in range(k)] for k in ends]
            self._known[depth] = table, all(a >= b for row in table for a, b in pairwise(row))
        return self._known[depth]


class Room:
    """What fits into so much memory."""

    def __init__(self, tables: Tables, memory_bytes: float) -> None:
        self.memory_bytes = memory_bytes
        self._tables = tables
        self._known: dict[int, tuple[list[int], _Table | None]] = {}

    def at(self, depth: int) -> tuple[list[int], _Table | None]:
        """For each end the first start that fits (or the end); and what others need, unless all later ones fit."""
        known = self._known.get(depth)
        if known is None:
            table, falling = self._tables.at(depth)
            room = self.memory_bytes
            if falling:
                starts = [bisect_left(row, -room, key=neg) for row in table]
            else:
                starts = [next((i for i, need in enumerate(row) if need <= room), len(row)) for row in table]
            known = self._known[depth] = starts, None if falling else table
        return known

    def fits(self, i: int, k: int, depth: int) -> bool:
        return self._tables.at(depth)[0][k][i] <= self.memory_bytes
