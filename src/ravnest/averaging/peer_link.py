"""Shares the link to a peer between rings: one thread sends posted messages in fair order, one receives.

Queued chunks are references only; they are loaded, and encoded if need be, when they are sent, so that memory is
bounded. Each chunk waits for traffic with precedence and for the rate limit. For a chunk in shared memory only its
offset is sent.

Of all rings with something to send, the one with the fewest bytes sent is next. A ring that was idle starts from the
level of the others: it gets no credit for bytes it did not use.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from ravnest.averaging.codec import ScratchBuffers
from ravnest.averaging.ring import SendChunk
from ravnest.averaging.session import AttemptReceiver, AttemptRouter, Outgoing, RingMembership
from ravnest.averaging.shared_memory import SharedLink
from ravnest.core.config import config, require
from ravnest.core.rate_limit import RateLimiter
from ravnest.errors import LinkTimeout
from ravnest.protocol.averaging import Message
from ravnest.transport.link import Link

__all__ = ["FairQueue", "PeerLinkConfig", "PeerLink"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """One FIFO queue per ring, served so that rings send equal numbers of bytes."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[tuple[int, T]]] = {}
        self._sent_bytes: dict[int, int] = {}
        self._level_bytes = 0  # bytes sent by the ring that was served last, before that

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def put(self, ring: int, item: T, num_bytes: int) -> None:
        if ring not in self._queues:
            self._queues[ring] = deque()
            self._sent_bytes[ring] = max(self._sent_bytes.get(ring, 0), self._level_bytes)
        self._queues[ring].append((num_bytes, item))

    def take(self) -> T | None:
        """The next item, or None. Ties are resolved in favour of the lowest ring id."""
        if not self._queues:
            return None
        ring = min(self._queues, key=lambda r: (self._sent_bytes[r], r))
        self._level_bytes = self._sent_bytes[ring]
        num_bytes, item = self._queues[ring].popleft()
        self._sent_bytes[ring] += num_bytes
        if not self._queues[ring]:
            del self._queues[ring]
        return item


_POLL_S = 1.0  # interval at which a sender that waits for its turn checks that its ring has not failed


class SendTurn(Protocol):
    """Traffic that has precedence over averaging. A `threading.Event` implements it."""

    def wait(self, timeout_s: float, /) -> bool:
        """Wait until a chunk may be sent; false after `timeout_s`."""


@config
class PeerLinkConfig:
    """Limits of a link.

    Sending or receiving a frame may take `frame_s`. A thread may take `grace_s` to finish its chunk after the ring has
    failed. `turn` delays chunks for other traffic and `rate_limiter` limits their rate; both may be shared with others.
    """

    frame_s: float = 60.0
    grace_s: float = 5.0
    max_chunk_bytes: int = 2**24
    turn: SendTurn | None = None
    rate_limiter: RateLimiter | None = None

    def __post_init__(self) -> None:
        require(
            self.frame_s > 0 and self.grace_s > 0,
            f"frame_s and grace_s must be > 0 s, got {self.frame_s} and {self.grace_s}",
        )
        require(self.max_chunk_bytes > 0, f"max_chunk_bytes must be > 0, got {self.max_chunk_bytes}")


class PeerLink:
    """Owns the link and both threads; `close` ends all three. The router is notified if the link fails."""

    def __init__(self, peer: str, link: Link, router: AttemptRouter, config: PeerLinkConfig) -> None:
        self._peer, self._link, self._router, self._config = peer, link, router, config
        self._buffer, self._peer_buffer = (
            (link.buffer, link.peer_buffer) if isinstance(link, SharedLink) else (None, None)
        )
        self._control_messages: deque[Message] = deque()
        self._chunks: FairQueue[Outgoing] = FairQueue()
        self._is_stopped = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._supervise, args=(run,), name=f"{what} {peer}", daemon=True)
            for what, run in (("average to", self._send), ("average from", self._receive))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, outgoing: Outgoing) -> None:
        """Queue a message without blocking; dropped if the link is closed. Control messages go before chunks."""
        with self._changed:
            if self._is_stopped:
                return
            if outgoing.send is None:
                self._control_messages.append(outgoing.header)
            else:
                num_elements = outgoing.send.hi - outgoing.send.lo
                self._chunks.put(outgoing.header.ring, outgoing, num_elements)
            self._changed.notify()

    def close(self) -> None:
        """Close the link; both threads end."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._link.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for both threads; false if one still runs after `timeout_s`."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _send(self) -> None:
        scratch = ScratchBuffers()
        while (item := self._next()) is not None:
            if not isinstance(item, Outgoing):
                self._link.send(item, deadline_s=self._config.frame_s)
            elif item.membership is not None and item.send is not None and self._may_send(item.membership, item.send):
                self._send_chunk(item.header, item.membership, item.send, scratch)

    def _send_chunk(
        self, header: Message, membership: RingMembership, send: SendChunk, scratch: ScratchBuffers
    ) -> None:
        attempt, contribution = self._router.attempt, membership.contribution
        offset = contribution.published_offset(send, self._buffer)
        views: list[memoryview] = []
        if offset is not None:
            if not attempt.publish(membership):
                return
            header = msgspec.structs.replace(header, offset=offset)
        else:
            view = attempt.load(membership, send, scratch)
            if view is None:
                return
            views = [view]
        try:
            self._link.send(header, views, deadline_s=self._config.frame_s)
            contribution.sent(send, scratch)
        finally:
            attempt.leave(membership, self._peer)

    def _may_send(self, membership: RingMembership, send: SendChunk) -> bool:
        """Wait for other traffic and for the rate limit; false if the ring failed or the link closed meanwhile."""
        contribution = membership.contribution
        while self._config.turn is not None and not self._config.turn.wait(_POLL_S):
            if self._is_stopped or membership.failure is not None:
                return False
        if self._config.rate_limiter is not None and contribution.published_offset(send, self._buffer) is None:
            wait_s = self._config.rate_limiter.reserve(contribution.codec.wire_bytes(send.hi - send.lo))
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped, wait_s)
        return not self._is_stopped

    def _next(self) -> Message | Outgoing | None:
        """The next message to send; None when the link is closed."""
        with self._changed:  # no deadline: an idle sender waits until its owner calls `close`
            self._changed.wait_for(lambda: self._is_stopped or self._control_messages or self._chunks)
            if self._is_stopped:
                return None
            return self._control_messages.popleft() if self._control_messages else self._chunks.take()

    def _receive(self) -> None:
        receiver = AttemptReceiver(self._router, self._peer, self._config.max_chunk_bytes, self._peer_buffer)
        while not self._is_stopped:
            try:
                header = self._link.receive(receiver.place, deadline_s=self._config.frame_s)
                reply = receiver.arrived(cast("Message", header))
                if reply is not None:
                    self._link.send(reply, deadline_s=self._config.frame_s)
            except LinkTimeout:
                if self._link.closed:
                    raise
            finally:
                receiver.leave()

    def _supervise(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # top level of the thread: any error must reach the rings
            self._router.lose(self._peer, f"the link to {self._peer} failed: {error}")
            self.close()
