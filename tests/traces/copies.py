"""The passing on of a copy between two simulated nodes: both come to the place of its number, or nothing is passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ravnest.core.control import Copy
from tests.traces.world import Line

if TYPE_CHECKING:
    from tests.traces.node import Node

_PATIENCE_S = 30.0


class Transfer:
    """One end of a transfer: `give` or `take` it."""

    def __init__(self, node: Node, number: int) -> None:
        self.being, self._number = node, number
        self._copy: Copy | None = None
        self._then: Callable[[int | None], None] | None = None

    def give(self, copy: Copy) -> None:
        self._copy = copy
        self._meet()

    def take(self, then: Callable[[int | None], None]) -> None:
        """`then` hears how many updates the copy has, or None."""
        self._then = then
        self._meet()
        self.being.later(_PATIENCE_S, lambda: self._over(None))

    def hear(self, line: Line, what: Any) -> None:
        self._over(what)
        line.close("it is done")

    def lost(self, line: Line, reason: str) -> None:
        self._over(None)

    def _meet(self) -> None:
        self.being.fleet.world.meet(("copy", self._number), self, self._met)

    def _met(self, line: Line) -> None:
        if self._copy is not None:
            line.send(self, self._updates(self._copy))

    def _updates(self, copy: Copy) -> int | None:
        stage = self.being.stage
        if stage is not None and (stage.part.cluster, stage.part.stage) == (copy.cluster, copy.stage) and stage.has_run:
            return stage.updates
        return self.being.shelf.get((copy.cluster, copy.stage))

    def _over(self, updates: int | None) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(updates)
