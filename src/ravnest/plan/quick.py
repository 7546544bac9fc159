"""How often a row of machines can finish a microbatch, in microseconds: for a search that asks it very often.

The least interval that a row can hold (`hold`) is found by bisection. Equal machines are equal rows, asked once. Plans
are made by `partition`, which is exact.
"""

from __future__ import annotations

from math import inf

from .fleet import Machine, Task
from .hold import Hold, Room, Stop, Tables
from .needs import needs_of

__all__ = ["GAIN", "Quick", "Row"]

Row = tuple[int, ...]  # machines by their number in the fleet, root first

GAIN = 1.003  # a row that does so much more is better; less may be imprecision, and a search would turn in circles
_LEAST_S = 1e-9  # of a chain that takes no time
_NEVER_MIND_S = 1e30  # at this interval only memory counts
_PRECISION = 0.002  # of an interval
_FEW_PLACES = 16  # of which all are looked at


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
        self._hold = Hold(self.upto_s, self._forward, self._backward, task.max_depth)
        self._tables = Tables(needs_of(self.places, task.memory))
        kinds: dict[tuple[object, ...], int] = {}
        rooms: dict[float, Room] = {}
        self.kinds = [kinds.setdefault(_kind(machine), len(kinds)) for machine in self.machines]
        for machine in self.machines:
            rooms.setdefault(machine.memory_bytes, Room(self._tables, machine.memory_bytes))
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

    def _stops(self, row: Row) -> list[Stop]:
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

    def _holds(self, stops: list[Stop], every_s: float) -> bool:
        if self.places.end <= _FEW_PLACES:
            self.looked += self.places.end * len(stops) // 2
            return self._hold.all_places(stops, every_s)
        self.looked += len(stops)
        return self._hold.greedy(stops, every_s)


def _kind(machine: Machine) -> tuple[object, ...]:
    """Machines of one kind are the same to a planner."""
    return (
        machine.memory_bytes, machine.speed, machine.up_bytes_per_s, machine.down_bytes_per_s, machine.latency_s,
        machine.region, machine.site,
    )  # fmt: skip
