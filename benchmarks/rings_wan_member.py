"""One node of the rings that `benchmarks.rings_wan` times: its doors, its links and the averaging engine, no training.

    python -m benchmarks.rings_wan_member FOLDER

`FOLDER` holds its identity. It hears a `Seating`, links up with its ring neighbours by mutual TLS and says "ready";
then it averages for each `Order` that it hears and says how it went: a line of JSON each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from ravnest.net.door import Door
from ravnest.net.identity import Identity
from ravnest.net.link import Link, LinkConfig
from ravnest.net.ways import PeerInfo
from ravnest.rings.attempt import Key
from ravnest.rings.averaging import Averaging, Outcome
from ravnest.rings.codec import Floats
from ravnest.rings.messages import Message
from ravnest.rings.part import Part
from ravnest.rings.spec import RingSpec

__all__ = ["PORT", "Account", "Order", "Seating"]

PORT = 7700
DEADLINE_S = 120.0


class Seating(msgspec.Struct, frozen=True):
    """The rings that a node is in, by number: members in order, and elements; and where all nodes are."""

    members: dict[int, tuple[str, ...]]
    num_elements: dict[int, int]
    addresses: dict[str, str]
    piece_elements: int


class Order(msgspec.Struct, frozen=True):
    """Average once."""

    round: int
    codec: str


class Account(msgspec.Struct, frozen=True):
    """When a round began and ended by the machine's clock, its bytes, and the squares of errors and of values."""

    began_s: float
    ended_s: float
    sent_bytes: int
    squared_error: float
    squared_value: float


def main() -> None:
    identity = Identity.load(Path(sys.argv[1]))
    with Door(("0.0.0.0", PORT), identity, allowed=lambda name: True) as door:
        seating = msgspec.json.decode(sys.stdin.readline(), type=Seating)
        with Averaging(_links(door, identity.name, seating)) as averaging:
            member = _Member(identity.name, seating, averaging)
            _say("ready")
            for line in sys.stdin:
                _say(member.average(msgspec.json.decode(line, type=Order)))


def _links(door: Door, me: str, seating: Seating) -> Mapping[str, Link]:
    """To those before and after it in its rings, all called at once, as all call each other."""
    neighbours = set[str]()
    for members in seating.members.values():
        position = members.index(me)
        neighbours |= {members[position - 1], members[(position + 1) % len(members)]}

    def reach(name: str) -> Link:
        peer = PeerInfo(name=name, addresses=((seating.addresses[name], PORT),), purpose="ring")
        return door.reach(peer, LinkConfig(headers=Message), deadline_s=DEADLINE_S).link

    with ThreadPoolExecutor(len(neighbours)) as pool:
        return dict(zip(sorted(neighbours), pool.map(reach, sorted(neighbours)), strict=True))


class _Member:
    """Its weights, which stay as they are, and what the averages are compared with: those of the first fp32 round."""

    def __init__(self, me: str, seating: Seating, averaging: Averaging) -> None:
        self._me, self._seating, self._averaging = me, seating, averaging
        self._vectors = {ring: _weights(ring, me, size) for ring, size in seating.num_elements.items()}
        self._results = {ring: np.empty_like(vector) for ring, vector in self._vectors.items()}
        self._exact: dict[int, Floats] = {}

    def average(self, order: Order) -> Account:
        parts = [
            Part(self._spec(ring, order.codec), self._vectors[ring], self._results[ring]) for ring in self._vectors
        ]
        began_s = time.monotonic()
        outcome = self._averaging.run(Key(order.round, 0), parts, deadline_s=DEADLINE_S)
        return self._account(began_s, time.monotonic(), outcome, order)

    def _spec(self, ring: int, codec: str) -> RingSpec:
        members = self._seating.members[ring]
        return RingSpec(
            id=ring, members=members, me=self._me, weights=(1.0,) * len(members), codec=codec,
            piece_elements=self._seating.piece_elements,
        )  # fmt: skip

    def _account(self, began_s: float, ended_s: float, outcome: Outcome, order: Order) -> Account:
        if outcome.failed:
            raise next(iter(outcome.failed.values()))
        if not self._exact:
            if order.codec != "fp32":
                raise RuntimeError("the first round is the one that others are compared with: it must be fp32")
            self._exact = {ring: result.copy() for ring, result in self._results.items()}
        error = sum(float(np.square(self._results[ring] - exact).sum()) for ring, exact in self._exact.items())
        value = sum(float(np.square(exact).sum()) for exact in self._exact.values())
        return Account(began_s, ended_s, outcome.sent_bytes, error, value)


def _weights(ring: int, me: str, num_elements: int) -> Floats:
    """What all have in common, as large as weights are, and what each has learned since they last averaged."""
    vector = np.random.default_rng(ring).standard_normal(num_elements, np.float32)
    vector += 0.05 * np.random.default_rng([ring, *me.encode()]).standard_normal(num_elements, np.float32)
    return vector * np.float32(0.02)


def _say(what: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
