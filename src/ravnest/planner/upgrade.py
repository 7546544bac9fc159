"""Finds the best upgrade: the one change of one machine that would make the plan fastest.

Every member is planned with twice the memory, upload, download or speed, and with half the latency, in its place in its
cluster, which is cut again for it. If there are many, only those are cut that gain most by `RateEstimator`, which skips
those whose bound excludes a gain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappushpop
from math import inf

from ravnest.core.units import format_bytes, format_rate, format_seconds
from ravnest.planner.clusters.estimate import RateEstimator, Row
from ravnest.planner.fleet import ClusterPlan, FleetPlan, Machine, Task, plan_row

__all__ = ["Upgrade", "best_upgrade"]

_MAX_EXACT = 64  # changes that are all planned exactly
_NUM_FINALISTS = 16  # of more changes
_MIN_GAIN = 0.01  # of the rate of its cluster


@dataclass(frozen=True)
class Upgrade:
    """A machine by name, a description of the change, and the samples/s of the whole plan with it.

    `gain` is the increase, as a fraction.
    """

    name: str
    change: str
    samples_per_s: float
    gain: float
    reason: str


def best_upgrade(task: Task, plan: FleetPlan) -> Upgrade | None:
    """The change that helps most; None if no single one helps."""
    members = [(number, task.fleet[name]) for number, cluster in enumerate(plan.clusters) for name in cluster.members]
    changes = [(number, *change) for number, machine in members for change in _changes(machine)]
    if len(changes) > _MAX_EXACT:
        changes = [changes[index] for index in _finalists(task, plan, [changed for _, changed, _ in changes])]
    best: Upgrade | None = None
    for number, changed, description in changes:
        upgrade = _upgrade(task, plan, number, changed, description)
        if upgrade is not None and (best is None or upgrade.gain > best.gain):
            best = upgrade
    return best


def _changes(machine: Machine) -> Iterator[tuple[Machine, str]]:
    """Upgrades of a machine, each with a description."""
    if machine.memory_bytes < inf:
        double = 2 * machine.memory_bytes
        yield replace(machine, memory_bytes=double), f"twice the memory, {format_bytes(double)}"
    if machine.up_bytes_per_s < inf:
        double = 2 * machine.up_bytes_per_s
        yield replace(machine, up_bytes_per_s=double), f"twice the upload, {format_rate(double)}"
    if machine.down_bytes_per_s < inf:
        double = 2 * machine.down_bytes_per_s
        yield replace(machine, down_bytes_per_s=double), f"twice the download, {format_rate(double)}"
    yield replace(machine, speed=2 * machine.speed), "a computer twice as fast"
    if machine.latency_s:
        half_s = machine.latency_s / 2
        yield replace(machine, latency_s=half_s), f"half the latency, {format_seconds(half_s)}"


def _finalists(task: Task, plan: FleetPlan, changed: list[Machine]) -> list[int]:
    """Indices of the changes that gain most by estimate, best first.

    All members, present and upgraded, make one fleet, so that one estimator knows all rows.
    """
    members = [task.fleet[name] for cluster in plan.clusters for name in cluster.members]
    wider = tuple(replace(machine, name=str(number)) for number, machine in enumerate([*members, *changed]))
    estimator = RateEstimator(replace(task, fleet=replace(task.fleet, machines=wider)))
    changes_of: defaultdict[str, list[int]] = defaultdict(list)
    for index, machine in enumerate(changed):
        changes_of[machine.name].append(index)
    best = [(0.0, -1)] * _NUM_FINALISTS
    first = 0
    for cluster in plan.clusters:
        row: Row = tuple(range(first, first + len(cluster.members)))
        first, now = first + len(row), estimator.per_s(row)
        for stage, name in enumerate(cluster.members):
            for index in changes_of[name]:
                other = (*row[:stage], len(members) + index, *row[stage + 1 :])
                if estimator.bound_per_s(other) > now + best[0][0]:
                    heappushpop(best, (estimator.per_s(other) - now, index))
    return [index for gain, index in sorted(best, reverse=True) if gain > 0]


def _upgrade(task: Task, plan: FleetPlan, number: int, changed: Machine, description: str) -> Upgrade | None:
    """The exact gain of a change; None if it is too small. The gain of better cuts alone does not count."""
    members = plan.clusters[number].members
    machines = tuple(changed if machine.name == changed.name else machine for machine in task.fleet.machines)
    now = max(plan.clusters[number], plan_row(task, members), key=lambda cluster: cluster.samples_per_s)
    then = plan_row(replace(task, fleet=replace(task.fleet, machines=machines)), members)
    gained = then.samples_per_s - now.samples_per_s
    if gained <= _MIN_GAIN * now.samples_per_s:
        return None
    reason = f"in cluster {number}, {_limit(now)}; then {_limit(then)}"
    return Upgrade(changed.name, description, plan.samples_per_s + gained, gained / plan.samples_per_s, reason)


def _limit(cluster: ClusterPlan) -> str:
    return cluster.partition.reason.split(": ")[0]
