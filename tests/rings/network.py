"""Members of rings in one thread: real routers, parts and codecs over links in memory, delivered in a random order.

A link keeps the order of what it carries, as real ones do. What happens next among all that could (a node opens the
attempt, a node sends, a message arrives) is drawn from a generator that the test seeds. Members that lend are on one
host: each sees the others' windows.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from ravnest.rings.attempt import Attempt, Key, Outgoing
from ravnest.rings.codec import Bytes, Desk, Floats
from ravnest.rings.messages import Message
from ravnest.rings.part import Part
from ravnest.rings.router import Reception, Router
from ravnest.rings.spec import RingSpec
from ravnest.rings.window import Window, see

__all__ = ["Network", "RingPlan", "mean"]

_WINDOW_BYTES = 2**20


@dataclass(frozen=True)
class RingPlan:
    """A ring of named members with their weights and vectors; `without` is what is left when one is gone."""

    id: int
    members: tuple[str, ...]
    weights: tuple[float, ...]
    vectors: dict[str, Floats]
    codec: str = "fp32"
    piece_elements: int = 7

    def without(self, victim: str) -> RingPlan:
        kept = [(m, w) for m, w in zip(self.members, self.weights, strict=True) if m != victim]
        members, weights = zip(*kept, strict=True)
        return RingPlan(self.id, members, weights, self.vectors, self.codec, self.piece_elements)

    def spec(self, me: str) -> RingSpec:
        return RingSpec(
            id=self.id,
            members=self.members,
            me=me,
            weights=self.weights,
            codec=self.codec,
            piece_elements=self.piece_elements,
        )


def mean(ring: RingPlan) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What a ring should come to, in double precision."""
    total = np.zeros(ring.vectors[ring.members[0]].size)
    for member, weight in zip(ring.members, ring.weights, strict=True):
        total += ring.vectors[member].astype(np.float64) * weight
    return total / sum(ring.weights)


class Network:
    """All nodes, what they have posted, and what is under way between them."""

    def __init__(self, nodes: Iterable[str], rng: random.Random, *, lends: bool = False) -> None:
        self._rng = rng
        nodes = sorted(nodes)
        self._windows = {node: Window(_WINDOW_BYTES) for node in nodes} if lends else {}
        self._seen: dict[str, Bytes] = {node: see(window.fd, node) for node, window in self._windows.items()}
        for window in self._windows.values():
            window.close()
        self.routers = {node: Router(partial(self._post, node)) for node in nodes}
        self._posted: defaultdict[tuple[str, str], deque[Outgoing]] = defaultdict(deque)
        self._wire: defaultdict[tuple[str, str], deque[tuple[Message, bytes | None]]] = defaultdict(deque)
        self._receptions: dict[tuple[str, str], Reception] = {}
        self._closed: list[Callable[[], None]] = []
        self.results: dict[tuple[str, int], Floats] = {}
        self.residuals: dict[tuple[str, int], Floats] = {}
        self.num_steps = 0

    def run(self, key: Key, rings: Sequence[RingPlan], *, kill: str | None = None, at: int = -1) -> dict[str, Attempt]:
        """One attempt, until nothing more can happen; `kill` is gone after `at` steps."""
        attempts: dict[str, Attempt] = {}
        self.num_steps = 0
        unopened = [node for node in self.routers if any(node in ring.members for ring in rings)]
        while True:
            if kill is not None and self.num_steps == at:
                self._kill(kill)
                unopened = [node for node in unopened if node != kill]
                attempts.pop(kill, None)
                kill = None
            steps = [(self._send, link) for link, queue in self._posted.items() if queue]
            steps += [(self._deliver, link) for link, queue in self._wire.items() if queue]
            if not steps and not unopened:
                if not self._closed:
                    return attempts
                self._closed.pop()()
                continue
            choice = self._rng.randrange(len(steps) + len(unopened))
            if choice < len(steps):
                step, link = steps[choice]
                step(link)
            else:
                node = unopened.pop(choice - len(steps))
                attempts[node] = self.routers[node].open(key, [self._part(node, r) for r in rings if node in r.members])
            self.num_steps += 1

    def _part(self, node: str, ring: RingPlan) -> Part:
        vector, result = (self._new(node, ring.vectors[node].size) for _ in range(2))
        vector[:], result[:] = ring.vectors[node], np.nan
        self.results[node, ring.id] = result
        residual = self.residuals.setdefault((node, ring.id), np.zeros_like(vector))
        return Part(ring.spec(node), vector, result, residual)

    def _new(self, node: str, size: int) -> Floats:
        return self._windows[node].floats(size) if self._windows else np.empty(size, np.float32)

    def _post(self, sender: str, outgoing: Outgoing) -> None:
        if outgoing.peer in self.routers:
            self._posted[sender, outgoing.peer].append(outgoing)

    def _send(self, link: tuple[str, str]) -> None:
        outgoing = self._posted[link].popleft()
        if outgoing.seat is None or outgoing.send is None:
            self._wire[link].append((outgoing.header, None))
            return
        attempt, desk = self.routers[link[0]].attempt, Desk()
        at = outgoing.seat.part.lent_at(outgoing.send, self._windows.get(link[0]))
        if at is not None:
            if not attempt.lend(outgoing.seat):
                return
            self._wire[link].append((msgspec.structs.replace(outgoing.header, at=at), None))
        else:
            view = attempt.load(outgoing.seat, outgoing.send, desk)
            if view is None:
                return
            self._wire[link].append((outgoing.header, bytes(view)))
        outgoing.seat.part.sent(outgoing.send, desk)
        attempt.leave(outgoing.seat, link[1])

    def _deliver(self, link: tuple[str, str]) -> None:
        sender, receiver = link
        header, data = self._wire[link].popleft()
        fresh = Reception(self.routers[receiver], sender, 2**20, self._seen.get(sender))
        reception = self._receptions.setdefault(link, fresh)
        (*views,) = reception.place(header, () if data is None else (len(data),))
        for view in views:
            assert data is not None
            view[:] = data
        answer = reception.arrived(header)
        if answer is not None and sender in self.routers:
            self._wire[receiver, sender].append((answer, None))
        reception.leave()

    def _kill(self, victim: str) -> None:
        """A killed process: what it had not handed to the system is lost, the rest may be; then the links end."""
        del self.routers[victim]
        arrives = self._rng.random() < 0.5
        for link in [*self._posted, *self._wire]:
            if victim in link:
                self._posted.pop(link, None)
            if link[1] == victim or (link[0] == victim and not arrives):
                self._wire.pop(link, None)
        for node, router in self.routers.items():
            self._closed.append(partial(self._lose, node, router, victim))

    def _lose(self, node: str, router: Router, victim: str) -> None:
        assert not self._wire[victim, node], "a link ends after what it carried"
        router.lose(victim, f"{victim} has closed the link or died")
