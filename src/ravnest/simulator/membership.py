"""Follows a changing fleet by the rules of the coordinator (`coordinator.policy.membership`), on a virtual clock.

    a member leaves      its cluster has failed; its other members are free
    failed clusters      the free machines are planned at once: `replan` from the failed clusters
    free machines        are planned when none has joined for `wait_s`, or after `max_wait` times as long:
                         `form_clusters`
    a better plan        `rest_s` after the last change, free machines (or members of another speed) are planned
                         together with the newest clusters: `replan`. Clusters that the new plan does without
                         retire; then their members are planned as those of failed clusters are

Only the last rule plans running clusters. Machines that a plan gave no stage are planned again only
together with others. Plans are cached, since the same machines leave and return.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from ravnest.planner.clusters.search import form_clusters
from ravnest.planner.fleet import ClusterPlan, FleetPlan, Machine, Task
from ravnest.planner.problem import PlanError
from ravnest.planner.replan import replan, state_transfers

__all__ = ["SimulatedReplan", "SimulatedPlan", "SimulatedMembership", "Planner", "most_shared"]

_MAX_FAILED = 8  # clusters that a plan may repair, as in the coordinator
_MAX_CHANGED = 4  # clusters that are planned again together, as in the coordinator
_MAX_SOURCES = 16  # clusters from which the state of a stage may come


class SimulatedPlan(NamedTuple):
    """Plan the free machines at `time_s`; of the failed clusters, if there are any, as far as possible the same."""

    time_s: float
    free: tuple[str, ...]
    failed: tuple[ClusterPlan, ...]


class SimulatedReplan(NamedTuple):
    """At `time_s`, compare the plan with one of these running clusters and the free machines together."""

    time_s: float
    free: tuple[str, ...]
    running: tuple[ClusterPlan, ...]


class SimulatedMembership:
    """Tracks the machines that are present and those that are free, and decides the next plan."""

    def __init__(self, task: Task, plan: FleetPlan, *, wait_s: float, max_wait: float, rest_s: float) -> None:
        self._task, self._wait_s, self._max_wait_s, self._rest_s = task, wait_s, max_wait * wait_s, rest_s
        idle = [machine.name for machine in (*plan.spares, *plan.left_out)]
        self.present = {*idle, *(name for cluster in plan.clusters for name in cluster.members)}
        self.running: list[ClusterPlan] = list(plan.clusters)  # the newest last
        self._working = {name for cluster in plan.clusters for name in cluster.members}
        self._joined_s: dict[str, float] = {}
        self._free_since_s: dict[str, float] = {}
        self._unplaceable = set(idle)  # machines to which the last plan gave no stage
        self._failed: dict[ClusterPlan, float] = {}  # clusters without a successor, and when they ended
        self._considered: set[str] | None = None  # free machines of the last comparison since the last plan
        self._considered_s = 0.0
        self._has_new_speeds = False

    @property
    def free(self) -> tuple[str, ...]:
        return tuple(sorted(self.present - self._working))

    def join(self, name: str, now_s: float) -> None:
        self.present.add(name)
        self._joined_s[name] = self._free_since_s[name] = now_s

    def leave(self, name: str) -> None:
        self.present.discard(name)

    def change_speed(self) -> None:
        """A member of a running cluster shows another speed than it was planned with."""
        self._has_new_speeds = True

    def end(self, cluster: ClusterPlan, now_s: float) -> None:
        """A running cluster failed or retired: its members are free until another replaces it."""
        self.running.remove(cluster)
        self._working.difference_update(cluster.members)
        self._free_since_s.update(dict.fromkeys(cluster.members, now_s))
        self._failed[cluster] = now_s
        for oldest in list(self._failed)[:-_MAX_FAILED]:
            del self._failed[oldest]

    def apply_plan(self, decision: SimulatedPlan, clusters: Sequence[ClusterPlan], now_s: float) -> None:
        """These clusters were formed of the free machines; each replaces the failed one it shares most with.

        No clusters: no plan was possible.
        """
        for cluster in clusters:
            if (replaced := most_shared(cluster, self._failed)) is not None:
                del self._failed[replaced]
            self.running.append(cluster)
            self._working.update(cluster.members)
        self._unplaceable = set(decision.free) - self._working
        if clusters:
            self._considered, self._considered_s = None, now_s
            unused = self.present - self._working
            self._failed = {
                failed: at_s for failed, at_s in self._failed.items() if unused.intersection(failed.members)
            }

    def apply_comparison(self, decision: SimulatedReplan, now_s: float) -> None:
        self._considered, self._considered_s, self._has_new_speeds = set(decision.free), now_s, False

    def next_decision(self, *, is_starting: bool) -> SimulatedPlan | SimulatedReplan | None:
        """The next plan and its time. `is_starting`: a cluster has a plan and does not train yet."""
        free = self.free
        fresh = set(free) - self._unplaceable
        if fresh and len(free) >= self._task.min_stages:
            failed = tuple(self._failed)
            if any(fresh.intersection(cluster.members) for cluster in failed):
                return SimulatedPlan(-inf, free, failed)
            enough_s = max(sorted(map(self._since_s, free))[self._task.min_stages - 1], min(map(self._since_s, fresh)))
            quiet_s = max(self._last_join_s(free) + self._wait_s, enough_s)
            return SimulatedPlan(min(quiet_s, enough_s + self._max_wait_s), free, failed)
        if is_starting or not self.running or not self._may_improve(free):
            return None
        changed_s = max((self._considered_s, *self._failed.values()))
        time_s = max(changed_s + self._rest_s, self._last_join_s(free) + self._wait_s)
        return SimulatedReplan(time_s, free, tuple(self.running[-_MAX_CHANGED:]))

    def _may_improve(self, free: Collection[str]) -> bool:
        """Whether something changed since plans were last compared: speeds, free machines, or too few spares."""
        before, num_spares = self._considered, self._task.num_spares
        if self._has_new_speeds or (len(free) > num_spares and not set(free) <= (before or set())):
            return True
        is_large = any(len(cluster.members) > self._task.min_stages for cluster in self.running)
        return len(free) < num_spares and is_large and (before is None or len(before) > len(free))

    def _since_s(self, name: str) -> float:
        return self._free_since_s.get(name, 0.0)

    def _last_join_s(self, names: Iterable[str]) -> float:
        return max((self._joined_s.get(name, -inf) for name in names), default=-inf)


def most_shared(cluster: ClusterPlan, others: Iterable[ClusterPlan]) -> ClusterPlan | None:
    """The cluster with the most members in common; None if none has any."""
    members = set(cluster.members)
    best = max(others, key=lambda other: len(members.intersection(other.members)), default=None)
    return best if best is not None and members.intersection(best.members) else None


class Planner:
    """Makes the plans that the coordinator would make, and remembers them."""

    def __init__(self, task: Task, machines: Mapping[str, Machine]) -> None:
        """`machines` are as fast as they are now: the owner changes them."""
        self._task, self._machines = task, machines
        self._known: dict[tuple[object, ...], FleetPlan | PlanError] = {}

    def plan(self, names: Iterable[str], running: Sequence[ClusterPlan]) -> FleetPlan:
        """`replan` from the clusters that ran, else `form_clusters`. Raises `PlanError`."""
        task = self._task_of(names)
        key = (task.fleet.machines, *((c.members, c.partition.cuts, c.partition.interval_s) for c in running))
        if key not in self._known:
            try:
                self._known[key] = _plan(task, running)
            except PlanError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, PlanError):
            raise found
        return found

    def move_s(
        self, present: Iterable[str], before: Sequence[ClusterPlan], after: Sequence[ClusterPlan]
    ) -> list[float]:
        """Seconds until the state of each new cluster's stages has arrived."""
        moved = state_transfers(self._task_of(present), before[:_MAX_SOURCES], after)
        return [moved.wait_s(cluster) for cluster in after]

    def _task_of(self, names: Iterable[str]) -> Task:
        machines = tuple(self._machines[name] for name in sorted(names))
        return replace(self._task, fleet=replace(self._task.fleet, machines=machines))


def _plan(task: Task, running: Sequence[ClusterPlan]) -> FleetPlan:
    if not running:
        return form_clusters(task)
    rate = sum(cluster.samples_per_s for cluster in running)
    return replan(task, FleetPlan(tuple(running), (), (), rate, "")).plan
