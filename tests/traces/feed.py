"""The line from the coordinator to a root, as `coordinator.feed` has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ravnest.coordinator.clusters import LiveCluster
from ravnest.coordinator.feeder import Sending
from ravnest.core.messages import Forward
from tests.traces.world import in_order

if TYPE_CHECKING:
    from tests.traces.stage import Stage


class Feed:
    """Keeps order both ways; whichever end breaks it, both hear of it a little later."""

    def __init__(self, stage: Stage, live: LiveCluster) -> None:
        self._stage, self._live, self._node = stage, live, stage.being
        self._loop = stage.being.fleet.loop
        self._last_s = [0.0, 0.0]
        self._is_attached = self._is_open = True
        self.has_room = True

    def send(self, sending: Sending) -> None:
        if isinstance(sending.header, Forward):
            self._loop.call_at(self._arrival_s(0), self._arrive)

    def _arrive(self) -> None:
        if self._is_open:
            self._node.do(self._stage.input_arrived)

    def acknowledge(self, microbatch: int) -> None:
        self._loop.call_at(self._arrival_s(1), self._acknowledged, microbatch)

    def _acknowledged(self, microbatch: int) -> None:
        if self._is_open and self._is_attached:
            self._live.acknowledged(microbatch)

    def close(self) -> None:
        """By the coordinator: from now on it hears nothing of it."""
        self._is_attached = False
        self.break_off("the coordinator closed the feed")

    def break_off(self, reason: str) -> None:
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
            self._node.do(self._stage.train_to_the_end)

    def _arrival_s(self, way: int) -> float:
        self._last_s[way] = in_order(self._last_s[way], self._loop.time() + self._node.rng.uniform(0.001, 0.1))
        return self._last_s[way]
