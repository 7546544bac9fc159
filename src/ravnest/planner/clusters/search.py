"""Forms the clusters of a fleet that together do the most samples per second.

    maximise  sum over clusters of  microbatch / interval_s     each within memory and the limit on depth

All groupings of a few machines are compared; with more, an initial grouping is improved by local search. The search
uses `RateEstimator`, which is fast; its clusters are then cut by `partition`, which is exact. Machines of different
rows change places where that lowers latency and costs nothing, so that fewer microbatches are in flight.

**Initial grouping.** Machines are added to a row one after another, and the row is closed as soon as the model fits
well. Machines that follow one another end up together, so their order decides which property a row shares: lines,
regions or speeds. The best property is not known beforehand, so all are tried.

**Spares.** Without machine m its row does R(row - m), or nothing if the model no longer fits or too few machines are
left; then the others of the row are free as well. The machine with the least loss is held back first, and so on, until
there are enough spares.

**Idle machines.** A machine that helps no cluster is a spare if it could hold some member's stage, and otherwise left
out: for too little memory, for a line that would slow the others, or because it gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, permutations
from math import ceil
from random import Random
from statistics import median
from typing import NamedTuple

from ravnest.core.config import require
from ravnest.core.units import format_bytes
from ravnest.planner.clusters.estimate import (
    EQUAL,
    GAIN,
    RateEstimator,
    Row,
    best_order,
    latency_s,
    least_latency_order,
    with_insertion,
)
from ravnest.planner.clusters.local_search import Grouping, best_grouping, best_regrouping, improve
from ravnest.planner.fleet import ClusterPlan, FleetPlan, IdleMachine, Task
from ravnest.planner.partition.fit import fleet_does_not_fit
from ravnest.planner.partition.solver import Partition, partition, try_partition
from ravnest.planner.problem import DoesNotFit, Problem
from ravnest.planner.reasons import explain_clusters, explain_idle_machine, explain_row, format_rate

__all__ = ["search_groupings", "form_clusters"]


# Spares and idle machines.


class _Loss(NamedTuple):
    """The loss of all rows together without a machine, and the rest of its row."""

    per_s: float
    m: int
    number: int
    rest: Row


def hold_back(grouping: Grouping, num_spares: int, min_stages: int, needed_bytes: float) -> dict[int, float]:
    """Take spares of at least `needed_bytes` out of `grouping`; returns the cost of each one's absence.

    There are fewer than `num_spares` if otherwise no row would remain.
    """
    held: dict[int, float] = {}
    while len(held) < num_spares:
        free = [
            m for m in grouping.idle if m not in held and grouping.estimator.machines[m].memory_bytes >= needed_bytes
        ]
        if free:
            held[free[0]] = 0.0
            continue
        loss = _least(grouping, min_stages, needed_bytes)
        if loss is None:
            break
        grouping.replace([loss.number], [loss.rest] if loss.rest else [])
        held[loss.m] = loss.per_s
    for m in list(held):
        _exchange(grouping, held, m, needed_bytes)
    grouping.withdraw(held)
    return held


def _exchange(grouping: Grouping, held: dict[int, float], m: int, needed_bytes: float) -> None:
    """Exchange m for a member, and that one for another, as long as some row does more."""
    estimator = grouping.estimator
    while (found := _better_with(grouping, m, needed_bytes)) is not None:
        number, n, row = found
        cost = held.pop(m) - estimator.per_s(row) + grouping.rates[number]
        grouping.replace([number], [row])
        held[n] = max(0.0, cost)
        m = n


def _better_with(grouping: Grouping, m: int, needed_bytes: float) -> tuple[int, int, Row] | None:
    """A row that does more with m in place of a member that could be a spare; and that member."""
    estimator = grouping.estimator
    for number, row in enumerate(grouping.rows):
        for place, n in enumerate(row):
            if estimator.machines[n].memory_bytes < needed_bytes or estimator.kinds[m] == estimator.kinds[n]:
                continue
            other = (*row[:place], m, *row[place + 1 :])
            if estimator.does_more(other, grouping.rates[number]):
                return number, n, other
    return None


def _least(grouping: Grouping, min_stages: int, needed_bytes: float) -> _Loss | None:
    found = (
        _loss(grouping.estimator, row, m, number, min_stages, grouping.rates[number])
        for number, row in enumerate(grouping.rows)
        for m in row
        if grouping.estimator.machines[m].memory_bytes >= needed_bytes
    )
    return min((loss for loss in found if loss.rest or len(grouping.rows) > 1), default=None)


def _loss(estimator: RateEstimator, row: Row, m: int, number: int, min_stages: int, per_s: float) -> _Loss:
    rest = tuple(n for n in row if n != m)
    remaining = estimator.per_s(rest) if len(rest) >= min_stages else 0.0
    return _Loss(per_s - remaining, m, number, rest if remaining else ())


_MAX_IDLE_TRIES = 8  # clusters that a machine is tried in, for the explanation alone


def explain_idle(
    grouping: Grouping, clusters: Sequence[ClusterPlan], held: dict[int, float]
) -> tuple[tuple[IdleMachine, ...], tuple[IdleMachine, ...]]:
    """Spares and machines left out; a spare has the memory for some member's stage. `held` are held back."""
    estimator, spares, left_out = grouping.estimator, list[IdleMachine](), list[IdleMachine]()
    stages = sorted(memory.total for cluster in clusters for memory in cluster.partition.memory)
    rows = sorted(zip(grouping.rates, grouping.rows, strict=True))
    known: dict[int, str] = {}  # by kind: equal machines have equal reasons
    for m, machine in enumerate(estimator.machines):
        if grouping.row_of.get(m, -1) >= 0:
            continue
        num_fitting = sum(size <= machine.memory_bytes for size in stages)
        if m in held and num_fitting:
            why = "held back as a spare: " + _cost(held[m] * estimator.task.microbatch)
        else:
            if estimator.kinds[m] not in known:
                known[estimator.kinds[m]] = _why(estimator, m, rows)
            why = known[estimator.kinds[m]]
        if num_fitting:
            spares.append(
                IdleMachine(machine.name, f"{why}; it has the memory for {num_fitting} of {len(stages)} stages")
            )
        else:
            left_out.append(IdleMachine(machine.name, why))
    return tuple(spares), tuple(left_out)


def _cost(samples_per_s: float) -> str:
    return f"without it the clusters do {format_rate(samples_per_s)} less" if samples_per_s > 0 else "it is not needed"


def _why(estimator: RateEstimator, m: int, rows: list[tuple[float, Row]]) -> str:
    machine, smallest = estimator.machines[m], estimator.smallest_bytes
    if machine.memory_bytes < smallest:
        return (
            f"too little memory: the smallest stage takes {format_bytes(smallest)}, "
            f"it offers {format_bytes(machine.memory_bytes)}"
        )
    before, row, after = max(
        ((rate, row, _with(estimator, row, m)) for rate, row in _likely(estimator, rows, m)), key=lambda t: t[2] - t[0]
    )
    return _compare(estimator, m, before, after, row)


def _likely(estimator: RateEstimator, rows: list[tuple[float, Row]], m: int) -> list[tuple[float, Row]]:
    """The slowest rows, to which a slow machine costs least, and those of its region."""
    machine = estimator.machines[m]
    near = [r for r in rows if any(estimator.machines[n].region == machine.region for n in r[1])]
    return [*rows[: _MAX_IDLE_TRIES // 2], *near[: _MAX_IDLE_TRIES // 2]]


def _with(estimator: RateEstimator, row: Row, m: int) -> float:
    return max(estimator.per_s((*row[:place], m, *row[place:])) for place in range(len(row) + 1))


def _compare(estimator: RateEstimator, m: int, before: float, after: float, row: Row) -> str:
    samples = estimator.task.microbatch
    return explain_idle_machine(
        estimator.machines[m],
        estimator.machines[row[0]].name,
        before * samples,
        after * samples,
        is_limited_by_line=estimator.most_per_s[m] < before,
    )


# The initial grouping.

_GOOD_FRACTION = 0.8  # of the bound of its machines; below that a row takes more of them
_SHORT, _SEVERAL = 8, 3  # rows of up to 8 machines are never too long; longer ones up to 3 times the length needed
_MAX_EXTRA = 2  # machines beyond those that a row needs
_MAX_ORDERED = 3  # machines of a row whose order is optimized here; the search orders longer ones
_MAX_TRIES = 6  # rows that an unused machine is tried in


def initial_grouping(estimator: RateEstimator, usable: Sequence[int], min_stages: int) -> Grouping:
    """The best of several groupings; of equals the first, which keeps regions together."""
    best = None
    for key in _keys(estimator):
        for well in (_GOOD_FRACTION, 0.0):
            rows = _rows(estimator, sorted(usable, key=key), min_stages, well)
            grouping = Grouping(estimator, usable, rows)
            if best is None or grouping.per_s > best.per_s * 1.005:
                best = grouping
    assert best is not None
    _add_unused(best)
    return best


def _keys(estimator: RateEstimator) -> Iterator[Callable[[int], tuple[object, ...]]]:
    machines, most = estimator.machines, estimator.most_per_s

    def line(m: int) -> float:
        return min(machines[m].up_bytes_per_s, machines[m].down_bytes_per_s)

    yield lambda m: (machines[m].site, machines[m].region, -line(m), m)
    yield lambda m: (-most[m], -line(m), -machines[m].memory_bytes, m)
    yield lambda m: (-line(m), machines[m].speed, m)
    yield lambda m: (-min(machines[m].speed / (estimator.work_s or 1.0), most[m]), m)


def _rows(estimator: RateEstimator, machines: Sequence[int], min_stages: int, well: float) -> Iterator[Row]:
    """Rows of neighbours, each closed when it reaches `well` of its bound, or has a few machines more than it needs."""
    row: Row = ()
    fitting, longest = 0, _longest(estimator, min_stages)
    for m in machines:
        row = tuple(sorted((*row, m), key=lambda m: -estimator.machines[m].memory_bytes))[:longest]
        if len(row) < min_stages or not estimator.reaches(row, 0.0):
            continue
        fitting += 1
        if fitting > _MAX_EXTRA or len(row) == longest or estimator.reaches(row, well * estimator.bound_per_s(row)):
            yield _ordered(estimator, row)
            row, fitting = (), 0
    if fitting:
        yield _ordered(estimator, row)


def _longest(estimator: RateEstimator, min_stages: int) -> int:
    """The longest row: several times the length with machines of median memory; the smallest machines drop out."""
    typical = median(machine.memory_bytes for machine in estimator.machines)
    return min(estimator.cut_points.end, max(_SHORT, min_stages, ceil(_SEVERAL * estimator.whole_bytes / typical)))


def _ordered(estimator: RateEstimator, row: Row) -> Row:
    return best_order(estimator, row) if len(row) <= _MAX_ORDERED else row


def _add_unused(grouping: Grouping) -> None:
    """Add each unused machine to the first row that gains, of those with the most to gain."""
    estimator = grouping.estimator
    for m in grouping.idle:
        by_potential = sorted(
            range(len(grouping.rows)), key=lambda g: grouping.rates[g] - estimator.bound_per_s((*grouping.rows[g], m))
        )
        for g in by_potential[:_MAX_TRIES]:
            longer = with_insertion(estimator, grouping.rows[g], m, grouping.rates[g])
            if longer:
                grouping.replace([g], [longer[0]])
                break


_TRIES = 30  # per machine


def reduce_latency(grouping: Grouping, rng: Random) -> None:
    """Exchange machines of different rows where that lowers latency and no rate."""
    estimator = grouping.estimator
    members = [m for row in grouping.rows for m in row]
    if len({estimator.machines[m].region for m in members}) < 2:
        return
    for _ in range(_TRIES * len(members)):
        m, n = rng.choice(members), rng.choice(members)
        a, b = grouping.row_of[m], grouping.row_of[n]
        if a == b or estimator.machines[m].region == estimator.machines[n].region:
            continue
        swap = {m: n, n: m}
        rows = [grouping.rows[a], grouping.rows[b]]
        changed = [tuple(swap.get(o, o) for o in row) for row in rows]
        if sum(latency_s(estimator, row) for row in changed) >= sum(latency_s(estimator, row) for row in rows):
            continue
        rates = (grouping.rates[a], grouping.rates[b])
        if all(estimator.reaches(row, rate * EQUAL) for row, rate in zip(changed, rates, strict=True)):
            grouping.replace([a, b], changed)


# The search.

_ALL_GROUPINGS = 6  # the most machines of which all groupings are compared
_MAX_ROW = 64  # machines of the row that is tried if no other fits


def search_groupings(
    estimator: RateEstimator, rng: Random, *, min_stages: int, budget: int, all_groupings: int = _ALL_GROUPINGS
) -> Grouping:
    """The best rows of at least `min_stages` machines within a budget; no rows if nothing fits."""
    usable = range(len(estimator.machines))
    if len(usable) <= all_groupings:
        return Grouping(estimator, usable, best_regrouping(estimator, usable, min_stages, all_orders=all_groupings))
    grouping = initial_grouping(estimator, usable, min_stages)
    if not grouping.rows:
        grouping.replace([], _any_row(estimator, usable, min_stages))
    improve(grouping, rng, min_stages, budget)
    return grouping


def _any_row(estimator: RateEstimator, usable: Sequence[int], min_stages: int) -> list[Row]:
    """The shortest row of the largest machines on which the model fits, if there is one."""
    largest = sorted(usable, key=lambda m: (-estimator.machines[m].memory_bytes, m))
    longest = min(len(largest), estimator.cut_points.end, _MAX_ROW)
    rows = (best_order(estimator, largest[:count]) for count in range(min_stages, longest + 1))
    return list(islice((row for row in rows if estimator.per_s(row)), 1))


_CUT_POINTS = (64, 512)  # coarse at first; finer if nothing fits
_FINAL_CUT_POINTS = 96  # at least, for the exact partition of a cluster
_CHECKED, _FEW = 16, 3  # machines of a fleet whose clusters are checked, and of a cluster of which all orders are
_MARGINS = (1.0, 1.3, 2.0, 4.0)  # of a spare's memory over the smallest stage
_REGROUPED = 6  # machines of which all groupings are compared
_FEW_CUTS, _ORDERS = 12, 2  # with more than 12 cuts, only the best 2 orders of a set are cut exactly
_TOLERANCE = 0.005
_MOST_BUDGET, _BUDGET_PER_KIND, _BUDGET_PER_MACHINE = 1_500_000, 8000, 200  # tries, and machines examined
_MOST_MISSING = 64  # machines that an error compares


def form_clusters(task: Task, *, seed: int = 0, effort: float = 1.0) -> FleetPlan:
    """The best clusters, the spares and the machines left out, each with its reason. Raises `DoesNotFit`.

    `effort` scales the search; the same seed gives the same plan.
    """
    require(effort > 0, f"effort must be > 0, got {effort}")
    for cut_points in _CUT_POINTS:
        estimator = RateEstimator(task, cut_points)
        for min_stages in _allowed_stages(task):
            search = _ClusterFormer(estimator, min_stages, Random(seed), effort)
            if search.grouping.rows:
                return search.plan()
    raise _no_cluster(task)


def _allowed_stages(task: Task) -> list[int]:
    """The least number of members, and smaller ones in case no such cluster is possible."""
    possible = min(task.min_stages, len(task.fleet.machines), len(task.chain.cuts) + 1)
    return list(range(possible, 0, -1))


class _ClusterFormer:
    """One search, and the plan made of its result."""

    def __init__(self, estimator: RateEstimator, min_stages: int, rng: Random, effort: float) -> None:
        self.estimator, self.task, self.min_stages, self.rng = estimator, estimator.task, min_stages, rng
        count = len(estimator.machines)
        self.max_cut_points = max(_FINAL_CUT_POINTS, estimator.cut_points.end)  # includes the cuts of the search
        most = _BUDGET_PER_KIND * len(set(estimator.kinds)) + _BUDGET_PER_MACHINE * count
        self.budget = int(effort * min(_MOST_BUDGET, most))
        self._partitions: dict[Row, Partition | None] = {}
        self.grouping = search_groupings(estimator, rng, min_stages=min_stages, budget=self.budget)

    def plan(self) -> FleetPlan:
        held = self._hold_back() if self.task.num_spares else {}
        reduce_latency(self.grouping, self.rng)
        rows = [least_latency_order(self.estimator, row) for row in self.grouping.rows]
        if len(self.estimator.machines) <= _CHECKED:
            rows = self._checked(rows)
            self.grouping.replace(range(len(self.grouping.rows)), rows)
        clusters = [self._cluster(row) for row in rows]
        clusters.sort(key=lambda cluster: (-cluster.samples_per_s, cluster.members))
        spares, left_out = explain_idle(self.grouping, clusters, held)
        total = sum(cluster.samples_per_s for cluster in clusters)
        reason = explain_clusters(
            self.task,
            clusters,
            len(spares),
            len(left_out),
            work_s=self.estimator.work_s,
            min_stages=self.min_stages,
        )
        return FleetPlan(tuple(clusters), spares, left_out, total, reason)

    def _checked(self, rows: list[Row]) -> list[Row]:
        """The best order of each row by exact rates, or another grouping that does more; for small fleets."""
        best = [self._exactly_best(row) for row in rows]
        if self.task.num_spares:
            return best
        all_usable = tuple(sorted(self.grouping.usable, key=lambda m: (-self.estimator.machines[m].memory_bytes, m)))
        others = [all_usable] if len(all_usable) > _REGROUPED else self._regrouped()
        return others if sum(map(self._per_s, others)) > GAIN * sum(map(self._per_s, best)) else best

    def _regrouped(self) -> list[Row]:
        """The best grouping of a few machines by exact rates of the best order of every set."""
        usable = sorted(self.grouping.usable)
        sizes = range(self.min_stages, min(len(usable), len(self.task.chain.cuts) + 1) + 1)
        chosen = (subset for size in sizes for subset in combinations(range(len(usable)), size))
        orders = {sum(1 << p for p in subset): self._best_of_few([usable[p] for p in subset]) for subset in chosen}
        return best_grouping(orders, self._per_s, len(usable))

    def _best_of_few(self, members: Sequence[int]) -> Row:
        """The best by exact rate of the orders with the best estimates; of all, if there are few cuts."""
        orders = sorted(permutations(members), key=self.estimator.per_s, reverse=True)
        return max(orders if len(self.task.chain.cuts) <= _FEW_CUTS else orders[:_ORDERS], key=self._per_s)

    def _exactly_best(self, row: Row) -> Row:
        orders = permutations(row) if len(row) <= _FEW else iter(())
        return max((row, *orders), key=lambda order: round(self._per_s(order) / self._per_s(row), 3))

    def _per_s(self, row: Row) -> float:
        """The exact rate; 0 if there are more machines than stages or the model does not fit."""
        found = self._try_cut(row)
        return 0.0 if found is None else 1 / max(found.interval_s, 1e-12)

    def _hold_back(self) -> dict[int, float]:
        """Spares, chosen again with more memory if stages have outgrown them since."""
        held: dict[int, float] = {}
        for margin in _MARGINS:
            needed_bytes = self._smallest_stage_bytes()
            able = sum(self.estimator.machines[m].memory_bytes >= needed_bytes for m in (*held, *self.grouping.idle))
            if able >= self.task.num_spares or 0 < len(held) < self.task.num_spares:
                break
            self.grouping.take_back(held)
            held = hold_back(self.grouping, self.task.num_spares, self.min_stages, margin * needed_bytes)
            improve(self.grouping, self.rng, self.min_stages, self.budget // 8)
        return held

    def _smallest_stage_bytes(self) -> int:
        """The least memory with which a machine can replace some member."""
        return min(memory.total for row in self.grouping.rows for memory in self._cut(row).memory)

    def _cluster(self, row: Row) -> ClusterPlan:
        found = self._cut(row)
        machines = [self.estimator.machines[m] for m in row]
        rate = self.task.microbatch / found.interval_s if found.interval_s else float("inf")
        return ClusterPlan(tuple(m.name for m in machines), found, rate, explain_row(machines, found))

    def _cut(self, row: Row) -> Partition:
        """The partition of a row of the grouping; raises `PlanError` if it does not fit after all."""
        return self._try_cut(row) or partition(self._problem(row))

    def _try_cut(self, row: Row) -> Partition | None:
        key = tuple(map(self.estimator.kinds.__getitem__, row))
        if key not in self._partitions:
            self._partitions[key] = try_partition(self._problem(row))
        return self._partitions[key]

    def _problem(self, row: Row) -> Problem:
        machines = [self.estimator.machines[m] for m in row]
        return self.task.problem(machines, tolerance=_TOLERANCE, max_cut_points=self.max_cut_points)


def _no_cluster(task: Task) -> DoesNotFit:
    largest = sorted(task.fleet.machines, key=lambda m: (-m.memory_bytes, m.name))
    count = min(len(largest), len(task.chain.cuts) + 1, _MOST_MISSING)
    nodes = tuple(machine.node for machine in largest[:count])
    problem = Problem(chain=task.chain, nodes=nodes, memory=task.memory, max_depth=task.max_depth)
    return fleet_does_not_fit(problem, len(largest))
