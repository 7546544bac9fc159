"""What must travel from one plan to another: parameters, and their optimizer's state, of stages that change hands.

    bytes(machine) = (1 + optimizer state per byte) * parameters it owns afterwards and did not own before

Each piece comes from a machine that owns it now: of a few clusters in turn, the one that would be done first, given
what it sends already. What nobody owns any more comes from outside (a checkpoint), and takes its receiver's download
alone. A machine has what it needs when it has received everything, and no sooner than its senders have sent it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from .fleet import ClusterPlan, Machine, Task

__all__ = ["Moves", "moves"]

_SOURCES = 8  # clusters looked at for one piece


@dataclass(frozen=True)
class Moves:
    """Bytes that change hands in all, and how long each machine that receives some has to wait for them, about."""

    num_bytes: int
    seconds: Mapping[str, float]

    def wait_s(self, cluster: ClusterPlan) -> float:
        """Until all of a cluster's members can go on."""
        return max((self.seconds.get(name, 0.0) for name in cluster.members), default=0.0)

    @property
    def longest_s(self) -> float:
        return max(self.seconds.values(), default=0.0)


def moves(task: Task, before: Sequence[ClusterPlan], after: Sequence[ClusterPlan]) -> Moves:
    """From clusters as they run, of which some members may be gone, to others."""
    owned = {name: stretch for cluster in before for name, stretch in _stages(task, cluster)}
    senders, total = _Senders(task, before), 0.0
    for cluster in after:
        for name, (start, stop) in _stages(task, cluster):
            had = owned.get(name, (start, start))
            for first, last in _outside(start, stop, *had):
                total += senders.send(first, last, task.fleet[name])
    return Moves(ceil(total), dict(senders.ready_s))


def _stages(task: Task, cluster: ClusterPlan) -> Iterator[tuple[str, tuple[int, int]]]:
    return zip(cluster.members, pairwise((0, *cluster.partition.cuts, task.chain.num_ops)), strict=True)


def _outside(start: int, stop: int, had_start: int, had_stop: int) -> list[tuple[int, int]]:
    """The part of a stretch that lies outside another."""
    pieces = [(start, min(stop, had_start)), (max(start, had_stop), stop)]
    return [(a, b) for a, b in pieces if a < b]


class _Senders:
    """Who owns what, and how long each is busy with what it sends already."""

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
        """Ops from `start` to `stop` to a machine, in as many pieces as it takes; the bytes."""
        at = start
        while at < stop:
            at = self._send_piece(at, stop, receiver)
        return self._upto[stop] - self._upto[start]

    def _send_piece(self, at: int, stop: int, receiver: Machine) -> int:
        """From op `at` up to where its sender's stage ends, or to where somebody may own the next op."""
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
        """Owners of an op, with where their stages end; no name for those that are gone."""
        found = []
        for _ in self._rows:
            bounds, names = self._rows[self._turn]
            self._turn = (self._turn + 1) % len(self._rows)
            stage = bisect_right(bounds, at) - 1
            found.append((bounds[stage + 1], names[stage]))
            if len(found) >= _SOURCES and any(name for _, name in found):
                break
        return found

    def _seconds(self, sender: str, receiver: Machine, start: int, stop: int) -> float:
        link = self._fleet.link(self._fleet[sender], receiver)
        return (self._upto[stop] - self._upto[start]) / link.forward_bytes_per_s

    def _receive(self, receiver: Machine, seconds: float, sent_s: float) -> None:
        name = receiver.name
        self._receiving_s[name] += seconds
        self.ready_s[name] = max(self._receiving_s[name], sent_s, self.ready_s.get(name, 0.0))
