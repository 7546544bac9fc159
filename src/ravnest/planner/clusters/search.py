"""Forms the clusters of a fleet that together do the most samples per second.

    maximise  sum over clusters of  microbatch / interval_s     each within memory and the limit on depth

All groupings of a few machines are compared; with more, an initial grouping is improved by local search. The search
uses `RateEstimator`, which is fast; its clusters are then cut by `partition`, which is exact. Machines of different
rows change places where that lowers latency and costs nothing, so that fewer microbatches are in flight. A machine
that helps no cluster is a spare if it could hold some member's stage, and otherwise left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, islice, permutations
from random import Random

from ravnest.core.config import require
from ravnest.planner.clusters.estimate import GAIN, RateEstimator, Row
from ravnest.planner.clusters.idle import explain_idle, hold_back
from ravnest.planner.clusters.initial import initial_grouping
from ravnest.planner.clusters.local_search import Grouping, improve
from ravnest.planner.clusters.order import EQUAL, best_order, latency_s, least_latency_order
from ravnest.planner.clusters.regroup import best_grouping, best_regrouping
from ravnest.planner.fleet import ClusterPlan, FleetPlan, Task
from ravnest.planner.partition.fit import fleet_does_not_fit
from ravnest.planner.partition.solver import Partition, partition
from ravnest.planner.problem import DoesNotFit, PlanError, Problem
from ravnest.planner.reasons import explain_clusters, explain_row

__all__ = ["reduce_latency", "search_groupings", "form_clusters"]

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
        self._partitions: dict[Row, Partition] = {}
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
        try:
            return 1 / max(self._cut(row).interval_s, 1e-12)
        except PlanError:
            return 0.0

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
        key = tuple(map(self.estimator.kinds.__getitem__, row))
        if key not in self._partitions:
            machines = [self.estimator.machines[m] for m in row]
            problem = self.task.problem(machines, tolerance=_TOLERANCE, max_cut_points=self.max_cut_points)
            self._partitions[key] = partition(problem)
        return self._partitions[key]


def _no_cluster(task: Task) -> DoesNotFit:
    largest = sorted(task.fleet.machines, key=lambda m: (-m.memory_bytes, m.name))
    count = min(len(largest), len(task.chain.cuts) + 1, _MOST_MISSING)
    nodes = tuple(machine.node for machine in largest[:count])
    problem = Problem(chain=task.chain, nodes=nodes, memory=task.memory, max_depth=task.max_depth)
    return fleet_does_not_fit(problem, len(largest))
