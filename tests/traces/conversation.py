"""A node's conversation with the coordinator, seen from both ends: what `coordinator.sessions` is to a coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.sessions import Session
from ravnest.core.control import Goodbye, Hello, Said, Told
from ravnest.core.errors import FrameError
from tests.traces.world import in_order

if TYPE_CHECKING:
    from tests.traces.fleet import Fleet
    from tests.traces.node import Node


class Conversation:
    """Messages keep their order both ways. `is_open` is of the coordinator's end."""

    def __init__(self, fleet: Fleet, node: Node, desk: Coordinator) -> None:
        self.name, self.address = node.name, f"10.0.0.1:{9000 + node.life}"
        self._fleet, self._node, self._desk, self._life = fleet, node, desk, node.life
        self._delay_s = node.rng.choice((0.001, 0.02, 0.1))
        self._last_s = [0.0, 0.0]
        self.is_open = True
        self.is_welcome = False
        self._is_broken = self._has_arrived = False
        self._heard_s = fleet.loop.time()
        self._watch()

    # the node's end

    def say_all(self) -> None:
        while self.is_welcome and self._node.outbox and not self._is_broken:
            self.say(self._node.outbox.popleft())

    def say(self, said: Said) -> None:
        self._fleet.loop.call_at(self._arrival_s(0), self._hear, said)

    def break_off(self, reason: str, notice_s: float) -> None:
        """Nothing passes from now on; each end notices when it does."""
        if not self._is_broken:
            self._is_broken = True
            rng, loop = self._node.rng, self._fleet.loop
            loop.call_later(rng.uniform(0.0, notice_s), self._left, reason)
            loop.call_later(rng.uniform(0.0, notice_s), self._ended_there)

    def _ended_there(self) -> None:
        if self._node.life == self._life:
            self._node.do(lambda: self._node.conversation_ended(self))

    # the coordinator's end

    def tell(self, told: Told) -> None:
        if self.is_open:
            self._fleet.loop.call_at(self._arrival_s(1), self._told, told)

    def dismiss(self, reason: str, *, again: bool) -> None:
        if self.is_open:
            self.tell(Goodbye(reason, again))
            self.is_open = False

    def _told(self, told: Told) -> None:
        if not self._is_broken and self._node.life == self._life:
            self._node.do(lambda: self._node.told(self, told))

    def _hear(self, said: Said) -> None:
        if self._is_broken or not self.is_open:
            return
        self._heard_s = self._fleet.loop.time()
        session = cast("Session", self)
        try:
            if isinstance(said, Hello):
                self._desk.arrived(session, said)
                self._has_arrived = True
            else:
                self._desk.heard(session, said)
        except (FrameError, ValueError) as error:
            raise AssertionError(f"{self.name} is honest, and is sent away: {error}") from error

    def _watch(self) -> None:
        """As a session does: it ends when nothing is heard for three beats."""
        silence_s = 3 * self._desk.beat_s
        left_s = self._heard_s + silence_s - self._fleet.loop.time()
        if self._is_broken:
            return
        if left_s > 0:
            self._fleet.loop.call_later(left_s, self._watch)
        else:
            self._left(f"nothing was heard for {silence_s:g} s")
            self.break_off("silence", 1.0)

    def _left(self, reason: str) -> None:
        self.is_open = False
        if self._has_arrived:
            self._has_arrived = False
            self._desk.left(cast("Session", self), reason)

    def _arrival_s(self, way: int) -> float:
        delay_s = self._delay_s * self._node.rng.uniform(0.5, 2.0)
        self._last_s[way] = in_order(self._last_s[way], self._fleet.loop.time() + delay_s)
        return self._last_s[way]
