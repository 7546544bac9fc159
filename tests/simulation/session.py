"""The session of a node, seen from both ends; the coordinator uses it like an `http.session.Session`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.http.session import Session
from ravnest.errors import FrameError
from ravnest.protocol.control import Disconnect, FromCoordinator, FromNode, Hello, NodeWork
from tests.simulation.world import in_order

if TYPE_CHECKING:
    from tests.simulation.fleet import Fleet
    from tests.simulation.node import Node


class SimulatedSession:
    """Keeps the order of messages both ways. `is_open` is of the coordinator's end."""

    def __init__(self, fleet: Fleet, node: Node, coordinator: Coordinator) -> None:
        self.name, self.address = node.name, f"10.0.0.1:{9000 + node.life}"
        self._fleet, self._node, self._coordinator, self._life = fleet, node, coordinator, node.life
        self._delay_s = node.rng.choice((0.001, 0.02, 0.1))
        self._last_s = [0.0, 0.0]
        self.is_open = True
        self.is_welcome = False
        self._is_cut = self._has_arrived = False
        self._received_s = fleet.loop.time()
        self._watch()

    # the node's end

    def send_queued(self) -> None:
        while self.is_welcome and self._node.outbox and not self._is_cut:
            self.send_from_node(self._node.outbox.popleft())

    def send_from_node(self, message: FromNode) -> None:
        self._fleet.loop.call_at(self._arrival_s(0), self._receive, message)

    def cut(self, reason: str, notice_s: float) -> None:
        """Deliver no further message; each end notices after a while."""
        if not self._is_cut:
            self._is_cut = True
            rng, loop = self._node.rng, self._fleet.loop
            loop.call_later(rng.uniform(0.0, notice_s), self._left, reason)
            loop.call_later(rng.uniform(0.0, notice_s), self._ended_there)

    def _ended_there(self) -> None:
        if self._node.life == self._life:
            self._node.do(lambda: self._node.session_ended(self))

    # the coordinator's end

    def send(self, message: FromCoordinator) -> None:
        if self.is_open:
            self._fleet.loop.call_at(self._arrival_s(1), self._deliver_to_node, message)

    def disconnect(
        self, reason: str, *, may_reconnect: bool, is_run_over: bool = False, contribution: NodeWork | None = None
    ) -> None:
        if self.is_open:
            self.send(Disconnect(reason, may_reconnect, is_run_over, contribution))
            self.is_open = False

    def _deliver_to_node(self, message: FromCoordinator) -> None:
        if not self._is_cut and self._node.life == self._life:
            self._node.do(lambda: self._node.receive(self, message))

    def _receive(self, message: FromNode) -> None:
        if self._is_cut or not self.is_open:
            return
        self._received_s = self._fleet.loop.time()
        session = cast("Session", self)
        try:
            if isinstance(message, Hello):
                self._coordinator.handle_hello(session, message)
                self._has_arrived = True
            else:
                self._coordinator.handle_message(session, message)
        except (FrameError, ValueError) as error:
            raise AssertionError(f"{self.name} is honest and was disconnected: {error}") from error

    def _watch(self) -> None:
        """Like a session: ends after three missed heartbeats."""
        silence_s = 3 * self._coordinator.heartbeat_s
        left_s = self._received_s + silence_s - self._fleet.loop.time()
        if self._is_cut:
            return
        if left_s > 0:
            self._fleet.loop.call_later(left_s, self._watch)
        else:
            self._left(f"no message for {silence_s:g} s")
            self.cut("silence", 1.0)

    def _left(self, reason: str) -> None:
        self.is_open = False
        if self._has_arrived:
            self._has_arrived = False
            self._coordinator.handle_disconnect(cast("Session", self), reason)

    def _arrival_s(self, way: int) -> float:
        delay_s = self._delay_s * self._node.rng.uniform(0.5, 2.0)
        self._last_s[way] = in_order(self._last_s[way], self._fleet.loop.time() + delay_s)
        return self._last_s[way]
