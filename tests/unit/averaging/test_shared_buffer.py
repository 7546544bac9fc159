"""Members of one host that read chunks in each other's memory; invalid offsets close the link."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from ravnest.averaging.averager import Averager, RoundOutcome
from ravnest.averaging.codec import Floats
from ravnest.averaging.contribution import Contribution, digest
from ravnest.averaging.ring import RingSpec
from ravnest.averaging.session import AttemptKey
from ravnest.averaging.shared_memory import SharedBuffer, SharedLink, is_available, map_peer_buffer
from ravnest.errors import BadContribution, HandshakeError
from ravnest.protocol.averaging import AttemptReady, Chunk, ChunkTaken, Message, Phase
from ravnest.transport.link import LinkConfig
from tests.unit.averaging.shared_pair import shared_pair

pytestmark = pytest.mark.skipif(not is_available(), reason="needs memfd, eventfd and descriptor passing")

CONFIG = LinkConfig(headers=Message)
DEADLINE_S = 60.0
SIZE = 200_000


def spec(me: str, members: str, codec: str = "fp32") -> RingSpec:
    weights = tuple(float(1 + i) for i in range(len(members)))
    return RingSpec(id=0, members=tuple(members), me=me, weights=weights, codec=codec, chunk_elements=4096)


class Host:
    """Members of one ring on one host; each averages its vector in place, in its shared buffer."""

    def __init__(self, members: str) -> None:
        self.members = members
        self.buffers = {m: SharedBuffer(4 * SIZE) for m in members}
        self.vectors: dict[str, Floats] = {m: buffer.floats(SIZE) for m, buffer in self.buffers.items()}
        self.links: dict[str, dict[str, SharedLink]] = {m: {} for m in members}
        for a, b in zip(members, members[1:] + members[0], strict=True):
            if b not in self.links[a]:
                self.links[a][b], self.links[b][a] = shared_pair(CONFIG, (self.buffers[a], self.buffers[b]))
        self.nodes = {m: Averager(self.links[m]) for m in members}
        for i, vector in enumerate(self.vectors.values()):
            vector[:] = np.random.default_rng(i).standard_normal(SIZE)

    def run(self, number: int, codec: str = "fp32") -> dict[str, RoundOutcome]:
        def average(me: str) -> RoundOutcome:
            contribution = Contribution(spec(me, self.members, codec), self.vectors[me], self.vectors[me])
            return self.nodes[me].run(AttemptKey(number, 0), [contribution], deadline_s=DEADLINE_S)

        with ThreadPoolExecutor(len(self.members)) as pool:
            return dict(zip(self.members, pool.map(average, self.members), strict=True))


@contextmanager
def host_of(members: str) -> Iterator[Host]:
    result = Host(members)
    for node in result.nodes.values():
        node.__enter__()
    try:
        yield result
    finally:
        for member, node in result.nodes.items():
            node.close()
            result.buffers[member].close()


@pytest.mark.parametrize("members", ["ab", "abc", "abcd"])
def test_members_average_round_after_round_and_send_headers_only(members: str) -> None:
    with host_of(members) as host:
        for number in range(3):
            weights = spec("a", members).weights
            expected = sum(host.vectors[m].astype(np.float64) * w for m, w in zip(members, weights, strict=True))
            outcomes = host.run(number)
            assert not any(outcome.failed for outcome in outcomes.values())
            assert len({digest(vector) for vector in host.vectors.values()}) == 1
            np.testing.assert_allclose(host.vectors["a"], expected / sum(weights), atol=1e-6)
            half = 2 * (len(members) - 1) / len(members)
            assert outcomes["a"].sent_bytes == pytest.approx(4 * SIZE * half, rel=0.01)
        assert sum(link.stats.sent.num_bytes for link in host.links["a"].values()) < 0.1 * SIZE


def test_encoded_chunks_are_sent() -> None:
    with host_of("abc") as host:
        assert not any(outcome.failed for outcome in host.run(0, "int8").values())
        assert len({digest(vector) for vector in host.vectors.values()}) == 1
        assert sum(link.stats.sent.num_bytes for link in host.links["a"].values()) > SIZE


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1])
def test_numbers_that_are_not_finite_are_reported_to_all(value: float, place: int) -> None:
    with host_of("abc") as host:
        host.vectors["b"][place] = value
        for outcome in host.run(0).values():
            assert isinstance(outcome.failed[0], BadContribution)
            assert outcome.failed[0].member == "b"


def test_both_neighbours_notice_a_dead_member() -> None:
    with host_of("abc") as host:
        host.nodes["c"].close()
        for me in "ab":
            contribution = Contribution(spec(me, "abc"), host.vectors[me], host.vectors[me])
            outcome = host.nodes[me].run(AttemptKey(0, 0), [contribution], deadline_s=DEADLINE_S)
            assert outcome.failed[0].member == "c"
            assert outcome.seconds < DEADLINE_S / 2


@contextmanager
def member_a(buffer: SharedBuffer, vector: Floats) -> Iterator[tuple[SharedLink, Averager, Contribution]]:
    """Member a of a ring of two, and the link end of the missing member b."""
    near, far = shared_pair(CONFIG, (buffer, SharedBuffer(4096)))
    with Averager({"b": near}) as node, far:
        yield far, node, Contribution(spec("a", "ab"), vector, vector)


def test_a_member_is_not_done_before_all_published_chunks_are_read() -> None:
    buffer = SharedBuffer(4 * 100)
    vector = buffer.floats(100)
    vector.fill(1)
    with member_a(buffer, vector) as (far, node, contribution), ThreadPoolExecutor(1) as pool:
        running = pool.submit(node.run, AttemptKey(0, 0), [contribution], deadline_s=2.0)
        far.send(AttemptReady(0, 0, 0), deadline_s=DEADLINE_S)
        far.send(Chunk(0, 0, 0, Phase.REDUCE, 0, 0, offset=0), deadline_s=DEADLINE_S)
        far.send(Chunk(0, 0, 0, Phase.GATHER, 0, 0, offset=0), deadline_s=DEADLINE_S)
        failure = running.result(DEADLINE_S).failed[0]
        assert failure.member == "b"
        assert "had not read all published chunks" in failure.why


@pytest.mark.parametrize(
    "message",
    [
        Chunk(0, 0, 0, Phase.REDUCE, 0, 0, offset=4096),  # outside of the buffer
        Chunk(0, 0, 0, Phase.REDUCE, 0, 0, offset=2),  # not aligned
        Chunk(0, 0, 0, Phase.REDUCE, 0, 1, offset=0),  # not the next chunk
        ChunkTaken(0, 0, 0),  # before anything was published
        ChunkTaken(0, 0, 7),  # of an unknown ring
    ],
)
def test_an_invalid_offset_or_acknowledgement_closes_the_link(message: Message) -> None:
    buffer = SharedBuffer(4 * 100_000)
    vector = buffer.floats(100_000)
    vector.fill(1)
    with member_a(buffer, vector) as (far, node, contribution), ThreadPoolExecutor(1) as pool:
        running = pool.submit(node.run, AttemptKey(0, 0), [contribution], deadline_s=DEADLINE_S)
        assert far.receive(lambda header, lengths: [], deadline_s=DEADLINE_S) == AttemptReady(0, 0, 0)
        far.send(message, deadline_s=DEADLINE_S)
        assert running.result(DEADLINE_S).failed[0].member == "b"


def test_offsets_of_arrays() -> None:
    buffer = SharedBuffer(1024)
    first, second = buffer.floats(3), buffer.floats(5)
    assert (buffer.offset_of(first), buffer.offset_of(second), buffer.offset_of(second[2:])) == (0, 64, 72)
    assert buffer.offset_of(np.zeros(4, np.float32)) is None
    second[:] = 7.0
    mapped = map_peer_buffer(buffer.fd, "b")
    np.testing.assert_array_equal(mapped[64:84].view(np.float32), second)
    assert not mapped.flags.writeable
    with pytest.raises(ValueError, match="does not fit"):
        buffer.floats(300)
    buffer.close()


def test_a_buffer_that_is_not_sealed_is_rejected() -> None:
    memory = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    with pytest.raises(HandshakeError, match="not sealed"):
        map_peer_buffer(memory, "b")
    os.close(memory)
