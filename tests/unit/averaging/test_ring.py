"""The ring schedule: every chunk that is sent is expected, sizes follow the formula, other chunks are rejected."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.averaging.ring import RingSchedule, SendChunk
from ravnest.errors import FrameError
from ravnest.protocol.averaging import Phase

SIZES = st.tuples(st.integers(1, 7), st.integers(0, 200), st.integers(1, 60))


def play(
    num_members: int, num_elements: int, chunk_elements: int
) -> tuple[list[RingSchedule], list[list[SendChunk]], list[Counter[int]]]:
    """Run a ring; returns its members, the chunks each sent, and how often each added each element."""
    rings = [RingSchedule(p, num_members, num_elements, chunk_elements) for p in range(num_members)]
    sent: list[list[SendChunk]] = [[] for _ in rings]
    added: list[Counter[int]] = [Counter() for _ in rings]
    waiting = deque((p, send) for p, ring in enumerate(rings) for send in ring.begin())
    while waiting:
        p, send = waiting.popleft()
        rings[p].sent()
        sent[p].append(send)
        receiver = (p + 1) % num_members
        assert tuple(rings[receiver].expected or ()) == tuple(send)
        if send.phase is Phase.REDUCE:
            added[receiver].update(range(send.lo, send.hi))
        onward = rings[receiver].arrived(send.phase, send.step, send.number)
        if onward is not None:
            waiting.append((receiver, onward))
    return rings, sent, added


@given(SIZES)
def test_all_members_finish_and_every_element_is_added_once_by_each_other(sizes: tuple[int, int, int]) -> None:
    num_members, num_elements, _ = sizes
    rings, _, added = play(*sizes)
    assert all(ring.is_done and ring.expected is None for ring in rings)
    total = sum(added, Counter[int]())
    assert total == Counter({i: num_members - 1 for i in range(num_elements) if num_members > 1})
    assert all(count == 1 for counter in added for count in counter.values())


@given(SIZES)
def test_a_member_sends_as_many_elements_as_the_formula_says(sizes: tuple[int, int, int]) -> None:
    num_members, num_elements, _ = sizes
    _, sent, _ = play(*sizes)
    expected = 2 * (num_members - 1) / num_members * num_elements
    for chunks in sent:
        assert abs(sum(chunk.hi - chunk.lo for chunk in chunks) - expected) <= 2


def test_a_member_alone_is_done_at_once() -> None:
    ring = RingSchedule(0, 1, 1000, 10)
    assert ring.is_done
    assert ring.begin() == ()


def test_a_chunk_is_sent_on_before_the_next_has_arrived() -> None:
    ring = RingSchedule(0, 3, 90, 10)
    assert ring.begin() == tuple(SendChunk(Phase.REDUCE, 0, n, 10 * n, 10 * n + 10) for n in range(3))
    assert ring.arrived(Phase.REDUCE, 0, 0) == SendChunk(Phase.REDUCE, 1, 0, 60, 70)
    for number in (1, 2):
        ring.arrived(Phase.REDUCE, 0, number)
    assert ring.arrived(Phase.REDUCE, 1, 0) == SendChunk(Phase.GATHER, 0, 0, 30, 40)


@given(SIZES, st.sampled_from(Phase), st.integers(0, 8), st.integers(0, 8), st.integers(0, 20))
def test_only_the_next_chunk_is_accepted(
    sizes: tuple[int, int, int], phase: Phase, step: int, number: int, skip: int
) -> None:
    ring = RingSchedule(0, *sizes)
    for _ in range(skip):
        if ring.expected is not None:
            ring.arrived(*ring.expected[:3])
    expected = ring.expected
    if expected is not None and (phase, step, number) == expected[:3]:
        ring.arrived(phase, step, number)
    with pytest.raises(FrameError, match=r"expected|arrived already"):
        ring.arrived(phase, step, number)


@pytest.mark.parametrize("sizes", [(2, 2, 10, 1), (-1, 2, 10, 1), (0, 2, -1, 1), (0, 2, 10, 0)])
def test_invalid_sizes_are_rejected(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        RingSchedule(*sizes)
