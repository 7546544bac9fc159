"""One ring, as what to do next: no data, no clock, no I/O.

The vector is cut into as many chunks as there are members, chunk c = elements [c N / C, (c + 1) N / C), and chunks into
pieces. Member p sends to p + 1 and receives from p - 1:

    reduce, step k = 0 .. C - 2    sends chunk p - k,      adds what arrives to chunk p - k - 1
    gather, step k = 0 .. C - 2    sends chunk p + 1 - k,  copies what arrives to chunk p - k          (all modulo C)

After the reduce p has the whole sum of chunk p + 1, and the gather hands the sums round. So each member sends
2 (C - 1) / C of the vector. A piece that arrived and was added is sent on at once: steps overlap, and only a member's
first chunk can be sent before anything has arrived.

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

    def __init__(self, position: int, num_members: int, num_elements: int, piece_elements: int) -> None:
        require(0 <= position < num_members, f"position {position} is not one of {num_members} members")
        require(num_elements >= 0, f"a vector has 0 elements or more, not {num_elements}")
        require(piece_elements > 0, f"a piece has at least 1 element, not {piece_elements}")
        self._position, self._num_members = position, num_members
        self._num_elements, self._piece_elements = num_elements, piece_elements
        self._incoming = self._slots()
        self._expected = next(self._incoming, None)
        self._num_unsent = self._count_sends()

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
        """What can be sent before anything has arrived: this member's own chunk."""
        if self._num_members == 1:
            return ()
        pieces = enumerate(self._pieces(self._position))
        return tuple(Send(Phase.REDUCE, 0, number, lo, hi) for number, (lo, hi) in pieces)

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
        onward = self._onward(slot)
        return (work,) if onward is None else (work, onward)

    def sent(self) -> None:
        """One piece more has been sent."""
        assert self._num_unsent > 0, "more pieces were sent than there are"
        self._num_unsent -= 1

    def _onward(self, slot: Slot) -> Send | None:
        """A piece goes round until it has been everywhere; the last sum begins the gather."""
        _, step, number, lo, hi = slot
        if step < self._num_members - 2:
            return Send(slot.phase, step + 1, number, lo, hi)
        return Send(Phase.GATHER, 0, number, lo, hi) if slot.phase is Phase.REDUCE else None

    def _slots(self) -> Iterator[Slot]:
        """All that will arrive, in order."""
        for phase in Phase:
            for step in range(self._num_members - 1):
                chunk = (self._position - step - (phase is Phase.REDUCE)) % self._num_members
                for number, (lo, hi) in enumerate(self._pieces(chunk)):
                    yield Slot(phase, step, number, lo, hi)

    def _pieces(self, chunk: int) -> Iterator[tuple[int, int]]:
        lo, hi = self._bounds(chunk)
        for start in range(lo, hi, self._piece_elements):
            yield start, min(start + self._piece_elements, hi)

    def _bounds(self, chunk: int) -> tuple[int, int]:
        whole, members = self._num_elements, self._num_members
        return chunk * whole // members, (chunk + 1) * whole // members

    def _count_sends(self) -> int:
        """In the reduce every chunk but the next member's p + 1, in the gather every chunk but p + 2."""
        counts = []
        for chunk in range(self._num_members):
            lo, hi = self._bounds(chunk)
            counts.append(-((lo - hi) // self._piece_elements))
        kept = counts[(self._position + 1) % self._num_members] + counts[(self._position + 2) % self._num_members]
        return 2 * sum(counts) - kept if self._num_members > 1 else 0


def _name(phase: Phase, step: int, number: int) -> str:
    return f"piece {number} of {phase.name.lower()} step {step}"
