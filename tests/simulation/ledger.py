"""Invariants that hold after every event, checked independently of the coordinator's own counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ravnest.coordinator.events import (
    Event,
    LeaseGranted,
    LeaseReturned,
    LeaseSettled,
    PlanCreated,
    RoundClosed,
    RoundStarted,
)
from ravnest.coordinator.state import CoordinatorState
from ravnest.protocol.control import Assignment


@dataclass
class Ledger:
    """`check` after every event."""

    out: set[tuple[str, int]] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    owners: dict[tuple[int, str, int], str] = field(default_factory=dict)
    rounds: dict[int, float] = field(default_factory=dict)  # start of open rounds
    longest_round_s: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)

    def assigned(self, name: str, assignment: Assignment) -> None:
        """A stage of a generation belongs to one node only."""
        owner = self.owners.setdefault((assignment.generation, assignment.cluster, assignment.stage), name)
        assert owner == name, f"{owner} and {name} are both stage {assignment.stage} of {assignment.cluster}"

    def check(self, state: CoordinatorState, event: Event) -> None:
        self.kinds[type(event).__name__] += 1
        match event:
            case LeaseGranted(cluster=cluster, batch=batch):
                assert (cluster, batch) not in self.out
                self.out.add((cluster, batch))
                self.counts["granted"] += 1
            case LeaseSettled(cluster=cluster, batch=batch):
                assert (cluster, batch) in self.out, "a batch is settled by a cluster without a lease"
                self.out.remove((cluster, batch))
                self.counts["repeated" if batch in self.done else "settled"] += 1
                self.done.add(batch)
            case LeaseReturned(cluster=cluster, batch=batch):
                self.out.remove((cluster, batch))
                self.counts["returned"] += 1
            case PlanCreated():
                self._check_members(state)
            case RoundStarted(at_s=at_s, number=number):
                self.rounds.setdefault(number, at_s)
            case RoundClosed(at_s=at_s, number=number):
                self.longest_round_s = max(self.longest_round_s, at_s - self.rounds.pop(number))
        self._check_leases(state)

    def _check_leases(self, state: CoordinatorState) -> None:
        leases, counts = state.leases, state.leases.counts
        mine = self.counts
        assert counts.is_balanced
        assert (counts.granted, counts.settled, counts.repeated, counts.outstanding, counts.returned) == (
            mine["granted"], mine["settled"], mine["repeated"], len(self.out), mine["returned"],
        )  # fmt: skip
        leased = {batch for _, batch in self.out if batch not in self.done}
        assert leases.unsettled == leased | set(leases.waiting), "a batch is neither settled, leased nor waiting"
        assert len(leased) + len(leases.waiting) == len(leases.unsettled), "a batch waits while it is leased"

    def _check_members(self, state: CoordinatorState) -> None:
        busy = [name for cluster in state.live_clusters() for name in cluster.plan.members]
        assert len(busy) == len(set(busy)), f"a node is in two clusters: {busy}"
        for cluster in state.live_clusters():
            for name in cluster.plan.members:
                assert state.nodes[name].cluster == cluster.plan.id
