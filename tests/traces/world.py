"""Where simulated nodes live: a virtual clock, chance, lines that take time and break, and meeting points.

A line keeps order. What is on its way when it breaks is lost, and both ends hear of it a little later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol

from tests.traces.clock import VirtualLoop

_DELAYS_S = (0.001, 0.01, 0.03, 0.2)
_TRY_AGAIN_S = 1.0


def in_order(last_s: float, arrival_s: float) -> float:
    """When a message arrives, behind the last: a loop does not keep the order of what is due at the same moment."""
    return max(last_s + 1e-6, arrival_s)


class Being(Protocol):
    """Somebody who may be dead, or frozen: then what is to be done waits."""

    name: str
    rng: random.Random
    is_alive: bool

    def do(self, what: Callable[[], None]) -> None: ...


class End(Protocol):
    """One end of a line."""

    @property
    def being(self) -> Being: ...

    def hear(self, line: Line, what: Any) -> None: ...

    def lost(self, line: Line, reason: str) -> None: ...


class Line:
    """Between two ends."""

    def __init__(self, world: World, ends: tuple[End, End]) -> None:
        self._world, self.ends, self.is_open = world, ends, True
        self._last_s = [0.0, 0.0]
        self._delay_s = ends[1].being.rng.choice(_DELAYS_S)

    def send(self, sender: End, what: Any) -> None:
        if not self.is_open:
            return
        to = 1 - self.ends.index(sender)
        delay_s = self._delay_s * sender.being.rng.uniform(0.5, 2.0)
        self._last_s[to] = in_order(self._last_s[to], self._world.loop.time() + delay_s)
        self._world.loop.call_at(self._last_s[to], self._arrive, to, what)

    def _arrive(self, to: int, what: Any) -> None:
        if self.is_open:
            end = self.ends[to]
            end.being.do(lambda: end.hear(self, what))

    def close(self, reason: str, within_s: float = 0.5) -> None:
        """Both ends hear of it, each when it does."""
        if not self.is_open:
            return
        self.is_open = False
        self._world.lines.pop(self, None)
        for end in self.ends:
            self._world.loop.call_later(end.being.rng.uniform(0.0, within_s), self._tell, end, reason)

    def _tell(self, end: End, reason: str) -> None:
        end.being.do(lambda: end.lost(self, reason))

    @property
    def names(self) -> set[str]:
        return {end.being.name for end in self.ends}


class World:
    """One virtual clock. Everybody draws from a source of chance of their own, so that who is told first is all one."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.loop = VirtualLoop(lambda: self.rng.choice((0.0, 0.1, 1.0, 3.0)))
        self.lines: dict[Line, None] = {}  # in the order of coming, so that chance falls the same each time
        self._waiting: dict[Hashable, list[tuple[End, Callable[[Line], None]]]] = {}
        self.cuts: set[frozenset[str]] = set()  # pairs of names between which nothing passes

    def meet(self, where: Hashable, end: End, met: Callable[[Line], None]) -> None:
        """Have a line when the other end comes to the same place too; `met` hears of it."""
        others = [one for one in self._waiting.get(where, []) if one[0].being is not end.being]
        self._waiting[where] = [*others, (end, met)]
        self._join(where)

    def _join(self, where: Hashable) -> None:
        """Both are tried again and again while something is between them."""
        waiting = [one for one in self._waiting.get(where, []) if one[0].being.is_alive]
        if len(waiting) < 2:
            return
        line = Line(self, (waiting[0][0], waiting[1][0]))
        if frozenset(line.names) in self.cuts:
            self.loop.call_later(_TRY_AGAIN_S, self._join, where)
            return
        del self._waiting[where]
        self.lines[line] = None
        for end, met in waiting:
            end.being.do(partial(met, line))

    def leave(self, where: Hashable, end: End) -> None:
        """Wait there no longer."""
        self._waiting[where] = [one for one in self._waiting.get(where, []) if one[0] is not end]

    def cut(self, names: frozenset[str], reason: str, within_s: float) -> None:
        """Break all lines between two names, or of one name."""
        for line in list(self.lines):
            if names <= line.names:
                line.close(reason, within_s)
