"""Ends the clusters that were training when this coordinator was stopped, and counts what they trained without it.

Such a cluster trains the batches it has; then each member stores the state of its stage. The replica of the first stage
tells how many steps were trained: these leases are settled, the others are returned. A cluster ends when all its
members have reconnected and released their stages, or after `_TIMEOUT_S`.
"""

from __future__ import annotations

from collections.abc import Callable

from ravnest.coordinator.context import CoordinatorContext
from ravnest.coordinator.events import ClusterEnded, LeaseReturned, LeaseSettled
from ravnest.coordinator.state import ClusterRecord

__all__ = ["ResumeService"]

_TIMEOUT_S = 45.0
_REASON = "the coordinator was restarted"


class ResumeService:
    """Runs in the coordinator's loop until all such clusters have ended; calls `on_ended` for each."""

    def __init__(self, context: CoordinatorContext, on_ended: Callable[[ClusterRecord], None]) -> None:
        self._context, self._on_ended = context, on_ended
        self._start_s = context.now_s()
        self._released: dict[str, set[str]] = {cluster.plan.id: set() for cluster in context.state.live_clusters()}

    def __bool__(self) -> bool:
        return bool(self._released)

    def handle_release(self, name: str, generation: int) -> None:
        """A node has released its assignment of that generation."""
        for cluster, names in self._released.items():
            if self._context.state.clusters[cluster].plan.generation == generation:
                names.add(name)

    def tick(self) -> None:
        """End clusters whose members have all released their stages, or all of them after the timeout."""
        is_late = self._context.now_s() >= self._start_s + _TIMEOUT_S
        for cluster, names in list(self._released.items()):
            if is_late or names.issuperset(self._context.state.clusters[cluster].plan.members):
                self._end(self._context.state.clusters[cluster])

    def _end(self, cluster: ClusterRecord) -> None:
        context, now_s, plan = self._context, self._context.now_s(), cluster.plan
        del self._released[plan.id]
        trained = self._steps_trained(cluster) - plan.first_update - cluster.num_settled
        for batch, samples in list(cluster.fed_batches[: max(trained, 0)]):
            context.record(LeaseSettled(now_s, plan.id, batch, samples))
            context.requester.batch_settled(batch)
        for batch in context.state.leases.outstanding_of(plan.id):
            context.record(LeaseReturned(now_s, plan.id, batch, _REASON))
        context.record(ClusterEnded(now_s, plan.id, _REASON, is_lost=True))
        self._on_ended(cluster)

    def _steps_trained(self, cluster: ClusterRecord) -> int:
        """According to the first stage's own replica; no other node is trusted with it."""
        held = self._context.state.nodes[cluster.plan.members[0]].replicas
        own = [one.replica.updates for one in held if (one.replica.cluster, one.replica.stage) == (cluster.plan.id, 0)]
        return max(own, default=0)
