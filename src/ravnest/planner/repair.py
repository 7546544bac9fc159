"""Repairs one cluster that lost members, or whose members changed speed, and plans the transfers of state.

- cut again, over the same members in the same order;
- replace a member by an idle machine in its place: with the same cuts only its own stage moves;
- split the model again over the members that are left.

Each repair is worth the samples it gives until the horizon; while state moves to a cluster, it gives none:

    worth = samples/s * (horizon - seconds of transfers)

The state of a stage is its parameters and their optimizer state. For stages that change hands,

    bytes(machine) = (1 + optimizer state per byte) * parameters it owns afterwards and did not own before

Each range of ops comes from a machine that owns it now: of a few clusters in turn, the one that would be done first,
given its other transfers. Ranges without an owner come from outside (a checkpoint), limited by the receiver's download
alone. A machine is ready when it has received everything, and no sooner than its senders have sent it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, inf

from ravnest.planner.fleet import ClusterPlan, Machine, Task
from ravnest.planner.partition.row import try_row
from ravnest.planner.reasons import format_rate, format_transfers

__all__ = ["StateTransfers", "state_transfers", "ClusterRepair", "best_repair", "replacements", "worth"]

_MAX_SOURCES = 8  # clusters compared for one range


@dataclass(frozen=True)
class StateTransfers:
    """Bytes that move in all, and about how long each receiving machine waits for them."""

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
    """The owner of every op in each cluster, and how long each is busy sending."""

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
        self._upto = [(1 + task.memory.optimizer_ratio) * size for size in accumulate(amounts, initial=0)]
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


_MAX_CANDIDATES = 4  # idle machines tried for one stage


@dataclass(frozen=True)
class ClusterRepair:
    """A repaired cluster, and the change in words."""

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
