"""Plans again when the fleet has changed: a machine is lost, new, slower or faster.

From the least to the most disturbing, each chosen only if it is worth more than the best before:

1. keep the clusters that are intact, and park the others: their members become spares;
2. repair clusters one by one (`best_repair`): cut again over the same members, replace a member by an idle machine
   (with the same cuts only its own stage moves), or split the model again over the members that are left;
3. besides the intact clusters, form clusters of all idle machines;
4. form all clusters again.

If no machine is lost and there are fewer spares than requested, clusters with more members than the minimum give some
up. (Not right after a loss: spares are there to be used.)

**Worth.** A cluster is worth the samples it gives until the horizon; while state moves to it, it gives none:

    worth = samples/s * (horizon - seconds of transfers)

Of two plans, the clusters in both cancel out, and of the others the new ones must be worth more by `hysteresis`:

    sum of worth, clusters only in the new plan  >  (1 + hysteresis) * sum of worth, clusters only in the old one

**Transfers** (`state_transfers`). The state of a stage is its parameters and their optimizer state. For stages that
change hands,

    bytes(machine) = (1 + optimizer state per byte) * parameters it owns afterwards and did not own before

Each range of ops comes from a machine that owns it now: of a few clusters in turn, the one that would finish first,
given its other transfers. Ranges without an owner come from outside (a checkpoint), limited by the receiver's download
alone. A machine is ready when it has received everything, and no sooner than its senders have sent it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import NamedTuple

from ravnest.core.config import require
from ravnest.core.units import format_bytes
from ravnest.planner.clusters.search import form_clusters
from ravnest.planner.fleet import ClusterPlan, FleetPlan, IdleMachine, Machine, Task, try_row
from ravnest.planner.partition.solver import Partition
from ravnest.planner.problem import PlanError
from ravnest.planner.reasons import format_rate, format_transfers

__all__ = ["PlanChange", "replan", "StateTransfers", "state_transfers"]

_MAX_SOURCES = 8  # clusters compared for one range


@dataclass(frozen=True)
class StateTransfers:
    """Bytes that move in all, and the approximate seconds until each receiving machine has them."""

    num_bytes: int
    seconds: Mapping[str, float]

    def wait_s(self, cluster: ClusterPlan) -> float:
        """Until all of a cluster's members can start."""
        return max((self.seconds.get(name, 0.0) for name in cluster.members), default=0.0)

    @property
    def longest_s(self) -> float:
        return max(self.seconds.values(), default=0.0)


def state_transfers(task: Task, before: Sequence[ClusterPlan], after: Sequence[ClusterPlan]) -> StateTransfers:
    """From running clusters, of which some members may be lost, to others."""
    owned = {name: stretch for cluster in before for name, stretch in _stages(task, cluster)}
    senders, total = _Senders(task, before), 0.0
    for cluster in after:
        for name, (start, stop) in _stages(task, cluster):
            had = owned.get(name, (start, start))
            for first, last in _outside(start, stop, *had):
                total += senders.send(first, last, task.fleet[name])
    return StateTransfers(ceil(total), dict(senders.ready_s))


def _stages(task: Task, cluster: ClusterPlan) -> Iterator[tuple[str, tuple[int, int]]]:
    return zip(cluster.members, pairwise((0, *cluster.partition.cuts, task.chain.num_ops)), strict=True)


def _outside(start: int, stop: int, had_start: int, had_stop: int) -> list[tuple[int, int]]:
    """The parts of a range outside of another."""
    ranges = [(start, min(stop, had_start)), (max(start, had_stop), stop)]
    return [(a, b) for a, b in ranges if a < b]


class _Senders:
    """The owner of every op in each cluster, and the seconds for which each is busy sending."""

    def __init__(self, task: Task, before: Sequence[ClusterPlan]) -> None:
        self._fleet = task.fleet
        here = {machine.name for machine in task.fleet.machines}
        self._rows = [
            ((0, *row.partition.cuts, task.chain.num_ops), [name if name in here else "" for name in row.members])
            for row in before
        ]
        amounts = [0] * task.chain.num_ops
        for storage in task.chain.weights:
            if storage.ops:
                amounts[min(storage.ops)] += storage.num_bytes
        self._upto = [(1 + task.memory.optimizer_copies) * size for size in accumulate(amounts, initial=0)]
        self._turn = 0
        self._sending_s: defaultdict[str, float] = defaultdict(float)
        self._receiving_s: defaultdict[str, float] = defaultdict(float)
        self.ready_s: dict[str, float] = {}

    def send(self, start: int, stop: int, receiver: Machine) -> float:
        """Send the state of ops from `start` to `stop` to a machine; returns the bytes."""
        at = start
        while at < stop:
            at = self._send_range(at, stop, receiver)
        return self._upto[stop] - self._upto[start]

    def _send_range(self, at: int, stop: int, receiver: Machine) -> int:
        """Send from op `at` up to the end of its sender's stage; returns the next op."""
        found = [(min(stop, end), name) for end, name in self._owners(at)]
        owners = [(end, name) for end, name in found if name]
        if not owners:
            until = min((end for end, _ in found), default=stop)
            self._receive(receiver, (self._upto[until] - self._upto[at]) / receiver.down_bytes_per_s, 0.0)
            return until
        done = [(self._sending_s[name] + self._seconds(name, receiver, at, end), -end, name) for end, name in owners]
        done_s, end, name = min(done)
        self._receive(receiver, self._seconds(name, receiver, at, -end), done_s)
        self._sending_s[name] = done_s
        return -end

    def _owners(self, at: int) -> list[tuple[int, str]]:
        """Owners of an op, with the ends of their stages; no name for lost ones."""
        found = []
        for _ in self._rows:
            bounds, names = self._rows[self._turn]
            self._turn = (self._turn + 1) % len(self._rows)
            stage = bisect_right(bounds, at) - 1
            found.append((bounds[stage + 1], names[stage]))
            if len(found) >= _MAX_SOURCES and any(name for _, name in found):
                break
        return found

    def _seconds(self, sender: str, receiver: Machine, start: int, stop: int) -> float:
        link = self._fleet.link(self._fleet[sender], receiver)
        return (self._upto[stop] - self._upto[start]) / link.forward_bytes_per_s

    def _receive(self, receiver: Machine, seconds: float, sent_s: float) -> None:
        name = receiver.name
        self._receiving_s[name] += seconds
        self.ready_s[name] = max(self._receiving_s[name], sent_s, self.ready_s.get(name, 0.0))


# Repairs of one cluster.

_MAX_CANDIDATES = 4  # idle machines tried for one stage


@dataclass(frozen=True)
class ClusterRepair:
    """A repaired cluster, and a description of the change."""

    cluster: ClusterPlan
    change: str


def worth(cluster: ClusterPlan, moved: StateTransfers, horizon_s: float) -> float:
    """Samples until the horizon."""
    return cluster.samples_per_s * max(0.0, horizon_s - moved.wait_s(cluster))


def best_repair(
    task: Task,
    running: Sequence[ClusterPlan],
    number: int,
    out: Collection[str],
    idle: Sequence[Machine],
    horizon_s: float,
) -> tuple[ClusterRepair, float] | None:
    """The repair of a running cluster without its members in `out` that is worth most, and its worth."""
    best: tuple[ClusterRepair, float] | None = None
    for repair in _repairs(task, running[number], number, out, idle):
        moved = state_transfers(task, running, [repair.cluster])
        value = worth(repair.cluster, moved, horizon_s)
        if best is None or value > best[1]:
            best = ClusterRepair(repair.cluster, f"{repair.change}, {format_transfers(moved)}"), value
    return best


def _repairs(
    task: Task, cluster: ClusterPlan, number: int, out: Collection[str], idle: Sequence[Machine]
) -> Iterator[ClusterRepair]:
    left = [name for name in cluster.members if name not in out]
    if len(left) >= task.min_stages and (found := try_row(task, left)):
        what = f"split cluster {number} again over the {len(left)} left" if out else f"cut cluster {number} again"
        yield ClusterRepair(found, f"{what}: {format_rate(found.samples_per_s)}")
    for names in replacements(task, cluster, out, idle):
        members = [names.get(name, name) for name in cluster.members]
        swaps = " and ".join(f"{old} by {new}" for old, new in names.items())
        for cuts in (cluster.partition.cuts, None):
            if found := try_row(task, members, cuts):
                yield ClusterRepair(found, f"replace {swaps}: cluster {number} does {format_rate(found.samples_per_s)}")


def replacements(
    task: Task, cluster: ClusterPlan, out: Collection[str], idle: Sequence[Machine]
) -> Iterator[dict[str, str]]:
    """Machines that may replace members: of those with enough memory, the fastest at the stage."""
    stages = [stage for stage, name in enumerate(cluster.members) if name in out]
    ranked = {stage: sorted(idle, key=lambda m: _stage_s(task, cluster, stage, m)) for stage in stages}
    for first in range(min(_MAX_CANDIDATES, len(idle))) if stages else ():
        names: dict[str, str] = {}
        for place, stage in enumerate(stages):
            free = (m.name for m in ranked[stage][0 if place else first :] if m.name not in names.values())
            if (name := next(free, None)) is None:
                break
            names[cluster.members[stage]] = name
        else:
            yield names


def _stage_s(task: Task, cluster: ClusterPlan, stage: int, machine: Machine) -> float:
    """Seconds per microbatch of a stage on another machine, by compute and line; inf if its memory is too small."""
    found, chain = cluster.partition, task.chain
    if found.memory[stage].total > machine.memory_bytes:
        return inf
    start, stop = list(pairwise((0, *found.cuts, chain.num_ops)))[stage]
    forwards = 2 if task.memory.recompute else 1
    work_s = forwards * sum(chain.forward_s[start:stop]) + sum(chain.backward_s[start:stop])
    forward = [chain.forward_bytes[cut] if 0 < cut < chain.num_ops else 0 for cut in (start, stop)]
    backward = [chain.backward_bytes[cut] if 0 < cut < chain.num_ops else 0 for cut in (start, stop)]
    return max(
        work_s / machine.speed,
        (forward[1] + backward[0]) / machine.up_bytes_per_s,
        (forward[0] + backward[1]) / machine.down_bytes_per_s,
    )


FormClusters = Callable[[Task], FleetPlan]


@dataclass(frozen=True)
class PlanChange:
    """The next plan, and the bytes and seconds of its transfers of state.

    `gain` is the increase of samples/s over the clusters that are intact, as a fraction.
    """

    plan: FleetPlan
    moved_bytes: int
    move_s: float
    gain: float
    reason: str


def replan(
    task: Task,
    running: FleetPlan,
    *,
    form: FormClusters | None = form_clusters,
    horizon_s: float = 1800.0,
    hysteresis: float = 0.05,
) -> PlanChange:
    """The best plan after `running` on the fleet as it is now, that of the task.

    `form` forms clusters; None: only repair, which is fast. Raises `PlanError` if there is no plan.
    """
    require(0 < horizon_s < inf, f"horizon_s must be > 0, got {horizon_s}")
    require(0 <= hysteresis < inf, f"hysteresis must be >= 0, got {hysteresis}")
    now = _Replanner(task, running, horizon_s, hysteresis)
    unchanged = now.unchanged()
    best = now.better(now.repaired(), unchanged)
    if form is not None:
        for start in (best,) if best is unchanged else (unchanged, best):
            best = now.better(now.extended(start.plan, form), best)
        best = now.better(now.formed(form, must=not best.plan.clusters), best)
    if not best.plan.clusters:
        raise PlanError("no cluster is intact, and none can be repaired: form clusters again")
    best = best if any(now.lost) else now.with_spares(best)
    reason = best.plan.reason or f"keep: no change is worth more than {hysteresis:.0%}"
    old = unchanged.plan.samples_per_s
    gain = best.plan.samples_per_s / old - 1 if old else inf
    return PlanChange(replace(best.plan, reason=reason), best.moved.num_bytes, best.moved.longest_s, gain, reason)


class _Draft(NamedTuple):
    """A possible plan, and its transfers of state."""

    plan: FleetPlan
    moved: StateTransfers


class _Replanner:
    """A running plan on the fleet as it is now, and the plans that may follow."""

    def __init__(self, task: Task, running: FleetPlan, horizon_s: float, hysteresis: float) -> None:
        self.task, self.running, self.horizon_s, self.hysteresis = task, running, horizon_s, hysteresis
        here = {machine.name for machine in task.fleet.machines}
        self.lost = [[name for name in cluster.members if name not in here] for cluster in running.clusters]
        self.intact = [
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

    def unchanged(self) -> _Draft:
        """The clusters that are intact."""
        parked = [self._parked(number) for number, cluster in enumerate(self.intact) if cluster is None]
        return self._plan([c for c in self.intact if c is not None], parked)

    def repaired(self) -> _Draft | None:
        """Each cluster repaired that failed or changed speed; None if there is nothing to repair."""
        working = {name for cluster in self.running.clusters for name in cluster.members}
        idle = [machine for machine in self.task.fleet.machines if machine.name not in working]
        clusters, notes = list(self.intact), list[str]()
        numbers = range(len(clusters))
        for number in sorted(numbers, key=lambda n: (clusters[n] is not None, -self.running.clusters[n].samples_per_s)):
            repair = self._repair(number, idle)
            if repair is not None:
                clusters[number] = repair.cluster
                notes.append(repair.change)
            elif clusters[number] is None:
                notes.append(self._parked(number))
            idle = self._idle_after(number, clusters[number], idle)
        return self._plan([c for c in clusters if c is not None], notes) if notes else None

    def _repair(self, number: int, idle: list[Machine]) -> ClusterRepair | None:
        """The best repair of a cluster; None if none is worth it."""
        before, after = self.running.clusters[number], self.intact[number]
        outs: list[list[str]] = [self.lost[number]]
        value = 0.0
        if after is not None:
            if not _differ(before.partition, after.partition, self.hysteresis):
                return None
            outs.append([after.members[_slowest(after.partition)]])
            value = after.samples_per_s * self.horizon_s * (1 + self.hysteresis)
        best = None
        for out in outs:
            found = best_repair(self.task, self.running.clusters, number, out, idle, self.horizon_s)
            if found is not None and found[1] > value:
                best, value = found
        return best

    def _idle_after(self, number: int, cluster: ClusterPlan | None, idle: list[Machine]) -> list[Machine]:
        """The idle machines after a running cluster has become another, or none."""
        before, after = set(self.running.clusters[number].members), set(cluster.members if cluster else ())
        free = ({machine.name for machine in idle} | before) - after
        return [machine for machine in self.task.fleet.machines if machine.name in free]

    def _parked(self, number: int) -> str:
        gone = " and ".join(self.lost[number])
        why = (
            f"{gone} {'are' if len(self.lost[number]) > 1 else 'is'} gone" if gone else "it no longer fits its members"
        )
        return f"park cluster {number}: {why}"

    def extended(self, plan: FleetPlan, form: FormClusters) -> _Draft | None:
        """A plan with additional clusters of its idle machines; None if there are none."""
        working = {name for cluster in plan.clusters for name in cluster.members}
        idle = tuple(machine for machine in self.task.fleet.machines if machine.name not in working)
        if len(idle) < self.task.min_stages:
            return None
        try:
            formed = form(replace(self.task, fleet=replace(self.task.fleet, machines=idle)))
        except PlanError:
            return None
        added = [cluster for cluster in formed.clusters if len(cluster.members) >= self.task.min_stages]
        if len(added) < len(formed.clusters) or not added:
            return None
        notes = [f"add a cluster of {', '.join(c.members)}: {format_rate(c.samples_per_s)}" for c in added]
        return self._plan([*plan.clusters, *added], [*filter(None, [plan.reason]), *notes], formed)

    def formed(self, form: FormClusters, *, must: bool) -> _Draft | None:
        """All clusters formed again; if that fails, raises only if there `must` be such a plan."""
        try:
            plan = form(self.task)
        except PlanError:
            if must:
                raise
            return None
        moved = self._draft(plan).moved
        reason = f"form all again: {format_rate(plan.samples_per_s)}, {format_transfers(moved)}; {plan.reason}"
        return _Draft(replace(plan, reason=reason), moved)

    def with_spares(self, draft: _Draft) -> _Draft:
        """With the requested spares, as far as clusters can do without a member."""
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
        """A plan of these clusters; other machines are idle as in `formed`, or as in the running plan."""
        known = formed or self.running
        idle, working = known.spares + known.left_out, {name for cluster in clusters for name in cluster.members}
        known_idle = {machine.name for machine in idle}
        others = [m for m in self.task.fleet.machines if m.name not in working | known_idle]
        newly = [(machine, self._newly_idle(machine, clusters)) for machine in others]
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
        return _Draft(plan, state_transfers(self.task, self.running.clusters, plan.clusters))

    def _newly_idle(self, machine: Machine, clusters: list[ClusterPlan]) -> tuple[bool, IdleMachine]:
        """Whether a machine could replace a member, and the reason why it has no stage."""
        for number, cluster in enumerate(self.running.clusters):
            if machine.name in cluster.members:
                return True, IdleMachine(
                    machine.name, f"it was in cluster {number}, which is parked or continues without it"
                )
        least = min((memory.total for c in clusters for memory in c.partition.memory), default=0)
        if machine.memory_bytes < least:
            return False, IdleMachine(
                machine.name, f"it has joined, but the smallest stage takes {format_bytes(least)}"
            )
        return True, IdleMachine(machine.name, "it has joined, and would gain too little")


def _row(cluster: ClusterPlan) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return cluster.members, cluster.partition.cuts


def _loads_s(found: Partition) -> list[float]:
    """Seconds of every stage, by compute and line."""
    return [max(s, line.interval_s) for s, line in zip(found.stage_seconds, found.line_seconds, strict=True)]


def _differ(before: Partition, after: Partition, tolerance: float) -> bool:
    """Whether machines are faster or slower than planned."""
    allowed_s = tolerance * before.interval_s
    pairs = zip(_loads_s(before), _loads_s(after), strict=True)
    return any(abs(a - b) > allowed_s for a, b in pairs) or abs(before.interval_s - after.interval_s) > allowed_s


def _slowest(found: Partition) -> int:
    loads_s = _loads_s(found)
    return max(range(len(loads_s)), key=loads_s.__getitem__)
