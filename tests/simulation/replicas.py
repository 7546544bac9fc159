"""Transfers of replicas between two simulated nodes, which meet at the number of the transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ravnest.protocol.control import ReplicaInfo
from tests.simulation.world import SimulatedLink

if TYPE_CHECKING:
    from tests.simulation.node import Node

_TIMEOUT_S = 30.0


class Transfer:
    """One end of a transfer: `give` or `take` the replica."""

    def __init__(self, node: Node, number: int) -> None:
        self.host, self._number = node, number
        self._replica: ReplicaInfo | None = None
        self._then: Callable[[int | None], None] | None = None

    def give(self, replica: ReplicaInfo) -> None:
        self._replica = replica
        self._meet()

    def take(self, then: Callable[[int | None], None]) -> None:
        """Calls `then` with the updates of the replica, or None if it failed."""
        self._then = then
        self._meet()
        self.host.later(_TIMEOUT_S, lambda: self._over(None))

    def receive(self, link: SimulatedLink, what: Any) -> None:
        self._over(what)
        link.close("it is done")

    def lost(self, link: SimulatedLink, reason: str) -> None:
        self._over(None)

    def _meet(self) -> None:
        self.host.fleet.world.meet(("replica", self._number), self, self._met)

    def _met(self, link: SimulatedLink) -> None:
        if self._replica is not None:
            link.send(self, self._updates(self._replica))

    def _updates(self, replica: ReplicaInfo) -> int | None:
        stage = self.host.stage
        if (
            stage is not None
            and (stage.assignment.cluster, stage.assignment.stage) == (replica.cluster, replica.stage)
            and stage.has_run
        ):
            return stage.updates
        return self.host.replicas.get((replica.cluster, replica.stage))

    def _over(self, updates: int | None) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(updates)
