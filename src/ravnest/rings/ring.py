"""One ring, as what to do next: no data, no clock, no I/O.

The vector is cut into as many chunks as there are members, chunk c = elements [c N / C, (c + 1) N / C), and chunks into
pieces. Member p sends to p + 1 and receives from p - 1:

    reduce, step k = 0 .. C - 2    sends chunk p - k,      adds what arrives to chunk p - k - 1
    gather, step k = 0 .. C - 2    sends chunk p + 1 - k,  copies what arrives to chunk p - k          (all modulo C)

After the reduce p has the whole sum of chunk p + 1, and the gather hands the sums round. So each member sends
2 (C - 1) / C of the vector. A piece that arrived and was added is sent on at once: steps overlap, and only a member's
first chunk can be sent before anything has arrived.

That keeps slow lines busy, but between two touches of a piece all others are touched, and no cache is that large. In
laps the vector is cut into stretches of C pieces, one a chunk each. Stretch n takes step k (of 2 C - 2) in turn n + k,
so few are under way at a time: members of one host find in the cache what the one before has just written there.

Links keep the order of what they carry and every member sends in the order of its steps, so exactly one piece can come
next. Any other (again, too early, out of range, from another split) is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from ravnest.core.config import require
from ravnest.core.errors import FrameError

__all__ = ["Action", "Add", "Copy", "Phase", "Ring", "Send", "Slot"]


class Phase(enum.IntEnum):
    """Adding up, then handing round."""

    REDUCE = 0
    GATHER = 1


class Slot(NamedTuple):
    """A piece that is to arrive, and the elements it is for."""

    phase: Phase
    step: int
    number: int
    lo: int
    hi: int


class Send(NamedTuple):
    """Send elements `lo` up to `hi` to the next member."""

    phase: Phase
    step: int
    number: int
    lo: int
    hi: int


class Add(NamedTuple):
    """Add what arrived to the elements `lo` up to `hi`."""

    lo: int
    hi: int


class Copy(NamedTuple):
    """What arrived is the final value of the elements `lo` up to `hi`."""

    lo: int
    hi: int


Action: TypeAlias = Add | Copy | Send


class Ring:
    """The ring as the member at `position` sees it. Told what arrived and what was sent; says what to do."""

    def __init__(
        self, position: int, num_members: int, num_elements: int, piece_elements: int, *, in_laps: bool = False
    ) -> None:
        require(0 <= position < num_members, f"position {position} is not one of {num_members} members")
        require(num_elements >= 0, f"a vector has 0 elements or more, not {num_elements}")
        require(piece_elements > 0, f"a piece has at least 1 element, not {piece_elements}")
        self._position, self._num_members = position, num_members
        self._num_elements, self._piece_elements, self._in_laps = num_elements, piece_elements, in_laps
        self._incoming = self._slots(position - 1)
        self._expected = next(self._incoming, None)
        self._outgoing = self._slots(position)
        self._next = next(self._outgoing, None)
        self._num_unsent = sum(1 for _ in self._slots(position))

    @property
    def expected(self) -> Slot | None:
        """The only piece that may arrive next; None when all have."""
        return self._expected

    @property
    def num_unsent(self) -> int:
        """Pieces that this member has still to send, ready or not."""
        return self._num_unsent

    @property
    def is_done(self) -> bool:
        return self._expected is None and self._num_unsent == 0

    def begin(self) -> tuple[Send, ...]:
        """What can be sent before anything has arrived: of this member's own. To be asked first, and once."""
        return tuple(self._own())

    def check(self, phase: Phase, step: int, number: int) -> Slot:
        """The slot of a piece that is about to arrive, if it is the one expected."""
        slot = self._expected
        if slot is None:
            raise FrameError(f"{_name(phase, step, number)} arrived, but this ring expects nothing more")
        if (phase, step, number) != slot[:3]:
            raise FrameError(f"{_name(phase, step, number)} arrived where {_name(*slot[:3])} is next")
        return slot

    def arrived(self, phase: Phase, step: int, number: int) -> tuple[Action, ...]:
        """What to do with the piece that arrived, in this order."""
        slot = self.check(phase, step, number)
        self._expected = next(self._incoming, None)
        work = Add(slot.lo, slot.hi) if phase is Phase.REDUCE else Copy(slot.lo, slot.hi)
        if phase is Phase.GATHER and step == self._num_members - 2:
            return (work,)  # it has been everywhere
        onward = self._next
        assert onward is not None
        assert onward[2:] == slot[2:], "pieces are sent on in the order in which they arrive"
        self._next = next(self._outgoing, None)
        return (work, Send(*onward), *self._own())

    def sent(self) -> None:
        """One piece more has been sent."""
        assert self._num_unsent > 0, "more pieces were sent than there are"
        self._num_unsent -= 1

    def _own(self) -> Iterator[Send]:
        """Pieces of this member's own that are next to be sent; they wait for nothing but their turn."""
        while self._next is not None and self._next[:2] == (Phase.REDUCE, 0):
            yield Send(*self._next)
            self._next = next(self._outgoing, None)

    def _slots(self, sender: int) -> Iterator[Slot]:
        """All that the member at this position sends, in order."""
        if self._num_members == 1:
            return
        stages = [(phase, step) for phase in Phase for step in range(self._num_members - 1)]
        pieces = [self._pieces((sender - step + (phase is Phase.GATHER)) % self._num_members) for phase, step in stages]
        if not self._in_laps:
            for (phase, step), spans in zip(stages, pieces, strict=True):
                for number, (lo, hi) in enumerate(spans):
                    yield Slot(phase, step, number, lo, hi)
            return
        for turn in range(max(map(len, pieces)) + len(stages) - 1):
            for late, (phase, step) in enumerate(stages):
                if 0 <= turn - late < len(pieces[late]):
                    yield Slot(phase, step, turn - late, *pieces[late][turn - late])

    def _pieces(self, chunk: int) -> list[tuple[int, int]]:
        lap = self._piece_elements * self._num_members if self._in_laps else max(self._num_elements, 1)
        found = []
        for start in range(0, self._num_elements, lap):
            length = min(lap, self._num_elements - start)
            lo, hi = (start + c * length // self._num_members for c in (chunk, chunk + 1))
            found += [(at, min(at + self._piece_elements, hi)) for at in range(lo, hi, self._piece_elements)]
        return found


def _name(phase: Phase, step: int, number: int) -> str:
    return f"piece {number} of {phase.name.lower()} step {step}"
