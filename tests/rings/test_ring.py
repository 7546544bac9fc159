"""The ring as a state machine: all that is sent is expected, the bytes are as the formula says, the rest is refused."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.core.errors import FrameError
from ravnest.rings.ring import Add, Copy, Phase, Ring, Send

SIZES = st.tuples(st.integers(1, 7), st.integers(0, 200), st.integers(1, 60))


def play(
    num_members: int, num_elements: int, piece_elements: int
) -> tuple[list[Ring], list[list[Send]], list[Counter[int]]]:
    """All members of a ring; what each sent, and how often each element was added at each."""
    rings = [Ring(p, num_members, num_elements, piece_elements) for p in range(num_members)]
    sent: list[list[Send]] = [[] for _ in rings]
    added: list[Counter[int]] = [Counter() for _ in rings]
    waiting = deque((p, send) for p, ring in enumerate(rings) for send in ring.begin())
    while waiting:
        p, send = waiting.popleft()
        rings[p].sent()
        sent[p].append(send)
        receiver = (p + 1) % num_members
        for action in rings[receiver].arrived(send.phase, send.step, send.number):
            match action:
                case Send():
                    waiting.append((receiver, action))
                case Add(lo, hi) | Copy(lo, hi):
                    assert (lo, hi) == (send.lo, send.hi)
                    if isinstance(action, Add):
                        added[receiver].update(range(lo, hi))
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
def test_a_member_sends_what_the_formula_says(sizes: tuple[int, int, int]) -> None:
    num_members, num_elements, _ = sizes
    _, sent, _ = play(*sizes)
    wanted = 2 * (num_members - 1) / num_members * num_elements
    for pieces in sent:
        assert abs(sum(piece.hi - piece.lo for piece in pieces) - wanted) <= 2


def test_a_member_alone_is_done_at_once() -> None:
    ring = Ring(0, 1, 1000, 10)
    assert ring.is_done
    assert ring.begin() == ()


def test_a_piece_is_sent_on_before_the_next_has_arrived() -> None:
    ring = Ring(0, 3, 90, 10)
    assert ring.begin() == tuple(Send(Phase.REDUCE, 0, n, 10 * n, 10 * n + 10) for n in range(3))
    assert ring.arrived(Phase.REDUCE, 0, 0) == (Add(60, 70), Send(Phase.REDUCE, 1, 0, 60, 70))
    for number in (1, 2):
        ring.arrived(Phase.REDUCE, 0, number)
    assert ring.arrived(Phase.REDUCE, 1, 0) == (Add(30, 40), Send(Phase.GATHER, 0, 0, 30, 40))


@given(SIZES, st.sampled_from(Phase), st.integers(0, 8), st.integers(0, 8), st.integers(0, 20))
def test_only_the_next_piece_is_taken(
    sizes: tuple[int, int, int], phase: Phase, step: int, number: int, skip: int
) -> None:
    ring = Ring(0, *sizes)
    for _ in range(skip):
        if ring.expected is not None:
            ring.arrived(*ring.expected[:3])
    expected = ring.expected
    if expected is not None and (phase, step, number) == expected[:3]:
        ring.arrived(phase, step, number)
    with pytest.raises(FrameError, match=r"is next|nothing more"):
        ring.arrived(phase, step, number)


@pytest.mark.parametrize("sizes", [(2, 2, 10, 1), (-1, 2, 10, 1), (0, 2, -1, 1), (0, 2, 10, 0)])
def test_sizes_that_make_no_ring_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"position|elements|element"):
        Ring(*sizes)
