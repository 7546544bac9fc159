"""A link as rings share it: one thread sends what is posted, in fair turns, and one receives.

Pieces wait as numbers only and are loaded, encoded if need be, when their turn comes; so memory is bounded whatever
waits. Before each piece the line lets go first whatever has precedence, and keeps to the pace. A piece that the peer
can see where it lies is only told of.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import msgspec

from ravnest.core.config import config, require
from ravnest.core.errors import LinkTimeout
from ravnest.net.link import Link
from ravnest.net.pace import Pace
from ravnest.rings.attempt import Outgoing, Seat
from ravnest.rings.codec import Desk
from ravnest.rings.fair import FairQueue
from ravnest.rings.messages import Message
from ravnest.rings.ring import Send
from ravnest.rings.router import Reception, Router
from ravnest.rings.shared import SharedLink

__all__ = ["AveragingConfig", "Line", "Turn"]

_LOOK_S = 1.0  # a sender that waits for its turn looks this often whether its ring still wants it


class Turn(Protocol):
    """Whoever has precedence over averaging. A `threading.Event` is one."""

    def wait(self, timeout_s: float, /) -> bool:
        """Wait until a piece may be sent; false if it may not yet."""


@config
class AveragingConfig:
    """A frame may take `frame_s`; a thread may finish its piece for `grace_s` after its ring has failed.

    `turn` says when a piece may be sent, `pace` how fast; both may be shared with others.
    """

    frame_s: float = 60.0
    grace_s: float = 5.0
    max_piece_bytes: int = 2**24
    turn: Turn | None = None
    pace: Pace | None = None

    def __post_init__(self) -> None:
        require(self.frame_s > 0 and self.grace_s > 0, "frame_s and grace_s are more than 0 seconds")
        require(self.max_piece_bytes > 0, "max_piece_bytes is more than 0 bytes")


class Line:
    """Owns the link and both threads; closing it ends all three. A link that fails is told to the router."""

    def __init__(self, peer: str, link: Link, router: Router, config: AveragingConfig) -> None:
        self._peer, self._link, self._router, self._config = peer, link, router, config
        self._window, self._seen = (link.window, link.seen) if isinstance(link, SharedLink) else (None, None)
        self._words: deque[Message] = deque()
        self._pieces: FairQueue[Outgoing] = FairQueue()
        self._stopped = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._supervise, args=(run,), name=f"{what} {peer}", daemon=True)
            for what, run in (("average to", self._send), ("average from", self._receive))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, outgoing: Outgoing) -> None:
        """Queue a message; never waits. What is no piece goes first; a line that has ended takes nothing."""
        with self._changed:
            if self._stopped:
                return
            if outgoing.send is None:
                self._words.append(outgoing.header)
            else:
                num_elements = outgoing.send.hi - outgoing.send.lo
                self._pieces.put(outgoing.header.ring, outgoing, num_elements)
            self._changed.notify()

    def close(self) -> None:
        """End the link; both threads leave."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._link.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for both threads; false if one is still there."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _send(self) -> None:
        desk = Desk()
        while (item := self._next()) is not None:
            if not isinstance(item, Outgoing):
                self._link.send(item, deadline_s=self._config.frame_s)
            elif item.seat is not None and item.send is not None and self._may_send(item.seat, item.send):
                self._send_piece(item.header, item.seat, item.send, desk)

    def _send_piece(self, header: Message, seat: Seat, send: Send, desk: Desk) -> None:
        attempt, lent_at = self._router.attempt, seat.part.lent_at(send, self._window)
        views: list[memoryview] = []
        if lent_at is not None:
            if not attempt.lend(seat):
                return
            header = msgspec.structs.replace(header, at=lent_at)
        else:
            view = attempt.load(seat, send, desk)
            if view is None:
                return
            views = [view]
        try:
            self._link.send(header, views, deadline_s=self._config.frame_s)
            seat.part.sent(send, desk)
        finally:
            attempt.leave(seat, self._peer)

    def _may_send(self, seat: Seat, send: Send) -> bool:
        """Wait for this node's other traffic and for the pace; false if the ring or the line ended meanwhile."""
        while self._config.turn is not None and not self._config.turn.wait(_LOOK_S):
            if self._stopped or seat.failure is not None:
                return False
        if self._config.pace is not None and seat.part.lent_at(send, self._window) is None:
            wait_s = self._config.pace.book(seat.part.codec.wire_bytes(send.hi - send.lo))
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, wait_s)
        return not self._stopped

    def _next(self) -> Message | Outgoing | None:
        """What to send now; None when the line is closed."""
        with self._changed:  # no deadline: an idle sender waits for its owner, who ends it with `close`
            self._changed.wait_for(lambda: self._stopped or self._words or self._pieces)
            if self._stopped:
                return None
            return self._words.popleft() if self._words else self._pieces.take()

    def _receive(self) -> None:
        reception = Reception(self._router, self._peer, self._config.max_piece_bytes, self._seen)
        while not self._stopped:
            try:
                header = self._link.receive(reception.place, deadline_s=self._config.frame_s)
                answer = reception.arrived(cast("Message", header))
                if answer is not None:
                    self._link.send(answer, deadline_s=self._config.frame_s)
            except LinkTimeout:
                if self._link.closed:
                    raise
            finally:
                reception.leave()

    def _supervise(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # the supervisor of this thread: whatever ends it must reach the rings
            self._router.lose(self._peer, f"the link to {self._peer} failed: {error}")
            self.close()
