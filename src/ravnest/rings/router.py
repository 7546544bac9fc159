"""Which attempt a message is for: the one that is open, an older one (dropped), or one that is still to come.

A member sends only to one that said `Ready`, so a piece is never early; `Ready` itself may be, and is kept until its
attempt opens here. A `Ready` for an attempt that is over here is answered with `Stop`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from ravnest.core.config import require
from ravnest.core.errors import FrameError
from ravnest.rings.attempt import Attempt, Key, Outgoing, Post, Seat
from ravnest.rings.codec import Bytes, Desk, Floats
from ravnest.rings.messages import Message, Piece, Ready, Stop, Taken
from ravnest.rings.part import Part
from ravnest.rings.ring import Slot

__all__ = ["Reception", "Router"]

_MAX_EARLY = 4096  # rings that one peer may announce ahead


class Router:
    """Used by the threads of all links and by the one that runs attempts."""

    def __init__(self, post: Post) -> None:
        self.changed = threading.Condition()
        self.attempt = Attempt(Key(-1, -1), (), post, self.changed)
        self._post = post
        self._early: dict[str, tuple[Key, set[int]]] = {}  # of each peer the latest
        self._lost: dict[str, str] = {}

    def open(self, key: Key, parts: Sequence[Part]) -> Attempt:
        """Begin an attempt; the one before must be settled, and older than this."""
        with self.changed:
            require(key > self.attempt.key, f"{key} is not after {self.attempt.key}")
            require(self.attempt.is_settled and not self.attempt.inside, f"{self.attempt.key} is still going on")
            self.attempt = Attempt(key, parts, self._post, self.changed)
            self.attempt.open(self._lost)
            for peer, (early, rings) in sorted(self._early.items()):
                for ring in sorted(rings):
                    if early <= key:
                        self.ready(peer, Ready(*early, ring))
            self._early = {peer: kept for peer, kept in self._early.items() if kept[0] > key}
            return self.attempt

    def ready(self, peer: str, message: Ready) -> None:
        key = Key(message.round, message.attempt)
        with self.changed:
            if key == self.attempt.key:
                self.attempt.ready(peer, message.ring)
            elif key > self.attempt.key:
                self._keep(peer, key, message.ring)
            else:
                why = f"this member has gone on to {_words(self.attempt.key)}"
                self._post(Outgoing(peer, Stop(*key, message.ring, "", why)))

    def stop(self, peer: str, message: Stop) -> None:
        with self.changed:
            if Key(message.round, message.attempt) == self.attempt.key:
                self.attempt.stop(peer, message)

    def taken(self, peer: str, message: Taken) -> None:
        with self.changed:
            if Key(message.round, message.attempt) == self.attempt.key:
                self.attempt.taken(peer, message.ring)

    def lose(self, peer: str, why: str) -> None:
        """The link to `peer` is gone for good."""
        with self.changed:
            self._lost.setdefault(peer, why)
            self.attempt.lose(peer, self._lost[peer])

    def _keep(self, peer: str, key: Key, ring: int) -> None:
        held, rings = self._early.get(peer, (key, set()))
        if held < key:
            rings = set()
        if held <= key and len(rings) < _MAX_EARLY:
            self._early[peer] = key, rings | {ring}


class Reception:
    """What the receiving thread of one link does with a frame: `place`, then `arrived`; `leave` in any case.

    `seen` is the peer's window, where pieces may lie that are lent.
    """

    def __init__(self, router: Router, peer: str, max_piece_bytes: int, seen: Bytes | None = None) -> None:
        self._router, self._peer, self._max_piece_bytes, self._seen = router, peer, max_piece_bytes, seen
        self._desk, self._refuse = Desk(), Desk()
        self._held: tuple[Attempt, Seat, Slot, Floats | None] | None = None

    def place(self, header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
        """Memory for the frame; a refusal closes the link, and the rings are told the reason before that."""
        try:
            return self._room(header, lengths) if isinstance(header, Piece) else []
        except FrameError as error:
            self._router.lose(self._peer, str(error))
            raise

    def arrived(self, message: Message) -> Taken | None:
        """Deal with it; what to answer before `leave`, after which the ring may be over and the link be closed."""
        match message:
            case Ready():
                self._router.ready(self._peer, message)
            case Taken():
                self._router.taken(self._peer, message)
            case Stop():
                self._router.stop(self._peer, message)
            case Piece() if self._held is not None:
                attempt, seat, slot, lent = self._held
                return attempt.take(seat, slot, self._desk, lent)
        return None

    def leave(self) -> None:
        if self._held is not None:
            attempt, seat, _, _ = self._held
            self._held = None
            attempt.leave(seat, self._peer)

    def _room(self, header: Piece, lengths: tuple[int, ...]) -> list[memoryview]:
        key, attempt = Key(header.round, header.attempt), self._router.attempt
        if key > attempt.key:
            raise FrameError(f"{self._peer} sent a piece of {_words(key)}, for which this node is not ready")
        entered = attempt.enter(self._peer, header, lengths) if key == attempt.key else None
        if entered is None:
            return self._room_to_drop(lengths)
        seat, slot = entered
        self._held = attempt, seat, slot, None
        if header.at is None:
            return [seat.part.room(slot, self._desk)]
        self._held = attempt, seat, slot, self._lent(header.at, 4 * (slot.hi - slot.lo))
        return []

    def _lent(self, at: int, num_bytes: int) -> Floats:
        if self._seen is None or at % 4 or at + num_bytes > self._seen.size:
            raise FrameError(f"{self._peer} lends {num_bytes} bytes from {at} on, which its window does not show")
        return self._seen[at : at + num_bytes].view(np.float32)

    def _room_to_drop(self, lengths: tuple[int, ...]) -> list[memoryview]:
        """What nobody wants any more must still be read, if it was not lent."""
        if not lengths:
            return []
        if len(lengths) != 1 or lengths[0] > self._max_piece_bytes:
            raise FrameError(f"{self._peer} sent a piece of {lengths} bytes, over the limit of {self._max_piece_bytes}")
        return [self._refuse.wire(lengths[0]).data]


def _words(key: Key) -> str:
    return f"attempt {key.attempt} of round {key.round}"
