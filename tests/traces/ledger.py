"""What must hold at every moment, kept by somebody who only sees events: not how the coordinator itself counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ravnest.coordinator.events import (
    Event,
    LeaseGranted,
    LeaseReturned,
    LeaseSettled,
    PlanMade,
    RoundClosed,
    RoundOpened,
)
from ravnest.coordinator.state import State
from ravnest.core.control import Part


@dataclass
class Ledger:
    """`check` after every event."""

    out: set[tuple[str, int]] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    owners: dict[tuple[int, str, int], str] = field(default_factory=dict)
    rounds: dict[int, float] = field(default_factory=dict)  # that are open, since when
    longest_round_s: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)

    def told(self, name: str, part: Part) -> None:
        """A stage of a generation belongs to one node, whoever else there is."""
        owner = self.owners.setdefault((part.generation, part.cluster, part.stage), name)
        assert owner == name, f"{owner} and {name} are both stage {part.stage} of {part.cluster}"

    def check(self, state: State, event: Event) -> None:
        self.kinds[type(event).__name__] += 1
        match event:
            case LeaseGranted(cluster=cluster, batch=batch):
                assert (cluster, batch) not in self.out
                self.out.add((cluster, batch))
                self.counts["granted"] += 1
            case LeaseSettled(cluster=cluster, batch=batch):
                assert (cluster, batch) in self.out, "a batch is settled by somebody who does not have it"
                self.out.remove((cluster, batch))
                self.counts["repeated" if batch in self.done else "settled"] += 1
                self.done.add(batch)
            case LeaseReturned(cluster=cluster, batch=batch):
                self.out.remove((cluster, batch))
                self.counts["returned"] += 1
            case PlanMade():
                self._check_members(state)
            case RoundOpened(at_s=at_s, number=number):
                self.rounds.setdefault(number, at_s)
            case RoundClosed(at_s=at_s, number=number):
                self.longest_round_s = max(self.longest_round_s, at_s - self.rounds.pop(number))
        self._check_leases(state)

    def _check_leases(self, state: State) -> None:
        leases, counts = state.leases, state.leases.counts
        mine = self.counts
        assert counts.is_balanced
        assert (counts.granted, counts.settled, counts.repeated, counts.outstanding, counts.returned) == (
            mine["granted"], mine["settled"], mine["repeated"], len(self.out), mine["returned"],
        )  # fmt: skip
        lent = {batch for _, batch in self.out if batch not in self.done}
        assert leases.unsettled == lent | set(leases.waiting), "a batch is neither settled, lent nor waiting"
        assert len(lent) + len(leases.waiting) == len(leases.unsettled), "a batch waits while somebody has it"

    def _check_members(self, state: State) -> None:
        busy = [name for cluster in state.live_clusters() for name in cluster.plan.members]
        assert len(busy) == len(set(busy)), f"a node is in two clusters: {busy}"
        for cluster in state.live_clusters():
            for name in cluster.plan.members:
                assert state.nodes[name].cluster == cluster.plan.id
