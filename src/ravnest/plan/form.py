"""Who trains with whom: clusters of a fleet that together do the most samples per second.

    maximise  sum over clusters of  microbatch / interval_s     each within memory and the cap on depth

The search (`search`) asks `quick`, which is fast; the clusters it finds are then cut by `partition`, which is exact. A
machine that helps nobody is a spare if it could hold some member's stage, and else is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations
from random import Random

from ..core.config import require
from .fit import fleet_does_not_fit
from .fleet import ClusterPlan, FleetPlan, Task
from .idle import explain_idle
from .improve import improve
from .near import bring_near
from .order import nearest
from .partition import Partition, partition
from .problem import DoesNotFit, PlanError, Problem
from .quick import GAIN, Quick, Row
from .repack import best_grouping
from .search import find_groups
from .spares import hold_back

__all__ = ["form"]

_PLACES = (64, 512)  # coarse at first; if nothing fits, finer
_FINAL_PLACES = 96  # at least, of which the exact partition of a cluster takes its cuts
_CHECKED, _FEW = 16, 3  # machines of a fleet whose clusters are checked, and of a cluster of which all orders are
_MARGINS = (1.0, 1.3, 2.0, 4.0)  # of a spare's memory over the smallest stage
_REGROUPED = 6  # machines of which all groupings are compared
_FEW_CUTS, _ORDERS = 12, 2  # beyond so many cuts, that many orders of a set are cut exactly
_TOLERANCE = 0.005
_MOST_BUDGET, _BUDGET_PER_KIND, _BUDGET_PER_MACHINE = 1_500_000, 8000, 200  # tries, and machines looked at
_MOST_MISSING = 64  # machines that an error is about


def form(task: Task, *, seed: int = 0, effort: float = 1.0) -> FleetPlan:
    """The best clusters found, the spares and who is left out, each with its reason. Raises `DoesNotFit`.

    `effort` scales how much is tried; the same seed gives the same plan.
    """
    require(effort > 0, f"effort must be above 0, not {effort}")
    for places in _PLACES:
        quick = Quick(task, places)
        for min_stages in _allowed_stages(task):
            former = _Former(quick, min_stages, Random(seed), effort)
            if former.groups.rows:
                return former.plan()
    raise _no_cluster(task)


def _allowed_stages(task: Task) -> list[int]:
    """The least number of members, and what to fall back to if no such cluster is possible."""
    possible = min(task.min_stages, len(task.fleet.machines), len(task.chain.cuts) + 1)
    return list(range(possible, 0, -1))


class _Former:
    """One search, and the plan made of what it finds."""

    def __init__(self, quick: Quick, min_stages: int, rng: Random, effort: float) -> None:
        self.quick, self.task, self.min_stages, self.rng = quick, quick.task, min_stages, rng
        count = len(quick.machines)
        self.max_places = max(_FINAL_PLACES, quick.places.end)  # so the cuts that the search relied on are among them
        most = _BUDGET_PER_KIND * len(set(quick.kinds)) + _BUDGET_PER_MACHINE * count
        self.budget = int(effort * min(_MOST_BUDGET, most))
        self._partitions: dict[Row, Partition] = {}
        self.groups = find_groups(quick, rng, min_stages=min_stages, budget=self.budget)

    def plan(self) -> FleetPlan:
        held = self._hold_back() if self.task.num_spares else {}
        bring_near(self.groups, self.rng)
        rows = [nearest(self.quick, row) for row in self.groups.rows]
        if len(self.quick.machines) <= _CHECKED:
            rows = self._checked(rows)
            self.groups.replace(range(len(self.groups.rows)), rows)
        clusters = [self._cluster(row) for row in rows]
        clusters.sort(key=lambda cluster: (-cluster.samples_per_s, cluster.members))
        spares, left_out = explain_idle(self.groups, clusters, held)
        total = sum(cluster.samples_per_s for cluster in clusters)
        return FleetPlan(tuple(clusters), spares, left_out, total, self._reason(clusters, len(spares), len(left_out)))

    def _checked(self, rows: list[Row]) -> list[Row]:
        """Where it takes no time: the exactly best order of each row, or another grouping that does more."""
        best = [self._exactly_best(row) for row in rows]
        if self.task.num_spares:
            return best
        everybody = tuple(sorted(self.groups.usable, key=lambda m: (-self.quick.machines[m].memory_bytes, m)))
        others = [everybody] if len(everybody) > _REGROUPED else self._regrouped()
        return others if sum(map(self._per_s, others)) > GAIN * sum(map(self._per_s, best)) else best

    def _regrouped(self) -> list[Row]:
        """The exactly best grouping of a few machines, by the best order of every set of them."""
        usable = sorted(self.groups.usable)
        sizes = range(self.min_stages, min(len(usable), len(self.task.chain.cuts) + 1) + 1)
        chosen = (places for size in sizes for places in combinations(range(len(usable)), size))
        orders = {sum(1 << p for p in places): self._best_of_few([usable[p] for p in places]) for places in chosen}
        return best_grouping(orders, self._per_s, len(usable))

    def _best_of_few(self, members: Sequence[int]) -> Row:
        """The exactly best of the orders that look best; of all, if there is little to cut."""
        orders = sorted(permutations(members), key=self.quick.per_s, reverse=True)
        return max(orders if len(self.task.chain.cuts) <= _FEW_CUTS else orders[:_ORDERS], key=self._per_s)

    def _exactly_best(self, row: Row) -> Row:
        orders = permutations(row) if len(row) <= _FEW else iter(())
        return max((row, *orders), key=lambda order: round(self._per_s(order) / self._per_s(row), 3))

    def _per_s(self, row: Row) -> float:
        """Exactly; 0 if there are more machines than stages or the model does not fit."""
        try:
            return 1 / max(self._cut(row).interval_s, 1e-12)
        except PlanError:
            return 0.0

    def _hold_back(self) -> dict[int, float]:
        """Spares, chosen anew with more memory if stages have grown beyond them since."""
        held: dict[int, float] = {}
        for margin in _MARGINS:
            needed_bytes = self._smallest_stage_bytes()
            able = sum(self.quick.machines[m].memory_bytes >= needed_bytes for m in (*held, *self.groups.idle))
            if able >= self.task.num_spares or 0 < len(held) < self.task.num_spares:
                break
            self.groups.take_back(held)
            held = hold_back(self.groups, self.task.num_spares, self.min_stages, margin * needed_bytes)
            improve(self.groups, self.rng, self.min_stages, self.budget // 8)
        return held

    def _smallest_stage_bytes(self) -> int:
        """What a machine must hold to take any member's place."""
        return min(memory.total for row in self.groups.rows for memory in self._cut(row).memory)

    def _cluster(self, row: Row) -> ClusterPlan:
        found = self._cut(row)
        machines = [self.quick.machines[m] for m in row]
        regions = sorted({machine.region for machine in machines if machine.region})
        where = f" in {' and '.join(regions)}" if regions else ""
        text = f"{len(row)} {'machine' if len(row) == 1 else 'machines'}{where}: {found.reason}"
        rate = self.task.microbatch / found.interval_s if found.interval_s else float("inf")
        return ClusterPlan(tuple(m.name for m in machines), found, rate, text)

    def _cut(self, row: Row) -> Partition:
        key = tuple(map(self.quick.kinds.__getitem__, row))
        if key not in self._partitions:
            machines = [self.quick.machines[m] for m in row]
            problem = self.task.problem(machines, tolerance=_TOLERANCE, max_places=self.max_places)
            self._partitions[key] = partition(problem)
        return self._partitions[key]

    def _reason(self, clusters: list[ClusterPlan], num_spares: int, num_left_out: int) -> str:
        sizes = sorted(len(cluster.members) for cluster in clusters)
        some = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
        total = sum(cluster.samples_per_s for cluster in clusters)
        ideal = sum(m.speed for m in self.quick.machines) * self.task.microbatch / (self.quick.work_s or 1.0)
        text = (
            f"{len(clusters)} {'cluster' if len(clusters) == 1 else 'clusters'} of {some}, {total:.3g} samples/s: "
            f"{total / ideal:.0%} of what all machines could do without links and limits; "
            f"{num_spares} spare, {num_left_out} left out"
        )
        wanted = self.task.min_stages
        if self.min_stages < wanted:
            text += f"; smaller clusters than {wanted} are allowed, because no {wanted} machines can share this model"
        if num_spares < self.task.num_spares:
            text += f"; {self.task.num_spares} spares were asked for, but no more can be held back"
        return text


def _no_cluster(task: Task) -> DoesNotFit:
    largest = sorted(task.fleet.machines, key=lambda m: (-m.memory_bytes, m.name))
    count = min(len(largest), len(task.chain.cuts) + 1, _MOST_MISSING)
    nodes = tuple(machine.node for machine in largest[:count])
    problem = Problem(chain=task.chain, nodes=nodes, memory=task.memory, max_depth=task.max_depth)
    return fleet_does_not_fit(problem, len(largest))
