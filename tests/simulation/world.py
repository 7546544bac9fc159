"""The environment of simulated nodes: a virtual clock, randomness, links that take time and fail, and meeting points.

A link keeps order. Messages in transit are lost when it fails, and both ends notice a little later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol

from tests.simulation.clock import VirtualLoop

_DELAYS_S = (0.001, 0.01, 0.03, 0.2)
_TRY_AGAIN_S = 1.0


def in_order(last_s: float, arrival_s: float) -> float:
    """When a message arrives, behind the last: a loop does not keep the order of what is due at the same moment."""
    return max(last_s + 1e-6, arrival_s)


class Host(Protocol):
    """A process that may be dead or frozen: then actions wait."""

    name: str
    rng: random.Random
    is_alive: bool

    def do(self, what: Callable[[], None]) -> None: ...


class End(Protocol):
    """One end of a link."""

    @property
    def host(self) -> Host: ...

    def receive(self, link: SimulatedLink, what: Any) -> None: ...

    def lost(self, link: SimulatedLink, reason: str) -> None: ...


class SimulatedLink:
    """Between two ends."""

    def __init__(self, world: World, ends: tuple[End, End]) -> None:
        self._world, self.ends, self.is_open = world, ends, True
        self._last_s = [0.0, 0.0]
        self._delay_s = ends[1].host.rng.choice(_DELAYS_S)

    def send(self, sender: End, what: Any) -> None:
        if not self.is_open:
            return
        to = 1 - self.ends.index(sender)
        delay_s = self._delay_s * sender.host.rng.uniform(0.5, 2.0)
        self._last_s[to] = in_order(self._last_s[to], self._world.loop.time() + delay_s)
        self._world.loop.call_at(self._last_s[to], self._deliver, to, what)

    def _deliver(self, to: int, what: Any) -> None:
        if self.is_open:
            end = self.ends[to]
            end.host.do(lambda: end.receive(self, what))

    def close(self, reason: str, within_s: float = 0.5) -> None:
        """Both ends notice, each after a while."""
        if not self.is_open:
            return
        self.is_open = False
        self._world.links.pop(self, None)
        for end in self.ends:
            self._world.loop.call_later(end.host.rng.uniform(0.0, within_s), self._tell, end, reason)

    def _tell(self, end: End, reason: str) -> None:
        end.host.do(lambda: end.lost(self, reason))

    @property
    def names(self) -> set[str]:
        return {end.host.name for end in self.ends}


class World:
    """One virtual clock. Every host has its own random generator, so that the order of calls does not matter."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.loop = VirtualLoop(lambda: self.rng.choice((0.0, 0.1, 1.0, 3.0)))
        self.links: dict[SimulatedLink, None] = {}  # ordered, so that traces are reproducible
        self._waiting: dict[Hashable, list[tuple[End, Callable[[SimulatedLink], None]]]] = {}
        self.cuts: set[frozenset[str]] = set()  # pairs of names that cannot connect

    def meet(self, where: Hashable, end: End, met: Callable[[SimulatedLink], None]) -> None:
        """Create a link when the other end comes to the same place, and call `met`."""
        others = [one for one in self._waiting.get(where, []) if one[0].host is not end.host]
        self._waiting[where] = [*others, (end, met)]
        self._join(where)

    def _join(self, where: Hashable) -> None:
        """Retried while the two cannot connect."""
        waiting = [one for one in self._waiting.get(where, []) if one[0].host.is_alive]
        if len(waiting) < 2:
            return
        link = SimulatedLink(self, (waiting[0][0], waiting[1][0]))
        if frozenset(link.names) in self.cuts:
            self.loop.call_later(_TRY_AGAIN_S, self._join, where)
            return
        del self._waiting[where]
        self.links[link] = None
        for end, met in waiting:
            end.host.do(partial(met, link))

    def leave(self, where: Hashable, end: End) -> None:
        """Stop waiting there."""
        self._waiting[where] = [one for one in self._waiting.get(where, []) if one[0] is not end]

    def cut(self, names: frozenset[str], reason: str, within_s: float) -> None:
        """Break all links between two names, or of one name."""
        for link in list(self.links):
            if names <= link.names:
                link.close(reason, within_s)
