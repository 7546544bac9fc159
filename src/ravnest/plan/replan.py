"""What to do when the fleet is no longer the one that was planned for: a machine is gone, new, slower or faster.

From what disturbs least to what disturbs most, each taken only if it is worth more than the best so far:

1. go on with the clusters that still can, and park the others: their members become spares;
2. mend clusters one by one (`mend`): cut anew, replace a member, or split again over those who are left;
3. besides the clusters that can go on, form clusters of all machines that have nothing to do;
4. form everything anew.

If nobody is lost, and fewer machines are to spare than were asked for, clusters that have more members than they must
have give some up. (Right after a loss is no time for it: spares are there to be used.)

A plan is worth the samples it gives until the horizon, less what is lost while parameters move (`moves`). Of two plans,
clusters that are in both cancel out, and of the others the new ones must be worth more by `hysteresis`:

    sum of worth, clusters only in the new plan  >  (1 + hysteresis) * sum of worth, clusters only in the old one
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ..core.config import format_bytes, require
from .fleet import ClusterPlan, FleetPlan, Idle, Machine, Task
from .form import form
from .mend import Mend, best_mend, worth
from .moves import Moves, moves
from .partition import Partition
from .problem import PlanError
from .row import try_row

__all__ = ["Change", "replan"]

Form = Callable[[Task], FleetPlan]


@dataclass(frozen=True)
class Change:
    """The plan to follow from now on; what moves for it and for how long, and what is gained.

    `gain` is by how much it does more samples/s than the clusters that can go on as they are, as a fraction.
    """

    plan: FleetPlan
    moved_bytes: int
    move_s: float
    gain: float
    reason: str


def replan(
    task: Task, running: FleetPlan, *, anew: Form | None = form, horizon_s: float = 1800.0, hysteresis: float = 0.05
) -> Change:
    """The best way to go on from a running plan on the fleet as it is now, which is the task's.

    `anew` forms clusters; None: only mend, which is quick. Raises `PlanError` if nothing can be done.
    """
    require(0 < horizon_s < inf, f"horizon_s must be above 0, not {horizon_s}")
    require(0 <= hysteresis < inf, f"hysteresis must be 0 or more, not {hysteresis}")
    now = _Now(task, running, horizon_s, hysteresis)
    as_it_is = now.as_it_is()
    best = now.better(now.mended(), as_it_is)
    if anew is not None:
        for start in (best,) if best is as_it_is else (as_it_is, best):
            best = now.better(now.extended(start.plan, anew), best)
        best = now.better(now.formed(anew, must=not best.plan.clusters), best)
    if not best.plan.clusters:
        raise PlanError("no cluster can go on, and none can be mended: plan anew")
    best = best if any(now.lost) else now.held_back(best)
    reason = best.plan.reason or f"keep: no change is worth more than {hysteresis:.0%}"
    old = as_it_is.plan.samples_per_s
    gain = best.plan.samples_per_s / old - 1 if old else inf
    return Change(replace(best.plan, reason=reason), best.moved.num_bytes, best.moved.longest_s, gain, reason)


class _Draft(NamedTuple):
    """A plan that might be followed, and what would have to move for it."""

    plan: FleetPlan
    moved: Moves


class _Now:
    """A running plan on the fleet as it is."""

    def __init__(self, task: Task, running: FleetPlan, horizon_s: float, hysteresis: float) -> None:
        self.task, self.running, self.horizon_s, self.hysteresis = task, running, horizon_s, hysteresis
        here = {machine.name for machine in task.fleet.machines}
        self.lost = [[name for name in cluster.members if name not in here] for cluster in running.clusters]
        self.going_on = [
            None if lost else try_row(task, cluster.members, cluster.partition.cuts)
            for cluster, lost in zip(running.clusters, self.lost, strict=True)
        ]

    def better(self, new: _Draft | None, old: _Draft) -> _Draft:
        """The new plan, if it is worth enough more where the two differ."""
        if new is None or not old.plan.clusters:
            return new or old
        gained, given_up = self._worth(new, besides=old), self._worth(old, besides=new)
        return new if gained > (1 + self.hysteresis) * given_up else old

    def _worth(self, draft: _Draft, *, besides: _Draft) -> float:
        known = set(map(_row, besides.plan.clusters))
        others = (cluster for cluster in draft.plan.clusters if _row(cluster) not in known)
        return sum(worth(cluster, draft.moved, self.horizon_s) for cluster in others)

    def as_it_is(self) -> _Draft:
        """The clusters that can go on."""
        parked = [self._parked(number) for number, cluster in enumerate(self.going_on) if cluster is None]
        return self._plan([c for c in self.going_on if c is not None], parked)

    def mended(self) -> _Draft | None:
        """Each cluster mended that is broken or does not do what it did; None if there is nothing to mend."""
        working = {name for cluster in self.running.clusters for name in cluster.members}
        idle = [machine for machine in self.task.fleet.machines if machine.name not in working]
        clusters, notes = list(self.going_on), list[str]()
        numbers = range(len(clusters))
        for number in sorted(numbers, key=lambda n: (clusters[n] is not None, -self.running.clusters[n].samples_per_s)):
            mend = self._mend(number, idle)
            if mend is not None:
                clusters[number] = mend.cluster
                notes.append(mend.what)
            elif clusters[number] is None:
                notes.append(self._parked(number))
            idle = self._idle_after(number, clusters[number], idle)
        return self._plan([c for c in clusters if c is not None], notes) if notes else None

    def _mend(self, number: int, idle: list[Machine]) -> Mend | None:
        """What is worth doing about a cluster."""
        before, after = self.running.clusters[number], self.going_on[number]
        outs: list[list[str]] = [self.lost[number]]
        value = 0.0
        if after is not None:
            if not _differ(before.partition, after.partition, self.hysteresis):
                return None
            outs.append([after.members[_slowest(after.partition)]])
            value = after.samples_per_s * self.horizon_s * (1 + self.hysteresis)
        best = None
        for out in outs:
            found = best_mend(self.task, self.running.clusters, number, out, idle, self.horizon_s)
            if found is not None and found[1] > value:
                best, value = found
        return best

    def _idle_after(self, number: int, cluster: ClusterPlan | None, idle: list[Machine]) -> list[Machine]:
        """Who has nothing to do when a running cluster has become another, or none."""
        before, after = set(self.running.clusters[number].members), set(cluster.members if cluster else ())
        free = ({machine.name for machine in idle} | before) - after
        return [machine for machine in self.task.fleet.machines if machine.name in free]

    def _parked(self, number: int) -> str:
        gone = " and ".join(self.lost[number])
        why = (
            f"{gone} {'are' if len(self.lost[number]) > 1 else 'is'} gone" if gone else "it no longer fits its members"
        )
        return f"park cluster {number}: {why}"

    def extended(self, plan: FleetPlan, anew: Form) -> _Draft | None:
        """A plan and clusters of the machines that have nothing to do in it; None if there are none."""
        working = {name for cluster in plan.clusters for name in cluster.members}
        idle = tuple(machine for machine in self.task.fleet.machines if machine.name not in working)
        if len(idle) < self.task.min_stages:
            return None
        try:
            formed = anew(replace(self.task, fleet=replace(self.task.fleet, machines=idle)))
        except PlanError:
            return None
        added = [cluster for cluster in formed.clusters if len(cluster.members) >= self.task.min_stages]
        if len(added) < len(formed.clusters) or not added:
            return None
        notes = [f"add a cluster of {', '.join(c.members)}: {c.samples_per_s:.3g} samples/s" for c in added]
        return self._plan([*plan.clusters, *added], [*filter(None, [plan.reason]), *notes], formed)

    def formed(self, anew: Form, *, must: bool) -> _Draft | None:
        """Everything formed anew. Whatever speaks against it is raised only if there `must` be such a plan."""
        try:
            plan = anew(self.task)
        except PlanError:
            if must:
                raise
            return None
        moved = self._draft(plan).moved
        cost = f"{format_bytes(moved.num_bytes)} move in {moved.longest_s:.3g} s"
        reason = f"form anew: {plan.samples_per_s:.3g} samples/s, {cost}; {plan.reason}"
        return _Draft(replace(plan, reason=reason), moved)

    def held_back(self, draft: _Draft) -> _Draft:
        """With the spares that were asked for, as far as clusters can do without a member."""
        clusters, notes = list(draft.plan.clusters), list(filter(None, [draft.plan.reason]))
        while len(self.task.fleet.machines) - sum(len(c.members) for c in clusters) < self.task.num_spares:
            fewer = [
                (found.samples_per_s - cluster.samples_per_s, number, name, found)
                for number, cluster in enumerate(clusters)
                for name in cluster.members
                if (found := self._without(cluster, name)) is not None
            ]
            if not fewer:
                break
            _, number, name, found = max(fewer, key=lambda option: option[:3])
            notes.append(f"hold {name} back: {found.samples_per_s:.3g} instead of {clusters[number].samples_per_s:.3g}")
            clusters[number] = found
        return draft if tuple(clusters) == draft.plan.clusters else self._plan(clusters, notes, draft.plan)

    def _without(self, cluster: ClusterPlan, name: str) -> ClusterPlan | None:
        left = [other for other in cluster.members if other != name]
        return try_row(self.task, left) if len(left) >= max(1, self.task.min_stages) else None

    def _plan(self, clusters: list[ClusterPlan], notes: list[str], formed: FleetPlan | None = None) -> _Draft:
        """A plan of these clusters; the others are idle as in the plan that formed some, or as they were."""
        known = formed or self.running
        idle, working = known.spares + known.left_out, {name for cluster in clusters for name in cluster.members}
        told = {machine.name for machine in idle}
        silent = [m for m in self.task.fleet.machines if m.name not in working | told]
        newly = [(machine, self._newly_idle(machine, clusters)) for machine in silent]
        free = {machine.name for machine in self.task.fleet.machines} - working
        plan = FleetPlan(
            clusters=tuple(clusters),
            spares=(*(i for i in known.spares if i.name in free), *(i for _, (fits, i) in newly if fits)),
            left_out=(*(i for i in known.left_out if i.name in free), *(i for _, (fits, i) in newly if not fits)),
            samples_per_s=sum(cluster.samples_per_s for cluster in clusters),
            reason="; ".join(notes),
        )
        return self._draft(plan)

    def _draft(self, plan: FleetPlan) -> _Draft:
        return _Draft(plan, moves(self.task, self.running.clusters, plan.clusters))

    def _newly_idle(self, machine: Machine, clusters: list[ClusterPlan]) -> tuple[bool, Idle]:
        """Whether a machine could take the place of a member, and why it has none."""
        for number, cluster in enumerate(self.running.clusters):
            if machine.name in cluster.members:
                return True, Idle(machine.name, f"it was in cluster {number}, which is parked or goes on without it")
        least = min((memory.total for c in clusters for memory in c.partition.memory), default=0)
        if machine.memory_bytes < least:
            return False, Idle(machine.name, f"it has joined, but the smallest stage takes {format_bytes(least)}")
        return True, Idle(machine.name, "it has joined, and would not gain enough")


def _row(cluster: ClusterPlan) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return cluster.members, cluster.partition.cuts


def _loads_s(found: Partition) -> list[float]:
    """Seconds of every stage, by compute and line."""
    return [max(s, line.interval_s) for s, line in zip(found.stage_seconds, found.line_seconds, strict=True)]


def _differ(before: Partition, after: Partition, tolerance: float) -> bool:
    """Whether machines do not do what was planned."""
    allowed_s = tolerance * before.interval_s
    pairs = zip(_loads_s(before), _loads_s(after), strict=True)
    return any(abs(a - b) > allowed_s for a, b in pairs) or abs(before.interval_s - after.interval_s) > allowed_s


def _slowest(found: Partition) -> int:
    loads_s = _loads_s(found)
    return max(range(len(loads_s)), key=loads_s.__getitem__)
