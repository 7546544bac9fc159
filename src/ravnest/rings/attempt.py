"""All rings of a node in one attempt of a round: what messages and lost peers do to them. No clock, no I/O.

    wait for Ready of the next --> pieces arrive and go on --> done
          |                              |
          +------------ failed ----------+     a peer that this ring still needs is gone, said Stop, brought numbers
                                               that are not finite, or the time is over

A ring that fails says `Stop` to both neighbours, who do the same: nobody waits for what will not come. Other rings go
on. What is to be sent is given to `post`, so the same code runs over links and in tests.

A member that has lent pieces (they lie in its window, see `part`) is done only when the next has taken them all. If it
fails before, the next may read half of another attempt: then there is no result that all have, and nobody uses one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ravnest.core.errors import FrameError
from ravnest.rings.codec import Desk, Floats
from ravnest.rings.errors import BadContribution, RingFailed
from ravnest.rings.messages import Message, Piece, Ready, Stop, Taken
from ravnest.rings.part import Part
from ravnest.rings.ring import Send, Slot

__all__ = ["Attempt", "Key", "Outgoing", "Post", "Seat"]


class Key(NamedTuple):
    """Which round, and which attempt at it; later ones are greater."""

    round: int
    attempt: int


class Seat:
    """A part, and how it stands. `inside` names the peers whose threads are at its memory now."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.is_ready = False
        self.is_lent = False  # until the next member has taken all
        self.held: list[Send] = []  # until the next member is ready
        self.failure: RingFailed | None = None
        self.inside: list[str] = []

    @property
    def is_open(self) -> bool:
        return self.failure is None and (self.is_lent or not self.part.ring.is_done)

    def needs(self, peer: str) -> bool:
        """Whether anything has still to come from `peer` or to go there."""
        spec, ring = self.part.spec, self.part.ring
        is_before = spec.before == peer and ring.expected is not None
        return is_before or (spec.after == peer and (self.is_lent or ring.num_unsent > 0))


class Outgoing(NamedTuple):
    """A message for `peer`; with a piece of `seat` behind it if there is a `send`."""

    peer: str
    header: Message
    seat: Seat | None = None
    send: Send | None = None


Post: TypeAlias = Callable[[Outgoing], None]


class Attempt:
    """`changed` guards the state of all seats, and is told when it changes; numbers are worked on outside of it."""

    def __init__(self, key: Key, parts: Sequence[Part], post: Post, changed: threading.Condition) -> None:
        self.key, self._post, self._changed = key, post, changed
        self.seats = {part.spec.id: Seat(part) for part in parts}

    @property
    def is_settled(self) -> bool:
        """Every ring is done or has failed."""
        return not any(seat.is_open for seat in self.seats.values())

    @property
    def inside(self) -> list[str]:
        """Peers whose threads are at the memory of rings."""
        return [peer for seat in self.seats.values() for peer in seat.inside]

    @property
    def failures(self) -> dict[int, RingFailed]:
        return {ring: seat.failure for ring, seat in self.seats.items() if seat.failure is not None}

    def open(self, lost: Mapping[str, str]) -> None:
        """Tell the members before that this node is here, unless a neighbour is known to be lost."""
        for seat in self.seats.values():
            if len(seat.part.spec.members) == 1:
                self._average_alone(seat)
        for seat in self._open_seats():
            gone = [peer for peer in (seat.part.spec.before, seat.part.spec.after) if peer in lost]
            if gone:
                self._fail(seat, RingFailed(seat.part.spec.id, gone[0], lost[gone[0]]))
            else:
                self._post(Outgoing(seat.part.spec.before, Ready(*self.key, seat.part.spec.id)))

    def ready(self, peer: str, ring: int) -> None:
        """The next member is there: what can be sent at once is."""
        with self._changed:
            seat = self._seat(ring, peer, of="after")
            if seat.failure is not None:  # it may have come too late to hear of it
                self._post(Outgoing(peer, self._stop(seat.failure)))
                return
            if seat.is_ready:
                raise FrameError(f"{peer} said twice that it is ready for ring {ring}")
            seat.is_ready = True
            for send in (*seat.part.begin(), *seat.held):
                self._post(self._outgoing(seat, send))

    def enter(self, peer: str, piece: Piece, lengths: tuple[int, ...]) -> tuple[Seat, Slot] | None:
        """The place of a piece that is about to arrive; None if its ring has failed. `leave` when done with it."""
        with self._changed:
            seat = self._seat(piece.ring, peer, of="before")
            if seat.failure is not None:
                return None
            slot = seat.part.check(piece, lengths)
            seat.inside.append(peer)
            return seat, slot

    def take(self, seat: Seat, slot: Slot, desk: Desk, lent: Floats | None = None) -> Taken | None:
        """The piece is in its room, or lent; what to tell its sender when it was the last of those."""
        try:
            send = seat.part.take(slot, desk, lent)
        except BadContribution as bad:
            self._fail(seat, bad)
            return None
        if send is not None:
            self._send(seat, send)
        is_last = lent is not None and seat.part.ring.expected is None
        return Taken(*self.key, seat.part.spec.id) if is_last else None

    def lend(self, seat: Seat) -> bool:
        """A piece is about to be lent: the seat is open until all are taken. False if the ring has failed.

        `leave` when the next member has been told.
        """
        with self._changed:
            if seat.failure is not None:
                return False
            seat.is_lent = True
            seat.inside.append(seat.part.spec.after)
            return True

    def taken(self, peer: str, ring: int) -> None:
        """The next member has read all that was lent to it."""
        with self._changed:
            seat = self._seat(ring, peer, of="after")
            if seat.part.ring.num_unsent > 1:  # the last may not be counted yet
                raise FrameError(f"{peer} has taken all pieces of ring {ring} before they were lent")
            seat.is_lent = False
            self._changed.notify_all()

    def load(self, seat: Seat, send: Send, desk: Desk) -> memoryview | None:
        """The bytes to send; None if the ring has failed. `leave` when done with them."""
        with self._changed:
            if seat.failure is not None:
                return None
            seat.inside.append(seat.part.spec.after)
        try:
            return seat.part.load(send, desk)
        except BadContribution as bad:
            self._fail(seat, bad)
            self.leave(seat, seat.part.spec.after)
            return None

    def leave(self, seat: Seat, peer: str) -> None:
        """The thread of `peer` has left the memory of the seat."""
        with self._changed:
            seat.inside.remove(peer)
            if not seat.is_open:
                self._changed.notify_all()

    def stop(self, peer: str, stop: Stop) -> None:
        """A neighbour says that a ring has failed."""
        with self._changed:
            seat = self.seats.get(stop.ring)
            if seat is None or peer not in (seat.part.spec.before, seat.part.spec.after):
                raise FrameError(f"{peer} stops ring {stop.ring}, in which it is not next to this node")
            kind = BadContribution if stop.bad else RingFailed
            self._fail(seat, kind(stop.ring, stop.member or peer, stop.why), told_by=peer)

    def lose(self, peer: str, why: str) -> None:
        """The link to `peer` is gone: rings that still need it fail, others go on."""
        for seat in self._open_seats():
            if seat.needs(peer):
                self._fail(seat, RingFailed(seat.part.spec.id, peer, why))

    def expire(self, seconds: float) -> None:
        """The time is over for all that are still open."""
        for seat in self._open_seats():
            member, why = _awaited(seat)
            self._fail(seat, RingFailed(seat.part.spec.id, member, f"after {seconds:g} s {why}"))

    def _seat(self, ring: int, peer: str, *, of: str) -> Seat:
        seat = self.seats.get(ring)
        if seat is None or getattr(seat.part.spec, of) != peer:
            raise FrameError(f"{peer} sent a message of ring {ring}, in which it is not the member {of} this node")
        return seat

    def _open_seats(self) -> Iterator[Seat]:
        return (seat for seat in self.seats.values() if seat.is_open)

    def _fail(self, seat: Seat, failure: RingFailed, told_by: str | None = None) -> None:
        with self._changed:
            if not seat.is_open:
                return
            seat.failure = failure
            self._changed.notify_all()
        for peer in sorted({seat.part.spec.before, seat.part.spec.after} - {told_by}):
            self._post(Outgoing(peer, self._stop(failure)))

    def _average_alone(self, seat: Seat) -> None:
        try:
            seat.part.begin()
        except BadContribution as bad:
            seat.failure = bad

    def _send(self, seat: Seat, send: Send) -> None:
        with self._changed:
            if seat.is_ready:
                self._post(self._outgoing(seat, send))
            else:
                seat.held.append(send)

    def _outgoing(self, seat: Seat, send: Send) -> Outgoing:
        header = Piece(*self.key, seat.part.spec.id, send.phase, send.step, send.number)
        return Outgoing(seat.part.spec.after, header, seat, send)

    def _stop(self, failure: RingFailed) -> Stop:
        is_bad = isinstance(failure, BadContribution)
        return Stop(*self.key, failure.ring, failure.member, failure.why[:1000], is_bad)


def _awaited(seat: Seat) -> tuple[str, str]:
    """Whom an open ring waits for, in words."""
    spec, slot = seat.part.spec, seat.part.ring.expected
    if not seat.is_ready:
        return spec.after, f"{spec.after} was not there yet"
    if slot is not None:
        return spec.before, f"{spec.before} had not sent piece {slot.number} of {slot.phase.name.lower()} {slot.step}"
    if seat.part.ring.num_unsent == 0:
        return spec.after, f"{spec.after} had not taken all that was lent to it"
    return spec.after, f"{spec.after} had not taken the last {seat.part.ring.num_unsent} pieces"
