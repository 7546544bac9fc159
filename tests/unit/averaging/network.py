"""Members of rings in one thread: real routers, contributions and codecs over simulated links in a random order.

A link preserves order, as real ones do. The next event among all possible ones (a node opens the attempt, a node
sends, a message arrives) is drawn from a generator that the test seeds. With `shared_memory` all members are on one
host: each reads the shared buffers of the others.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from ravnest.averaging.codec import Bytes, Floats, ScratchBuffers
from ravnest.averaging.contribution import Contribution
from ravnest.averaging.ring import RingSpec
from ravnest.averaging.session import AttemptKey, AttemptReceiver, AttemptRouter, Outgoing, RoundAttempt
from ravnest.averaging.shared_memory import SharedBuffer, map_peer_buffer
from ravnest.protocol.averaging import Message

__all__ = ["Network", "RingPlan", "mean"]

_BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class RingPlan:
    """A ring of named members with their weights and vectors; `without` is the ring after a member is lost."""

    id: int
    members: tuple[str, ...]
    weights: tuple[float, ...]
    vectors: dict[str, Floats]
    codec: str = "fp32"
    chunk_elements: int = 7

    def without(self, victim: str) -> RingPlan:
        kept = [(m, w) for m, w in zip(self.members, self.weights, strict=True) if m != victim]
        members, weights = zip(*kept, strict=True)
        return RingPlan(self.id, members, weights, self.vectors, self.codec, self.chunk_elements)

    def spec(self, me: str) -> RingSpec:
        return RingSpec(
            id=self.id,
            members=self.members,
            me=me,
            weights=self.weights,
            codec=self.codec,
            chunk_elements=self.chunk_elements,
        )


def mean(ring: RingPlan) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The expected average, in double precision."""
    total = np.zeros(ring.vectors[ring.members[0]].size)
    for member, weight in zip(ring.members, ring.weights, strict=True):
        total += ring.vectors[member].astype(np.float64) * weight
    return total / sum(ring.weights)


class Network:
    """All nodes, their posted messages, and the messages in transit."""

    def __init__(self, nodes: Iterable[str], rng: random.Random, *, shared_memory: bool = False) -> None:
        self._rng = rng
        nodes = sorted(nodes)
        self._buffers = {node: SharedBuffer(_BUFFER_BYTES) for node in nodes} if shared_memory else {}
        self._mapped: dict[str, Bytes] = {n: map_peer_buffer(buffer.fd, n) for n, buffer in self._buffers.items()}
        for buffer in self._buffers.values():
            buffer.close()
        self.routers = {node: AttemptRouter(partial(self._post, node)) for node in nodes}
        self._posted: defaultdict[tuple[str, str], deque[Outgoing]] = defaultdict(deque)
        self._wire: defaultdict[tuple[str, str], deque[tuple[Message, bytes | None]]] = defaultdict(deque)
        self._receivers: dict[tuple[str, str], AttemptReceiver] = {}
        self._closed: list[Callable[[], None]] = []
        self.results: dict[tuple[str, int], Floats] = {}
        self.residuals: dict[tuple[str, int], Floats] = {}
        self.num_events = 0

    def run(
        self, key: AttemptKey, rings: Sequence[RingPlan], *, kill: str | None = None, at: int = -1
    ) -> dict[str, RoundAttempt]:
        """One attempt, until no event is left; node `kill` dies after `at` events."""
        attempts: dict[str, RoundAttempt] = {}
        self.num_events = 0
        unopened = [node for node in self.routers if any(node in ring.members for ring in rings)]
        while True:
            if kill is not None and self.num_events == at:
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
                attempts[node] = self.routers[node].open(
                    key, [self._contribution(node, r) for r in rings if node in r.members]
                )
            self.num_events += 1

    def _contribution(self, node: str, ring: RingPlan) -> Contribution:
        vector, result = (self._new(node, ring.vectors[node].size) for _ in range(2))
        vector[:], result[:] = ring.vectors[node], np.nan
        self.results[node, ring.id] = result
        residual = self.residuals.setdefault((node, ring.id), np.zeros_like(vector))
        return Contribution(ring.spec(node), vector, result, residual)

    def _new(self, node: str, size: int) -> Floats:
        return self._buffers[node].floats(size) if self._buffers else np.empty(size, np.float32)

    def _post(self, sender: str, outgoing: Outgoing) -> None:
        if outgoing.peer in self.routers:
            self._posted[sender, outgoing.peer].append(outgoing)

    def _send(self, link: tuple[str, str]) -> None:
        outgoing = self._posted[link].popleft()
        if outgoing.membership is None or outgoing.send is None:
            self._wire[link].append((outgoing.header, None))
            return
        attempt, scratch = self.routers[link[0]].attempt, ScratchBuffers()
        contribution = outgoing.membership.contribution
        offset = contribution.published_offset(outgoing.send, self._buffers.get(link[0]))
        if offset is not None:
            if not attempt.publish(outgoing.membership):
                return
            self._wire[link].append((msgspec.structs.replace(outgoing.header, offset=offset), None))
        else:
            view = attempt.load(outgoing.membership, outgoing.send, scratch)
            if view is None:
                return
            self._wire[link].append((outgoing.header, bytes(view)))
        contribution.sent(outgoing.send, scratch)
        attempt.leave(outgoing.membership, link[1])

    def _deliver(self, link: tuple[str, str]) -> None:
        sender, receiver = link
        header, data = self._wire[link].popleft()
        new = AttemptReceiver(self.routers[receiver], sender, 2**20, self._mapped.get(sender))
        attempt_receiver = self._receivers.setdefault(link, new)
        (*views,) = attempt_receiver.place(header, () if data is None else (len(data),))
        for view in views:
            assert data is not None
            view[:] = data
        reply = attempt_receiver.arrived(header)
        if reply is not None and sender in self.routers:
            self._wire[receiver, sender].append((reply, None))
        attempt_receiver.leave()

    def _kill(self, victim: str) -> None:
        """Kill a process: messages it had not handed to the system are lost, others may be; then its links close."""
        del self.routers[victim]
        arrives = self._rng.random() < 0.5
        for link in [*self._posted, *self._wire]:
            if victim in link:
                self._posted.pop(link, None)
            if link[1] == victim or (link[0] == victim and not arrives):
                self._wire.pop(link, None)
        for node, router in self.routers.items():
            self._closed.append(partial(self._lose, node, router, victim))

    def _lose(self, node: str, router: AttemptRouter, victim: str) -> None:
        assert not self._wire[victim, node], "a link closes after its last message"
        router.lose(victim, f"{victim} has closed the link or died")
