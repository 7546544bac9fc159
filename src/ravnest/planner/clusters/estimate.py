"""Estimates the rate of a row of machines in microseconds, and finds the best order of a row.

To decide whether an interval T is possible, go from the last stage to the first and let every stage start as early as
it may:

    its seconds <= T,   its memory at ceil(trip / T) in flight <= memory,   its line and the link before it <= T

Seconds and trips grow with a stage, so both limits are found by bisection in prefix sums; memory by a table per
machine. The least T is found by bisection too. If every cut costs the same bytes, a stage that starts earlier leaves
less to the others and hinders none, so with equal speeds this is exact, and otherwise nearly: a later cut could be
cheaper, and a trip shorter with more on a fast machine. The interval it returns is always possible. Plans are made by
`partition`, which is exact.

The order of a row matters because the ends of a row use one link and the others two, because stages near the first keep
more microbatches in flight, and because neighbours may be near or far. A row and its reverse differ. `best_order` tries
all orders of a few machines; more are inserted one by one, and then improved by small changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations
from math import ceil, inf
from operator import neg

from ravnest.planner.fleet import Machine, Task
from ravnest.planner.partition.fit import StageMemoryTable, memory_table

__all__ = [
    "GAIN",
    "RateEstimator",
    "Row",
    "EQUAL",
    "best_order",
    "with_insertion",
    "latency_s",
    "least_latency_order",
    "improved_order",
]

_Table = list[list[int]]
Row = tuple[int, ...]  # machines by their index in the fleet, first stage first

GAIN = 1.003  # the least factor of a better row; less may be imprecision, and a search would cycle
_MIN_S = 1e-9  # so that a chain that takes no time has a finite rate
_MEMORY_ONLY_S = 1e30  # at this interval only memory counts
_PRECISION = 0.002  # of an interval
_ROUNDING = 1e-9


# A machine in a row: its speed, memory, upload and download; of the link before it seconds per byte both ways
# (0 for the first stage), round-trip latency, and whether it uses the line; and whether the link behind it does.
_Member = tuple[float, "_FitTable", float, float, float, float, float, bool, bool]


class RateEstimator:
    """Estimates rates of rows of a task's machines. `num_examined` counts the machines of all rows examined."""

    def __init__(self, task: Task, max_cut_points: int = 64) -> None:
        self.task = task
        self.machines = task.fleet.machines
        self.cut_points = task.chain.cut_points(max_cut_points)
        self.upto_s = self.cut_points.upto_s(recompute=task.memory.recompute)
        self.work_s = self.upto_s[-1]
        self.num_examined = 0
        self._forward = [task.chain.forward_bytes[b] for b in self.cut_points.bounds]
        self._backward = [task.chain.backward_bytes[b] for b in self.cut_points.bounds]
        self._tables = _Tables(memory_table(self.cut_points, task.memory))
        kinds: dict[tuple[object, ...], int] = {}
        rooms: dict[float, _FitTable] = {}
        self.kinds = [kinds.setdefault(_kind(machine), len(kinds)) for machine in self.machines]
        for machine in self.machines:
            rooms.setdefault(machine.memory_bytes, _FitTable(self._tables, machine.memory_bytes))
        self._own = [(m.speed, rooms[m.memory_bytes], m.up_bytes_per_s, m.down_bytes_per_s) for m in self.machines]
        self._wires: dict[tuple[int, int], tuple[float, float, float, bool]] = {}
        self._known: dict[Row, float] = {}
        self.most_per_s = [self._most_per_s(machine) for machine in self.machines]

    def per_s(self, row: Row) -> float:
        """Microbatches per second; 0 if the model does not fit. Cached by kinds of machines."""
        key = tuple(map(self.kinds.__getitem__, row))
        if key not in self._known:
            self._known[key] = self._search(row)
        return self._known[key]

    def reaches(self, row: Row, per_s: float) -> bool:
        """Whether a row does `per_s` microbatches per second."""
        return self._is_possible(self._stops(row), 1 / per_s if per_s > 0 else _MEMORY_ONLY_S)

    def does_more(self, row: Row, per_s: float) -> bool:
        """Whether a row does noticeably more than `per_s`; cheaper than `per_s()` for those that do not."""
        return self.reaches(row, per_s * GAIN) and self.per_s(row) > per_s

    def bound_per_s(self, row: Row) -> float:
        """An upper bound for any order of these machines."""
        speed = sum(self.machines[m].speed for m in row)
        rate = speed / max(self.work_s, _MIN_S)
        return min(rate, *(self.most_per_s[m] for m in row)) if len(row) > 1 else rate

    @property
    def smallest_bytes(self) -> int:
        """Memory of the smallest possible stage."""
        return min(need for row in self._tables.at(1)[0] for need in row)

    @property
    def whole_bytes(self) -> int:
        """Memory of the whole model on one machine with one microbatch in flight."""
        return self._tables.at(1)[0][-1][0]

    def _most_per_s(self, machine: Machine) -> float:
        """The limit of a machine's line at either end of a row, at the cheapest cut; none on a site."""
        if machine.site or self.cut_points.end == 1:
            return inf
        up, down = machine.up_bytes_per_s, machine.down_bytes_per_s
        both = list(zip(self._forward[1:-1], self._backward[1:-1], strict=True))
        slowest = min(min(max(f / up, b / down), max(b / up, f / down)) for f, b in both)
        return 1 / slowest if slowest else inf

    def _search(self, row: Row) -> float:
        if not 0 < len(row) <= self.cut_points.end:
            return 0.0
        members_backward = self._stops(row)
        least_s = 1 / self.bound_per_s(row)
        if not self._is_possible(members_backward, _MEMORY_ONLY_S):
            return 0.0
        if self._is_possible(members_backward, least_s * (1 + _PRECISION)):
            return 1 / (least_s * (1 + _PRECISION))
        most_s = 2 * least_s
        while not self._is_possible(members_backward, most_s):
            least_s, most_s = most_s, 2 * most_s
        while most_s > least_s * (1 + _PRECISION):
            middle = (least_s + most_s) / 2
            if self._is_possible(members_backward, middle):
                most_s = middle
            else:
                least_s = middle
        return 1 / most_s

    def _stops(self, row: Row) -> list[_Member]:
        """The row as `_is_possible` needs it: from the last stage to the first."""
        machines, all_links = self.machines, self._wires
        members_backward, behind_line, m = [], False, row[-1]
        for before in row[-2::-1]:
            link_numbers = all_links.get((before, m))
            if link_numbers is None:
                forward, backward, latency_s, line = self.task.fleet.link_numbers(machines[before], machines[m])
                link_numbers = all_links[before, m] = (1 / forward, 1 / backward, 2 * latency_s, line)
            members_backward.append((*self._own[m], *link_numbers, behind_line))
            behind_line, m = link_numbers[3], before
        members_backward.append((*self._own[m], 0.0, 0.0, 0.0, False, behind_line))
        return members_backward

    def _is_possible(self, members_backward: list[_Member], every_s: float) -> bool:
        """Whether a microbatch can be done every `every_s`: from the last stage on, each starts as early as it may."""
        self.num_examined += len(members_backward)
        upto_s, forward, backward = self.upto_s, self._forward, self._backward
        most = self.task.max_depth or inf
        k, after_s, left = len(upto_s) - 1, 0.0, len(members_backward) - 1
        for (
            speed,
            room,
            up,
            down,
            before_forward,
            before_backward,
            before_latency_s,
            before_line,
            behind_line,
        ) in members_backward:
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
        raise AssertionError("an empty row")


def _kind(machine: Machine) -> tuple[object, ...]:
    """Machines of one kind are equal to the planner."""
    return (
        machine.memory_bytes, machine.speed, machine.up_bytes_per_s, machine.down_bytes_per_s, machine.latency_s,
        machine.region, machine.site,
    )  # fmt: skip


class _Tables:
    """Memory of every range by depth, computed on demand."""

    def __init__(self, needs: StageMemoryTable) -> None:
        self._needs = needs
        self._known: dict[int, tuple[_Table, bool]] = {}

    def at(self, depth: int) -> tuple[_Table, bool]:
        """[k][i]: bytes of the stage from i to k with `depth` in flight; and whether these only fall with i."""
        if depth not in self._known:
            total, ends = self._needs.total, range(self._needs.cut_points.end + 1)
            table = [[total(i, k, depth) for i in range(k)] for k in ends]
            self._known[depth] = table, all(a >= b for row in table for a, b in pairwise(row))
        return self._known[depth]


class _FitTable:
    """The ranges that fit into `memory_bytes`."""

    def __init__(self, tables: _Tables, memory_bytes: float) -> None:
        self.memory_bytes = memory_bytes
        self._tables = tables
        self._known: dict[int, tuple[list[int], _Table | None]] = {}

    def at(self, depth: int) -> tuple[list[int], _Table | None]:
        """For each end the first start that fits (or the end); and the table, unless all later ones fit."""
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


# The order of a row.

_ALL_ORDERS = 4  # the most machines of which all orders are tried
_LONG = 8
EQUAL = 0.998  # rows within this factor count as equal; latency decides


def best_order(estimator: RateEstimator, members: Sequence[int], *, all_orders: int = _ALL_ORDERS) -> Row:
    """The order of `members` with the most microbatches per second, or close to it."""
    if len(members) <= all_orders:
        return _first_best(estimator, permutations(sorted(members)))
    largest_first = sorted(members, key=lambda m: (-estimator.machines[m].memory_bytes, -estimator.most_per_s[m], m))
    row = tuple(largest_first)
    grown: Row = ()
    for m in sorted(members, key=lambda m: (estimator.most_per_s[m], m)):  # slow lines first: they end up at the ends
        grown = max(_insertions(grown, m), key=estimator.per_s) if grown else (m,)
    return improved_order(estimator, max(row, grown, key=estimator.per_s))


def with_insertion(estimator: RateEstimator, row: Row, m: int, above_per_s: float) -> tuple[Row, float] | None:
    """`row` with m inserted at the best place, and its rate, if that is above `above_per_s`."""
    bound = estimator.bound_per_s((*row, m))
    found = None
    for longer in _insertions(row, m):
        if bound <= above_per_s * GAIN:
            break
        if estimator.does_more(longer, above_per_s):
            found, above_per_s = longer, estimator.per_s(longer)
    return None if found is None else (found, above_per_s)


def improved_order(estimator: RateEstimator, row: Row) -> Row:
    """`row` after every swap, move and reversal that helps."""
    best = estimator.per_s(row)
    better = True
    while better and best * GAIN < estimator.bound_per_s(row):
        better = False
        for other in _changes(row):
            if estimator.does_more(other, best):
                row, best, better = other, estimator.per_s(other), True
                break
    return row


def least_latency_order(estimator: RateEstimator, row: Row) -> Row:
    """Of the orders that do as much as `row`, the one with the least latency between neighbours."""
    wanted = estimator.per_s(row) * EQUAL
    orders = permutations(row) if len(row) <= _ALL_ORDERS else _changes(row)
    near, least_s = row, latency_s(estimator, row)
    for other in orders:
        seconds = latency_s(estimator, other)
        if seconds < least_s and estimator.reaches(other, wanted):
            near, least_s = other, seconds
    return near


def latency_s(estimator: RateEstimator, row: Row) -> float:
    machines, link_numbers = estimator.machines, estimator.task.fleet.link_numbers
    return sum(link_numbers(machines[a], machines[b])[2] for a, b in pairwise(row))


def _first_best(estimator: RateEstimator, orders: Iterator[Row]) -> Row:
    best = next(orders)
    most, bound = estimator.per_s(best), estimator.bound_per_s(best)
    for row in orders:
        if most * GAIN >= bound:
            break
        if estimator.does_more(row, most):
            best, most = row, estimator.per_s(row)
    return best


def _insertions(row: Row, m: int) -> Iterator[Row]:
    for place in range(len(row) + 1):
        yield (*row[:place], m, *row[place:])


def _changes(row: Row) -> Iterator[Row]:
    """Two swapped, one moved, a range reversed; in a long row only near each other, or at the ends."""
    last = len(row) - 1
    for i, k in combinations(range(len(row)), 2):
        if len(row) > _LONG and k - i > 2 and i > 0 and k < last:
            continue
        yield (*row[:i], row[k], *row[i + 1 : k], row[i], *row[k + 1 :])  # swapped
        if k - i > 1:
            yield (*row[:i], *row[i + 1 : k + 1], row[i], *row[k + 1 :])  # i moved behind k
            yield (*row[:i], row[k], *row[i:k], *row[k + 1 :])  # k moved before i
        if k - i > 2:
            yield (*row[:i], *reversed(row[i : k + 1]), *row[k + 1 :])
