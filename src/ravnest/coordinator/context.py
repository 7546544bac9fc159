"""The part of a `Coordinator` that its services use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ravnest.coordinator.events import Event
from ravnest.coordinator.policy.membership import MembershipPolicy
from ravnest.coordinator.requester import Blobs, Requester
from ravnest.coordinator.state import CoordinatorState
from ravnest.protocol.control import FromCoordinator
from ravnest.transport.p2p.relay_server import RelayServer

if TYPE_CHECKING:
    from ravnest.coordinator.clusters import ClusterService
    from ravnest.coordinator.replication import ReplicationService

__all__ = ["STATE_FACTOR", "CoordinatorContext"]

STATE_FACTOR = 8  # bytes of the whole state of a stage over those of its weights, at most


class CoordinatorContext(Protocol):
    state: CoordinatorState
    policy: MembershipPolicy
    requester: Requester
    relay: RelayServer
    blobs: Blobs
    running: ClusterService
    replication: ReplicationService

    def now_s(self) -> float: ...

    def record(self, event: Event) -> None: ...

    def note(self, text: str) -> None: ...

    def send(self, name: str, message: FromCoordinator) -> None: ...
