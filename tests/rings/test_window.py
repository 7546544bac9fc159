"""Members of one host that read each other's memory: nothing is sent but words, and who lends wrongly is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from ravnest.core.errors import HandshakeError
from ravnest.net.link import LinkConfig
from ravnest.rings.attempt import Key
from ravnest.rings.averaging import Averaging, Outcome
from ravnest.rings.codec import Floats
from ravnest.rings.digest import digest
from ravnest.rings.errors import BadContribution
from ravnest.rings.messages import Message, Piece, Ready, Taken
from ravnest.rings.part import Part
from ravnest.rings.ring import Phase
from ravnest.rings.shared import SharedLink, is_available, shared_pair
from ravnest.rings.spec import RingSpec
from ravnest.rings.window import Window, see

pytestmark = pytest.mark.skipif(not is_available(), reason="this system shares no memory by socket")

CONFIG = LinkConfig(headers=Message)
DEADLINE_S = 20.0
SIZE = 200_000


def spec(me: str, members: str, codec: str = "fp32") -> RingSpec:
    weights = tuple(float(1 + i) for i in range(len(members)))
    return RingSpec(id=0, members=tuple(members), me=me, weights=weights, codec=codec, piece_elements=4096)


class House:
    """Members of one host in a ring; each averages its vector in place, in its window."""

    def __init__(self, members: str) -> None:
        self.members = members
        self.windows = {m: Window(4 * SIZE) for m in members}
        self.vectors: dict[str, Floats] = {m: window.floats(SIZE) for m, window in self.windows.items()}
        self.links: dict[str, dict[str, SharedLink]] = {m: {} for m in members}
        for a, b in zip(members, members[1:] + members[0], strict=True):
            if b not in self.links[a]:
                self.links[a][b], self.links[b][a] = shared_pair(CONFIG, (self.windows[a], self.windows[b]))
        self.nodes = {m: Averaging(self.links[m]) for m in members}
        for i, vector in enumerate(self.vectors.values()):
            vector[:] = np.random.default_rng(i).standard_normal(SIZE)

    def run(self, number: int, codec: str = "fp32") -> dict[str, Outcome]:
        def average(me: str) -> Outcome:
            part = Part(spec(me, self.members, codec), self.vectors[me], self.vectors[me])
            return self.nodes[me].run(Key(number, 0), [part], deadline_s=DEADLINE_S)

        with ThreadPoolExecutor(len(self.members)) as pool:
            return dict(zip(self.members, pool.map(average, self.members), strict=True))


@contextmanager
def house(members: str) -> Iterator[House]:
    made = House(members)
    for node in made.nodes.values():
        node.__enter__()
    try:
        yield made
    finally:
        for member, node in made.nodes.items():
            node.close()
            made.windows[member].close()


@pytest.mark.parametrize("members", ["ab", "abc", "abcd"])
def test_members_average_round_after_round_and_send_words_only(members: str) -> None:
    with house(members) as here:
        for number in range(3):
            weights = spec("a", members).weights
            wanted = sum(here.vectors[m].astype(np.float64) * w for m, w in zip(members, weights, strict=True))
            outcomes = here.run(number)
            assert not any(outcome.failed for outcome in outcomes.values())
            assert len({digest(vector) for vector in here.vectors.values()}) == 1
            np.testing.assert_allclose(here.vectors["a"], wanted / sum(weights), atol=1e-6)
            half = 2 * (len(members) - 1) / len(members)
            assert outcomes["a"].sent_bytes == pytest.approx(4 * SIZE * half, rel=0.01)
        assert sum(link.stats.sent.num_bytes for link in here.links["a"].values()) < 0.1 * SIZE


def test_what_is_encoded_is_sent() -> None:
    with house("abc") as here:
        assert not any(outcome.failed for outcome in here.run(0, "int8").values())
        assert len({digest(vector) for vector in here.vectors.values()}) == 1
        assert sum(link.stats.sent.num_bytes for link in here.links["a"].values()) > SIZE


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1])
def test_numbers_that_are_not_finite_are_named_to_all(value: float, place: int) -> None:
    with house("abc") as here:
        here.vectors["b"][place] = value
        for outcome in here.run(0).values():
            assert isinstance(outcome.failed[0], BadContribution)
            assert outcome.failed[0].member == "b"


def test_a_member_that_is_dead_is_noticed_by_those_it_lent_to_and_borrowed_from() -> None:
    with house("abc") as here:
        here.nodes["c"].close()
        for me in "ab":
            part = Part(spec(me, "abc"), here.vectors[me], here.vectors[me])
            outcome = here.nodes[me].run(Key(0, 0), [part], deadline_s=DEADLINE_S)
            assert outcome.failed[0].member == "c"
            assert outcome.seconds < DEADLINE_S / 2


@contextmanager
def alone(window: Window, vector: Floats) -> Iterator[tuple[SharedLink, Averaging, Part]]:
    """Member a of a ring of two, and the end of the link where b should be."""
    near, far = shared_pair(CONFIG, (window, Window(4096)))
    with Averaging({"b": near}) as node, far:
        yield far, node, Part(spec("a", "ab"), vector, vector)


def test_a_member_is_not_done_before_all_that_it_lent_was_taken() -> None:
    window = Window(4 * 100)
    vector = window.floats(100)
    vector.fill(1)
    with alone(window, vector) as (far, node, part), ThreadPoolExecutor(1) as pool:
        running = pool.submit(node.run, Key(0, 0), [part], deadline_s=0.5)
        far.send(Ready(0, 0, 0), deadline_s=DEADLINE_S)
        far.send(Piece(0, 0, 0, Phase.REDUCE, 0, 0, at=0), deadline_s=DEADLINE_S)
        far.send(Piece(0, 0, 0, Phase.GATHER, 0, 0, at=0), deadline_s=DEADLINE_S)
        failure = running.result(DEADLINE_S).failed[0]
        assert failure.member == "b"
        assert "had not taken all that was lent" in failure.why


@pytest.mark.parametrize(
    "message",
    [
        Piece(0, 0, 0, Phase.REDUCE, 0, 0, at=4096),  # outside
        Piece(0, 0, 0, Phase.REDUCE, 0, 0, at=2),  # between two numbers
        Piece(0, 0, 0, Phase.REDUCE, 0, 1, at=0),  # not the next
        Taken(0, 0, 0),  # of what was not lent yet
        Taken(0, 0, 7),  # of no ring of theirs
    ],
)
def test_who_lends_or_takes_wrongly_loses_the_link(message: Message) -> None:
    window = Window(4 * 100_000)
    vector = window.floats(100_000)
    vector.fill(1)
    with alone(window, vector) as (far, node, part), ThreadPoolExecutor(1) as pool:
        running = pool.submit(node.run, Key(0, 0), [part], deadline_s=DEADLINE_S)
        assert far.receive(lambda header, lengths: [], deadline_s=DEADLINE_S) == Ready(0, 0, 0)
        far.send(message, deadline_s=DEADLINE_S)
        assert running.result(DEADLINE_S).failed[0].member == "b"


def test_arrays_are_found_where_they_lie_and_elsewhere_not() -> None:
    window = Window(1024)
    first, second = window.floats(3), window.floats(5)
    assert (window.find(first), window.find(second), window.find(second[2:])) == (0, 64, 72)
    assert window.find(np.zeros(4, np.float32)) is None
    second[:] = 7.0
    seen = see(window.fd, "b")
    np.testing.assert_array_equal(seen[64:84].view(np.float32), second)
    assert not seen.flags.writeable
    with pytest.raises(ValueError, match="no room"):
        window.floats(300)
    window.close()


def test_a_window_that_could_vanish_is_refused() -> None:
    memory = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    with pytest.raises(HandshakeError, match="could vanish"):
        see(memory, "b")
    os.close(memory)
