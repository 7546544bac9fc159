"""How often a row of machines can finish a microbatch, in microseconds: for a search that asks it very often.

To hold an interval T, go from the leaf to the root and let every stage start as early as it may:

    its seconds <= T,   its memory at ceil(trip / T) in flight <= memory,   its line and the link before it <= T

Seconds and trips grow with a stage, so both limits are found by bisection in sums; memory by a table per machine. The
least T is found by bisection too. If every cut costs the same bytes, a stage that starts earlier leaves less to the
others and hinders none, so with equal speeds this is exact, and else all but: a later cut could be cheaper, and a trip
shorter with more on a fast machine. What is found can always be held. Plans are made by `partition`, which is exact.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from math import ceil, inf
from operator import neg

from .fleet import Machine, Task
from .needs import Needs, needs_of

__all__ = ["GAIN", "Quick", "Row"]

_Table = list[list[int]]
Row = tuple[int, ...]  # machines by their number in the fleet, root first

GAIN = 1.003  # a row that does so much more is better; less may be imprecision, and a search would turn in circles
_LEAST_S = 1e-9  # of a chain that takes no time
_NEVER_MIND_S = 1e30  # at this interval only memory counts
_PRECISION = 0.002  # of an interval
_ROUNDING = 1e-9


# A machine in a row: its speed, memory, upload and download; of the link before it seconds per byte there and back (0
# for the root), latency there and back, and whether it uses the line; and whether the link behind it does.
_Stop = tuple[float, "_Room", float, float, float, float, float, bool, bool]


class Quick:
    """Intervals of rows of a task's machines. Counts in `looked` at how many machines it had to look."""

    def __init__(self, task: Task, max_places: int = 64) -> None:
        self.task = task
        self.machines = task.fleet.machines
        self.places = task.chain.places(max_places)
        self.upto_s = self.places.upto_s(recompute=task.memory.recompute)
        self.work_s = self.upto_s[-1]
        self.looked = 0
        self._forward = [task.chain.forward_bytes[b] for b in self.places.bounds]
        self._backward = [task.chain.backward_bytes[b] for b in self.places.bounds]
        self._tables = _Tables(needs_of(self.places, task.memory))
        kinds: dict[tuple[object, ...], int] = {}
        rooms: dict[float, _Room] = {}
        self.kinds = [kinds.setdefault(_kind(machine), len(kinds)) for machine in self.machines]
        for machine in self.machines:
            rooms.setdefault(machine.memory_bytes, _Room(self._tables, machine.memory_bytes))
        self._own = [(m.speed, rooms[m.memory_bytes], m.up_bytes_per_s, m.down_bytes_per_s) for m in self.machines]
        self._wires: dict[tuple[int, int], tuple[float, float, float, bool]] = {}
        self._known: dict[Row, float] = {}
        self.most_per_s = [self._most_per_s(machine) for machine in self.machines]

    def per_s(self, row: Row) -> float:
        """Microbatches per second; 0 if the model does not fit. Equal machines are equal rows."""
        key = tuple(map(self.kinds.__getitem__, row))
        if key not in self._known:
            self._known[key] = self._search(row)
        return self._known[key]

    def reaches(self, row: Row, per_s: float) -> bool:
        """Whether a row does so many microbatches per second."""
        return self._holds(self._stops(row), 1 / per_s if per_s > 0 else _NEVER_MIND_S)

    def does_more(self, row: Row, per_s: float) -> bool:
        """Whether a row does noticeably more than that: most fail at the first look."""
        return self.reaches(row, per_s * GAIN) and self.per_s(row) > per_s

    def bound_per_s(self, row: Row) -> float:
        """No order of these machines does more."""
        speed = sum(self.machines[m].speed for m in row)
        rate = speed / max(self.work_s, _LEAST_S)
        return min(rate, *(self.most_per_s[m] for m in row)) if len(row) > 1 else rate

    @property
    def smallest_bytes(self) -> int:
        """Memory of the smallest stage there can be."""
        return min(need for row in self._tables.at(1)[0] for need in row)

    @property
    def whole_bytes(self) -> int:
        """Memory of the whole model on one machine with one microbatch in flight."""
        return self._tables.at(1)[0][-1][0]

    def _most_per_s(self, machine: Machine) -> float:
        """What a machine's line allows at either end of a row, at the cheapest cut; on a site it may not need it."""
        if machine.site or self.places.end == 1:
            return inf
        up, down = machine.up_bytes_per_s, machine.down_bytes_per_s
        both = list(zip(self._forward[1:-1], self._backward[1:-1], strict=True))
        slowest = min(min(max(f / up, b / down), max(b / up, f / down)) for f, b in both)
        return 1 / slowest if slowest else inf

    def _search(self, row: Row) -> float:
        if not 0 < len(row) <= self.places.end:
            return 0.0
        stops = self._stops(row)
        least_s = 1 / self.bound_per_s(row)
        if not self._holds(stops, _NEVER_MIND_S):
            return 0.0
        if self._holds(stops, least_s * (1 + _PRECISION)):
            return 1 / (least_s * (1 + _PRECISION))
        most_s = 2 * least_s
        while not self._holds(stops, most_s):
            least_s, most_s = most_s, 2 * most_s
        while most_s > least_s * (1 + _PRECISION):
            middle = (least_s + most_s) / 2
            if self._holds(stops, middle):
                most_s = middle
            else:
                least_s = middle
        return 1 / most_s

    def _stops(self, row: Row) -> list[_Stop]:
        """The row as `_holds` goes through it: from the leaf to the root."""
        machines, wires = self.machines, self._wires
        stops, behind_line, m = [], False, row[-1]
        for before in row[-2::-1]:
            wire = wires.get((before, m))
            if wire is None:
                forward, backward, latency_s, line = self.task.fleet.wire(machines[before], machines[m])
                wire = wires[before, m] = (1 / forward, 1 / backward, 2 * latency_s, line)
            stops.append((*self._own[m], *wire, behind_line))
            behind_line, m = wire[3], before
        stops.append((*self._own[m], 0.0, 0.0, 0.0, False, behind_line))
        return stops

    def _holds(self, stops: list[_Stop], every_s: float) -> bool:
        """Whether a microbatch can be done that often: each stage from the leaf on starts as early as it may."""
        self.looked += len(stops)
        upto_s, forward, backward = self.upto_s, self._forward, self._backward
        most = self.task.max_depth or inf
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


def _kind(machine: Machine) -> tuple[object, ...]:
    """Machines of one kind are the same to a planner."""
    return (
        machine.memory_bytes, machine.speed, machine.up_bytes_per_s, machine.down_bytes_per_s, machine.latency_s,
        machine.region, machine.site,
    )  # fmt: skip


class _Tables:
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


class _Room:
    """What fits into so much memory."""

    def __init__(self, tables: _Tables, memory_bytes: float) -> None:
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
