"""The feed from the coordinator to a first stage, like `coordinator.http.feed`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ravnest.coordinator.clusters import ActiveCluster
from ravnest.coordinator.policy.feed import FeedMessage
from ravnest.protocol.pipeline import Forward
from tests.simulation.world import in_order

if TYPE_CHECKING:
    from tests.simulation.stage import Stage


class Feed:
    """Keeps order both ways; when one end closes it, both notice a little later."""

    def __init__(self, stage: Stage, live: ActiveCluster) -> None:
        self._stage, self._live, self._node = stage, live, stage.host
        self._loop = stage.host.fleet.loop
        self._last_s = [0.0, 0.0]
        self._is_attached = self._is_open = True
        self.has_room = True

    def send(self, sending: FeedMessage) -> None:
        if isinstance(sending.header, Forward):
            self._loop.call_at(self._arrival_s(0), self._deliver)

    def _deliver(self) -> None:
        if self._is_open:
            self._node.do(self._stage.input_arrived)

    def acknowledge(self, microbatch: int) -> None:
        self._loop.call_at(self._arrival_s(1), self._acknowledged, microbatch)

    def _acknowledged(self, microbatch: int) -> None:
        if self._is_open and self._is_attached:
            self._live.acknowledged(microbatch)

    def close(self) -> None:
        """Closed by the coordinator, which gets no further calls."""
        self._is_attached = False
        self.cut("the coordinator closed the feed")

    def cut(self, reason: str) -> None:
        if self._is_open:
            self._is_open = False
            rng = self._node.rng
            self._loop.call_later(rng.uniform(0.0, 0.5), self._detach, reason)
            life = self._node.life
            self._loop.call_later(rng.uniform(0.0, 0.5), self._lost, life)

    def _detach(self, reason: str) -> None:
        if self._is_attached:
            self._is_attached = False
            self._live.detached(self, reason, is_fault=False)

    def _lost(self, life: int) -> None:
        if self._node.life == life:
            self._node.do(self._stage.finish_training)

    def _arrival_s(self, way: int) -> float:
        self._last_s[way] = in_order(self._last_s[way], self._loop.time() + self._node.rng.uniform(0.001, 0.1))
        return self._last_s[way]
