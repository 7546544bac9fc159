"""One node of the rings of `benchmarks.rings.wan`: its endpoint, its links and the averaging engine, no training.

    python -m benchmarks.rings.wan_member FOLDER

`FOLDER` holds its identity. It reads a `RingAssignment`, connects to its ring neighbours by mutual TLS and prints
"ready"; then it averages for each `AverageCommand` and prints a `RoundResult`, all as lines of JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from ravnest.averaging.averager import Averager, RoundOutcome
from ravnest.averaging.codec import Floats
from ravnest.averaging.contribution import Contribution
from ravnest.averaging.ring import RingSpec
from ravnest.averaging.session import AttemptKey
from ravnest.protocol.averaging import Message
from ravnest.transport.identity import Identity
from ravnest.transport.link import Link, LinkConfig
from ravnest.transport.p2p.candidates import PeerCandidates
from ravnest.transport.p2p.endpoint import PeerEndpoint

__all__ = ["PORT", "RoundResult", "AverageCommand", "RingAssignment"]

PORT = 7700
DEADLINE_S = 120.0


class RingAssignment(msgspec.Struct, frozen=True):
    """The rings of a node, by number: members in command, and elements; and the addresses of all nodes."""

    members: dict[int, tuple[str, ...]]
    num_elements: dict[int, int]
    addresses: dict[str, str]
    piece_elements: int


class AverageCommand(msgspec.Struct, frozen=True):
    """Average once."""

    round: int
    codec: str


class RoundResult(msgspec.Struct, frozen=True):
    """Start and end of a round by the machine's clock, its bytes, and the sums of squared errors and values."""

    began_s: float
    ended_s: float
    sent_bytes: int
    squared_error: float
    squared_value: float


def main() -> None:
    identity = Identity.load(Path(sys.argv[1]))
    with PeerEndpoint(("0.0.0.0", PORT), identity, allowed=lambda name: True) as endpoint:
        assignment = msgspec.json.decode(sys.stdin.readline(), type=RingAssignment)
        with Averager(_links(endpoint, identity.name, assignment)) as averaging:
            member = _Member(identity.name, assignment, averaging)
            _send("ready")
            for line in sys.stdin:
                _send(member.average(msgspec.json.decode(line, type=AverageCommand)))


def _links(endpoint: PeerEndpoint, me: str, assignment: RingAssignment) -> Mapping[str, Link]:
    """Links to the previous and next members of its rings, connected in parallel, as on all nodes."""
    neighbours = set[str]()
    for members in assignment.members.values():
        position = members.index(me)
        neighbours |= {members[position - 1], members[(position + 1) % len(members)]}

    def reach(name: str) -> Link:
        peer = PeerCandidates(name=name, addresses=((assignment.addresses[name], PORT),), purpose="ring")
        return endpoint.connect(peer, LinkConfig(headers=Message), deadline_s=DEADLINE_S).link

    with ThreadPoolExecutor(len(neighbours)) as pool:
        return dict(zip(sorted(neighbours), pool.map(reach, sorted(neighbours)), strict=True))


class _Member:
    """The constant weights of a node, and the averages of the first fp32 round as a reference."""

    def __init__(self, me: str, assignment: RingAssignment, averaging: Averager) -> None:
        self._me, self._assignment, self._averaging = me, assignment, averaging
        self._vectors = {ring: _weights(ring, me, size) for ring, size in assignment.num_elements.items()}
        self._results = {ring: np.empty_like(vector) for ring, vector in self._vectors.items()}
        self._exact: dict[int, Floats] = {}

    def average(self, command: AverageCommand) -> RoundResult:
        contributions = [
            Contribution(self._spec(ring, command.codec), self._vectors[ring], self._results[ring])
            for ring in self._vectors
        ]
        began_s = time.monotonic()
        outcome = self._averaging.run(AttemptKey(command.round, 0), contributions, deadline_s=DEADLINE_S)
        return self._result(began_s, time.monotonic(), outcome, command)

    def _spec(self, ring: int, codec: str) -> RingSpec:
        members = self._assignment.members[ring]
        return RingSpec(
            id=ring, members=members, me=self._me, weights=(1.0,) * len(members), codec=codec,
            chunk_elements=self._assignment.piece_elements,
        )  # fmt: skip

    def _result(self, began_s: float, ended_s: float, outcome: RoundOutcome, command: AverageCommand) -> RoundResult:
        if outcome.failed:
            raise next(iter(outcome.failed.values()))
        if not self._exact:
            if command.codec != "fp32":
                raise RuntimeError(f"the first round is the reference and must be fp32, got {command.codec}")
            self._exact = {ring: result.copy() for ring, result in self._results.items()}
        error = sum(float(np.square(self._results[ring] - exact).sum()) for ring, exact in self._exact.items())
        value = sum(float(np.square(exact).sum()) for exact in self._exact.values())
        return RoundResult(began_s, ended_s, outcome.sent_bytes, error, value)


def _weights(ring: int, me: str, num_elements: int) -> Floats:
    """Random weights: a common part, and a part of each node, as after some training since the last average."""
    vector = np.random.default_rng(ring).standard_normal(num_elements, np.float32)
    vector += 0.05 * np.random.default_rng([ring, *me.encode()]).standard_normal(num_elements, np.float32)
    return vector * np.float32(0.02)


def _send(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
