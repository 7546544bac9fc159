"""The averager with threads and real links, and with peers that die, stall, send invalid messages or join late."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ravnest.averaging.averager import Averager, RoundOutcome
from ravnest.averaging.codec import CODECS, Floats
from ravnest.averaging.contribution import Contribution, digest
from ravnest.averaging.peer_link import PeerLinkConfig
from ravnest.averaging.ring import RingSpec
from ravnest.averaging.session import AttemptKey
from ravnest.core.rate_limit import RateLimiter
from ravnest.errors import BadContribution
from ravnest.protocol.averaging import AttemptReady, Chunk, Message, Phase
from ravnest.transport.link import Link, LinkConfig
from ravnest.transport.local import unix_pair
from tests.unit.averaging.error_bound import error_bound
from tests.unit.averaging.shared_pair import shared_pair
from tests.unit.transport.kinds import Members, TlsKind
from tests.unit.transport.memory import memory_pair

CONFIG = LinkConfig(headers=Message)
DEADLINE_S = 60.0
SIZE = 50_000
CHUNK = 4096
Connect = Callable[[], tuple[Link, Link]]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


@pytest.fixture(params=["memory", "unix", "shared", "tls"])
def connect(request: pytest.FixtureRequest, members: Members) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:
        kinds: dict[str, Connect] = {
            "memory": lambda: memory_pair(CONFIG),
            "unix": lambda: unix_pair(CONFIG),
            "shared": lambda: shared_pair(CONFIG),
            "tls": lambda: stack.enter_context(TlsKind(members).pair(CONFIG)),
        }
        yield kinds[request.param]


class Fleet:
    """Nodes with a link between every pair; each averages in its own thread."""

    def __init__(self, names: str, connect: Connect, config: PeerLinkConfig | None = None) -> None:
        self.links: dict[str, dict[str, Link]] = {name: {} for name in names}
        for index, name in enumerate(names):
            for other in names[:index]:
                self.links[name][other], self.links[other][name] = connect()
        self.nodes = {name: Averager(links, config) for name, links in self.links.items()}
        self.vectors = {
            name: np.random.default_rng(i).standard_normal(SIZE).astype(np.float32) for i, name in enumerate(names)
        }
        self.results: dict[tuple[str, int], Floats] = {}

    def __enter__(self) -> Fleet:
        for node in self.nodes.values():
            node.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        for node in self.nodes.values():
            node.close()

    def contribution(self, ring: int, members: str, me: str, codec: str = "fp32") -> Contribution:
        weights = tuple(float(ord(member) - 96) for member in members)
        spec = RingSpec(id=ring, members=tuple(members), me=me, weights=weights, codec=codec, chunk_elements=CHUNK)
        self.results[me, ring] = np.full(SIZE, np.nan, np.float32)
        return Contribution(spec, self.vectors[me], self.results[me, ring])

    def run(
        self, key: AttemptKey, rings: list[str], codec: str = "fp32", *, by: str = "", deadline_s: float = DEADLINE_S
    ) -> dict[str, RoundOutcome]:
        """All nodes (or those named in `by`) at once; ring i has the members `rings[i]`, in that order."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            running = {}
            for me in by or "".join(self.nodes):
                contributions = [self.contribution(i, ring, me, codec) for i, ring in enumerate(rings) if me in ring]
                running[me] = pool.submit(self.nodes[me].run, key, contributions, deadline_s=deadline_s)
            return {me: future.result(2 * DEADLINE_S) for me, future in running.items()}

    def check(self, rings: list[str], tolerance: float = 1e-5) -> None:
        for i, ring in enumerate(rings):
            total = sum(ord(m) - 96 for m in ring)
            expected = sum(self.vectors[m].astype(np.float64) * (ord(m) - 96) / total for m in ring)
            assert len({digest(self.results[m, i]) for m in ring}) == 1
            np.testing.assert_allclose(self.results[ring[0], i], expected, atol=tolerance)


@pytest.mark.parametrize("codec", CODECS)
def test_rings_over_shared_links_average_at_once_round_after_round(connect: Connect, codec: str) -> None:
    rings = ["abc", "cab", "ba", "c"]
    with Fleet("abc", connect) as fleet:
        for number in range(2):
            outcomes = fleet.run(AttemptKey(number, 0), rings, codec)
            assert all(not outcome.failed for outcome in outcomes.values())
            fleet.check(rings, error_bound(codec, 3, 6.0) + 1e-5)
        expected = sum(CODECS[codec].wire_bytes(SIZE) * 2 * (len(r) - 1) / len(r) for r in rings if "a" in r)
        assert outcomes["a"].sent_bytes == pytest.approx(expected, rel=0.02)


def test_a_dead_member_fails_its_rings_only_and_the_rest_agree_without_it(connect: Connect) -> None:
    with Fleet("abcd", connect) as fleet:
        fleet.nodes["d"].close()
        outcomes = fleet.run(AttemptKey(0, 0), ["abcd", "abc"], by="abc")
        for outcome in outcomes.values():
            assert outcome.done == (1,)
            assert outcome.failed[0].member == "d"
        assert all(not outcome.failed for outcome in fleet.run(AttemptKey(0, 1), ["abc", "abc"], by="abc").values())
        fleet.check(["abc", "abc"])


def test_a_member_that_does_not_join_is_named_after_the_deadline(connect: Connect) -> None:
    with Fleet("abc", connect) as fleet:
        outcomes = fleet.run(AttemptKey(0, 0), ["abc", "ab"], by="ab", deadline_s=2.0)
        assert all(outcome.done == (1,) and 0 in outcome.failed for outcome in outcomes.values())
        assert outcomes["b"].failed[0].member == "c"
        late = fleet.run(AttemptKey(0, 0), ["abc"], by="c", deadline_s=DEADLINE_S)["c"]
        assert 0 in late.failed  # immediately: its neighbours know that the ring has failed
        assert late.seconds < DEADLINE_S / 2
        assert all(not outcome.failed for outcome in fleet.run(AttemptKey(0, 1), ["abc"]).values())
        fleet.check(["abc"])


def test_a_contribution_that_is_not_finite_is_reported_to_all(connect: Connect) -> None:
    with Fleet("abc", connect) as fleet:
        fleet.vectors["b"][SIZE // 2] = np.inf
        for outcome in fleet.run(AttemptKey(0, 0), ["abc"]).values():
            failure = outcome.failed[0]
            assert isinstance(failure, BadContribution)
            assert (failure.ring, failure.member) == (0, "b")


@pytest.mark.parametrize(
    "header",
    [
        Chunk(5, 0, 0, Phase.REDUCE, 0, 0),  # of a round that is not open
        Chunk(0, 0, 0, Phase.REDUCE, 0, 1),  # not the next chunk
        Chunk(0, 0, 0, Phase.GATHER, 0, 0),  # too early
        Chunk(0, 0, 7, Phase.REDUCE, 0, 0),  # of an unknown ring
        Chunk(0, 0, 0, Phase.REDUCE, 0, 0),  # of the wrong size
    ],
)
def test_an_unexpected_chunk_closes_the_link_and_fails_the_ring(header: Chunk) -> None:
    near, far = unix_pair(CONFIG)
    with Averager({"b": near}) as node, far, ThreadPoolExecutor(1) as pool:
        vector = np.ones(1000, np.float32)
        contribution = Contribution(
            RingSpec(id=0, members=("a", "b"), me="a", weights=(1.0, 1.0)), vector, vector.copy()
        )
        running = pool.submit(node.run, AttemptKey(0, 0), [contribution], deadline_s=DEADLINE_S)
        assert far.receive(lambda header, lengths: [], deadline_s=DEADLINE_S) == AttemptReady(0, 0, 0)
        far.send(header, [bytes(12)], deadline_s=DEADLINE_S)
        outcome = running.result(DEADLINE_S)
        assert outcome.failed[0].member == "b"
        assert any(word in outcome.failed[0].why for word in ("not ready", "expected", "bytes", "not the member"))
        assert near.closed


def test_chunks_of_an_older_attempt_are_dropped() -> None:
    near, far = unix_pair(CONFIG)
    with Averager({"b": near}) as node, far, ThreadPoolExecutor(1) as pool:
        vector = np.ones(1000, np.float32)
        spec = RingSpec(id=0, members=("a", "b"), me="a", weights=(1.0, 1.0))
        for attempt in range(2):
            contribution = Contribution(spec, vector, vector.copy())
            running = pool.submit(node.run, AttemptKey(0, attempt), [contribution], deadline_s=0.2)
            assert far.receive(lambda header, lengths: [], deadline_s=DEADLINE_S) == AttemptReady(0, attempt, 0)
            if attempt:
                far.send(Chunk(0, 0, 0, Phase.REDUCE, 0, 0), [bytes(2000)], deadline_s=DEADLINE_S)
            assert running.result(DEADLINE_S).failed[0].member == "b"
            far.receive(lambda header, lengths: [], deadline_s=DEADLINE_S)  # AttemptAborted
        assert not near.closed


def test_a_peer_that_stalls_within_a_chunk_is_disconnected() -> None:
    near, far = memory_pair(CONFIG, capacity_bytes=2**16)
    with Averager({"b": near}, PeerLinkConfig(grace_s=0.1)) as node, far:
        vector = np.ones(2**18, np.float32)
        contribution = Contribution(
            RingSpec(id=0, members=("a", "b"), me="a", weights=(1.0, 1.0)), vector, vector.copy()
        )
        far.send(AttemptReady(0, 0, 0), deadline_s=DEADLINE_S)
        outcome = node.run(AttemptKey(0, 0), [contribution], deadline_s=0.2)
        assert outcome.failed[0].member == "b"
        assert outcome.seconds < DEADLINE_S
        assert near.closed


def test_chunks_wait_for_traffic_with_precedence_and_keep_the_rate_limit() -> None:
    turn, rate_limiter = threading.Event(), RateLimiter(4e6)
    with Fleet("ab", lambda: unix_pair(CONFIG), PeerLinkConfig(turn=turn, rate_limiter=rate_limiter)) as fleet:
        assert all(0 in outcome.failed for outcome in fleet.run(AttemptKey(0, 0), ["ab"], deadline_s=0.2).values())
        assert all(link.stats.sent.num_bytes < CHUNK for link in fleet.links["a"].values())
        turn.set()
        outcomes = fleet.run(AttemptKey(0, 1), ["ab"])
        fleet.check(["ab"])
        assert min(outcome.seconds for outcome in outcomes.values()) > 0.5 * 2 * 4 * SIZE / 4e6 - 0.1


def test_a_ring_without_a_link_is_rejected(tmp_path: Path) -> None:
    vector = np.ones(10, np.float32)
    contribution = Contribution(RingSpec(id=0, members=("a", "b"), me="a", weights=(1.0, 1.0)), vector, vector.copy())
    with Averager({}) as node, pytest.raises(ValueError, match="needs a link to b"):
        node.run(AttemptKey(0, 0), [contribution], deadline_s=1.0)
