"""Clusters that trained when this coordinator was stopped: what they did without it counts, then they are planned anew.

Such a cluster trains on for as long as it has something to train; then each member puts down what it has learnt. The
copy of the root says how many windows were trained: these leases are settled, the others come back. It ends when all
its members have come back and let go of their stages, or when some do not come for `_PATIENCE_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .events import ClusterEnded, Event, LeaseReturned, LeaseSettled
from .records import ClusterRecord
from .requester import Requester
from .state import State

__all__ = ["Orphans"]

_PATIENCE_S = 45.0
_REASON = "the coordinator was started anew"


class _Office(Protocol):
    """What of the coordinator is needed here."""

    state: State
    requester: Requester

    def now_s(self) -> float: ...

    def record(self, event: Event) -> None: ...


class Orphans:
    """Lives in the coordinator's loop. `ended` is told of each that has ended."""

    def __init__(self, office: _Office, ended: Callable[[ClusterRecord], None]) -> None:
        self._office, self._ended = office, ended
        self._since_s = office.now_s()
        self._let_go: dict[str, set[str]] = {cluster.plan.id: set() for cluster in office.state.live_clusters()}

    def __bool__(self) -> bool:
        return bool(self._let_go)

    def let_go(self, name: str, generation: int) -> None:
        """A node has put down its part of that generation."""
        for cluster, names in self._let_go.items():
            if self._office.state.clusters[cluster].plan.generation == generation:
                names.add(name)

    def look(self) -> None:
        """End those that nothing more is to be heard of."""
        is_late = self._office.now_s() >= self._since_s + _PATIENCE_S
        for cluster, names in list(self._let_go.items()):
            if is_late or names.issuperset(self._office.state.clusters[cluster].plan.members):
                self._end(self._office.state.clusters[cluster])

    def _end(self, cluster: ClusterRecord) -> None:
        office, now_s, plan = self._office, self._office.now_s(), cluster.plan
        del self._let_go[plan.id]
        trained = self._windows_trained(cluster) - plan.begin - cluster.done
        for batch, samples in list(cluster.fed[: max(trained, 0)]):
            office.record(LeaseSettled(now_s, plan.id, batch, samples))
            office.requester.settled(batch)
        for batch in office.state.leases.outstanding_of(plan.id):
            office.record(LeaseReturned(now_s, plan.id, batch, _REASON))
        office.record(ClusterEnded(now_s, plan.id, _REASON, is_lost=True))
        self._ended(cluster)

    def _windows_trained(self, cluster: ClusterRecord) -> int:
        """As the root's own copy says; nothing is taken on trust from anybody else."""
        kept = self._office.state.nodes[cluster.plan.members[0]].copies
        mine = [one.copy.updates for one in kept if (one.copy.cluster, one.copy.stage) == (cluster.plan.id, 0)]
        return max(mine, default=0)
