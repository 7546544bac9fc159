"""Attempts at a round: the effect of messages and lost peers on the rings of a node. No clock, no I/O.

    wait for AttemptReady of the next member --> chunks arrive and are sent on --> done
          |                                            |
          +------------------ failed ------------------+     a peer that the ring still needs is lost or has aborted,
                                                             a number is not finite, or the deadline has passed

A ring that fails sends `AttemptAborted` to both neighbours, which do the same, so that no member waits for a failed
ring. Other rings continue. Messages are handed to `post`, so the same code runs over links and in tests.

`AttemptRouter` finds the attempt of a message: the open one, an older one (dropped) or a later one. A member sends
chunks only after the next member has sent `AttemptReady`, so a chunk is never early. An early `AttemptReady` is kept
until its attempt opens here; one for a finished attempt is answered with `AttemptAborted`.

A member that has published chunks (see `contribution`) is done only when the next member has read all of them. If it
fails before that, the next member may read data of another attempt: the result is then not the same on all members,
and none of them uses it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from ravnest.averaging.codec import Bytes, Floats, ScratchBuffers
from ravnest.averaging.contribution import Contribution
from ravnest.averaging.ring import SendChunk, Slot
from ravnest.core.config import require
from ravnest.errors import BadContribution, FrameError, RingFailed
from ravnest.protocol.averaging import AttemptAborted, AttemptReady, Chunk, ChunkTaken, Message

__all__ = ["RoundAttempt", "AttemptKey", "Outgoing", "RingMembership", "AttemptReceiver", "AttemptRouter"]


class AttemptKey(NamedTuple):
    """The round and the attempt at it; later attempts compare greater."""

    round: int
    attempt: int

    def __str__(self) -> str:
        return f"attempt {self.attempt} of round {self.round}"


class RingMembership:
    """A contribution and the state of its ring. `users` are the peers whose threads access its memory now."""

    def __init__(self, contribution: Contribution) -> None:
        self.contribution = contribution
        self.spec, self.ring = contribution.spec, contribution.ring
        self.is_ready = False  # the next member accepts chunks
        self.is_being_read = False  # the next member may still read published chunks
        self.held: list[SendChunk] = []  # until the next member is ready
        self.failure: RingFailed | None = None
        self.users: list[str] = []

    @property
    def is_open(self) -> bool:
        return self.failure is None and (self.is_being_read or not self.ring.is_done)

    def needs(self, peer: str) -> bool:
        """Whether a chunk is still to be received from `peer`, or sent to or read by it."""
        receives = self.spec.before == peer and self.ring.expected is not None
        return receives or (self.spec.after == peer and (self.is_being_read or self.ring.num_unsent > 0))

    def awaited(self) -> tuple[str, str]:
        """The member that an open ring waits for, and the reason."""
        before, after, slot = self.spec.before, self.spec.after, self.ring.expected
        if not self.is_ready:
            return after, f"{after} was not ready yet"
        if slot is not None:
            return before, f"{before} had not sent chunk {slot.number} of {slot.phase.name.lower()} step {slot.step}"
        if self.ring.num_unsent == 0:
            return after, f"{after} had not read all published chunks"
        return after, f"{after} had not received the last {self.ring.num_unsent} chunks"


class Outgoing(NamedTuple):
    """A message for `peer`; with `send`, a chunk of `membership` follows it."""

    peer: str
    header: Message
    membership: RingMembership | None = None
    send: SendChunk | None = None


Post: TypeAlias = Callable[[Outgoing], None]


class RoundAttempt:
    """All rings of a node in one attempt.

    `changed` guards the state of all memberships and is notified when it changes; numbers are processed outside of it.
    """

    def __init__(
        self, key: AttemptKey, contributions: Sequence[Contribution], post: Post, changed: threading.Condition
    ) -> None:
        self.key, self._post, self._changed = key, post, changed
        self.memberships = {contribution.spec.id: RingMembership(contribution) for contribution in contributions}

    @property
    def is_settled(self) -> bool:
        """Whether every ring is done or has failed."""
        return not any(membership.is_open for membership in self.memberships.values())

    @property
    def users(self) -> list[str]:
        """Peers whose threads access the memory of a ring."""
        return [peer for membership in self.memberships.values() for peer in membership.users]

    @property
    def failures(self) -> dict[int, RingFailed]:
        return {ring: member.failure for ring, member in self.memberships.items() if member.failure is not None}

    def open(self, lost: Mapping[str, str]) -> None:
        """Send `AttemptReady` to the previous members; a ring with a lost neighbour fails immediately."""
        for membership in self.memberships.values():
            if len(membership.spec.members) == 1:
                self._average_alone(membership)
        for membership in self._open_memberships():
            spec = membership.spec
            missing = [peer for peer in (spec.before, spec.after) if peer in lost]
            if missing:
                self._fail(membership, RingFailed(spec.id, missing[0], lost[missing[0]]))
            else:
                self._post(Outgoing(spec.before, AttemptReady(*self.key, spec.id)))

    def ready(self, peer: str, ring: int) -> None:
        """The next member is ready: send it the first chunks."""
        with self._changed:
            membership = self._membership(ring, peer, neighbour="after")
            if membership.failure is not None:  # it may have joined too late to receive the abort
                self._post(Outgoing(peer, self._aborted(membership.failure)))
                return
            if membership.is_ready:
                raise FrameError(f"{peer} sent AttemptReady for ring {ring} twice")
            membership.is_ready = True
            for send in (*membership.contribution.begin(), *membership.held):
                self._post(self._outgoing(membership, send))

    def enter(self, peer: str, chunk: Chunk, lengths: tuple[int, ...]) -> tuple[RingMembership, Slot] | None:
        """The slot of a chunk that is about to arrive; None if its ring has failed. Call `leave` when done with it."""
        with self._changed:
            membership = self._membership(chunk.ring, peer, neighbour="before")
            if membership.failure is not None:
                return None
            slot = membership.contribution.check(chunk, lengths)
            membership.users.append(peer)
            return membership, slot

    def take(
        self, membership: RingMembership, slot: Slot, scratch: ScratchBuffers, published: Floats | None = None
    ) -> ChunkTaken | None:
        """Process a chunk that was received or published; the reply to its sender after the last published one."""
        try:
            send = membership.contribution.take(slot, scratch, published)
        except BadContribution as bad:
            self._fail(membership, bad)
            return None
        if send is not None:
            self._send(membership, send)
        is_last = published is not None and membership.ring.expected is None
        return ChunkTaken(*self.key, membership.spec.id) if is_last else None

    def publish(self, membership: RingMembership) -> bool:
        """Start publishing a chunk: keeps the ring open until `taken`. False if the ring has failed.

        Call `leave` when the message to the next member has been sent.
        """
        with self._changed:
            if membership.failure is not None:
                return False
            membership.is_being_read = True
            membership.users.append(membership.spec.after)
            return True

    def taken(self, peer: str, ring: int) -> None:
        """The next member has read all published chunks."""
        with self._changed:
            membership = self._membership(ring, peer, neighbour="after")
            if membership.ring.num_unsent > 1:  # the last one may not be counted yet
                raise FrameError(f"{peer} acknowledged all chunks of ring {ring} before they were published")
            membership.is_being_read = False
            self._changed.notify_all()

    def load(self, membership: RingMembership, send: SendChunk, scratch: ScratchBuffers) -> memoryview | None:
        """The bytes to send; None if the ring has failed. Call `leave` when done with them."""
        with self._changed:
            if membership.failure is not None:
                return None
            membership.users.append(membership.spec.after)
        try:
            return membership.contribution.load(send, scratch)
        except BadContribution as bad:
            self._fail(membership, bad)
            self.leave(membership, membership.spec.after)
            return None

    def leave(self, membership: RingMembership, peer: str) -> None:
        """The thread of `peer` no longer accesses the ring's memory."""
        with self._changed:
            membership.users.remove(peer)
            if not membership.is_open:
                self._changed.notify_all()

    def abort_ring(self, peer: str, aborted: AttemptAborted) -> None:
        """A neighbour reports that a ring has failed."""
        with self._changed:
            membership = self.memberships.get(aborted.ring)
            if membership is None or peer not in (membership.spec.before, membership.spec.after):
                raise FrameError(f"{peer} aborted ring {aborted.ring}, in which it is not a neighbour of this node")
            kind = BadContribution if aborted.is_not_finite else RingFailed
            self._fail(membership, kind(aborted.ring, aborted.member or peer, aborted.reason), reported_by=peer)

    def lose(self, peer: str, reason: str) -> None:
        """The link to `peer` is lost: rings that still need it fail, others continue."""
        for membership in self._open_memberships():
            if membership.needs(peer):
                self._fail(membership, RingFailed(membership.spec.id, peer, reason))

    def expire(self, seconds: float) -> None:
        """Fail all open rings: their deadline has passed."""
        for membership in self._open_memberships():
            member, reason = membership.awaited()
            self._fail(membership, RingFailed(membership.spec.id, member, f"after {seconds:g} s {reason}"))

    def _membership(self, ring: int, peer: str, *, neighbour: str) -> RingMembership:
        membership = self.memberships.get(ring)
        if membership is None or getattr(membership.spec, neighbour) != peer:
            raise FrameError(
                f"{peer} sent a message of ring {ring}, in which it is not the member {neighbour} this node"
            )
        return membership

    def _open_memberships(self) -> Iterator[RingMembership]:
        return (membership for membership in self.memberships.values() if membership.is_open)

    def _fail(self, membership: RingMembership, failure: RingFailed, reported_by: str | None = None) -> None:
        with self._changed:
            if not membership.is_open:
                return
            membership.failure = failure
            self._changed.notify_all()
        for peer in sorted({membership.spec.before, membership.spec.after} - {reported_by}):
            self._post(Outgoing(peer, self._aborted(failure)))

    def _average_alone(self, membership: RingMembership) -> None:
        try:
            membership.contribution.begin()
        except BadContribution as bad:
            membership.failure = bad

    def _send(self, membership: RingMembership, send: SendChunk) -> None:
        with self._changed:
            if membership.is_ready:
                self._post(self._outgoing(membership, send))
            else:
                membership.held.append(send)

    def _outgoing(self, membership: RingMembership, send: SendChunk) -> Outgoing:
        header = Chunk(*self.key, membership.spec.id, send.phase, send.step, send.number)
        return Outgoing(membership.spec.after, header, membership, send)

    def _aborted(self, failure: RingFailed) -> AttemptAborted:
        is_bad = isinstance(failure, BadContribution)
        return AttemptAborted(*self.key, failure.ring, failure.member, failure.why[:1000], is_bad)


_MAX_EARLY = 4096  # rings that one peer may announce ahead


class AttemptRouter:
    """Passes messages to the open attempt. Used by the threads of all links and by the one that runs attempts."""

    def __init__(self, post: Post) -> None:
        self.changed = threading.Condition()
        self.attempt = RoundAttempt(AttemptKey(-1, -1), (), post, self.changed)
        self._post = post
        self._early: dict[str, tuple[AttemptKey, set[int]]] = {}  # the latest attempt that each peer announced
        self._lost: dict[str, str] = {}

    def open(self, key: AttemptKey, contributions: Sequence[Contribution]) -> RoundAttempt:
        """Open an attempt; the previous one must be settled, and older."""
        with self.changed:
            require(key > self.attempt.key, f"{key} must be later than {self.attempt.key}")
            require(self.attempt.is_settled and not self.attempt.users, f"{self.attempt.key} is not finished")
            self.attempt = RoundAttempt(key, contributions, self._post, self.changed)
            self.attempt.open(self._lost)
            for peer, (early, rings) in sorted(self._early.items()):
                for ring in sorted(rings):
                    if early <= key:
                        self.ready(peer, AttemptReady(*early, ring))
            self._early = {peer: kept for peer, kept in self._early.items() if kept[0] > key}
            return self.attempt

    def ready(self, peer: str, message: AttemptReady) -> None:
        key = AttemptKey(message.round, message.attempt)
        with self.changed:
            if key == self.attempt.key:
                self.attempt.ready(peer, message.ring)
            elif key > self.attempt.key:
                self._keep(peer, key, message.ring)
            else:
                reason = f"this member is already in {self.attempt.key}"
                self._post(Outgoing(peer, AttemptAborted(*key, message.ring, "", reason)))

    def abort_ring(self, peer: str, message: AttemptAborted) -> None:
        with self.changed:
            if AttemptKey(message.round, message.attempt) == self.attempt.key:
                self.attempt.abort_ring(peer, message)

    def taken(self, peer: str, message: ChunkTaken) -> None:
        with self.changed:
            if AttemptKey(message.round, message.attempt) == self.attempt.key:
                self.attempt.taken(peer, message.ring)

    def lose(self, peer: str, reason: str) -> None:
        """The link to `peer` is lost for good."""
        with self.changed:
            self._lost.setdefault(peer, reason)
            self.attempt.lose(peer, self._lost[peer])

    def _keep(self, peer: str, key: AttemptKey, ring: int) -> None:
        latest, rings = self._early.get(peer, (key, set()))
        if latest < key:
            rings = set()
        if latest <= key and len(rings) < _MAX_EARLY:
            self._early[peer] = key, rings | {ring}


class AttemptReceiver:
    """Handles the frames of one link in its receiving thread: `place`, then `arrived`, and always `leave`.

    `peer_buffer` is the peer's shared buffer, in which it may publish chunks.
    """

    def __init__(
        self, router: AttemptRouter, peer: str, max_chunk_bytes: int, peer_buffer: Bytes | None = None
    ) -> None:
        self._router, self._peer, self._max_chunk_bytes, self._peer_buffer = router, peer, max_chunk_bytes, peer_buffer
        self._scratch, self._discarded = ScratchBuffers(), ScratchBuffers()
        self._current: tuple[RoundAttempt, RingMembership, Slot, Floats | None] | None = None

    def place(self, header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
        """Memory for the frame. An invalid frame closes the link; the rings receive the reason before that."""
        try:
            return self._place_chunk(header, lengths) if isinstance(header, Chunk) else []
        except FrameError as error:
            self._router.lose(self._peer, str(error))
            raise

    def arrived(self, message: Message) -> ChunkTaken | None:
        """Handle a message. Send the reply before `leave`: after that the ring may be done and the link closed."""
        match message:
            case AttemptReady():
                self._router.ready(self._peer, message)
            case ChunkTaken():
                self._router.taken(self._peer, message)
            case AttemptAborted():
                self._router.abort_ring(self._peer, message)
            case Chunk() if self._current is not None:
                attempt, membership, slot, published = self._current
                return attempt.take(membership, slot, self._scratch, published)
        return None

    def leave(self) -> None:
        if self._current is not None:
            attempt, membership, _, _ = self._current
            self._current = None
            attempt.leave(membership, self._peer)

    def _place_chunk(self, header: Chunk, lengths: tuple[int, ...]) -> list[memoryview]:
        key, attempt = AttemptKey(header.round, header.attempt), self._router.attempt
        if key > attempt.key:
            raise FrameError(f"{self._peer} sent a chunk of {key}, for which this node is not ready")
        entered = attempt.enter(self._peer, header, lengths) if key == attempt.key else None
        if entered is None:
            return self._discard(lengths)
        membership, slot = entered
        self._current = attempt, membership, slot, None
        if header.offset is None:
            return [membership.contribution.receive_buffer(slot, self._scratch)]
        self._current = attempt, membership, slot, self._published(header.offset, 4 * (slot.hi - slot.lo))
        return []

    def _published(self, offset: int, num_bytes: int) -> Floats:
        size = 0 if self._peer_buffer is None else self._peer_buffer.size
        if self._peer_buffer is None or offset % 4 or offset + num_bytes > size:
            raise FrameError(f"{self._peer} published {num_bytes} bytes at {offset}, its shared buffer has {size}")
        return self._peer_buffer[offset : offset + num_bytes].view(np.float32)

    def _discard(self, lengths: tuple[int, ...]) -> list[memoryview]:
        """Memory for a chunk of an old attempt or failed ring, which must still be read from the link."""
        if not lengths:
            return []
        if len(lengths) != 1 or lengths[0] > self._max_chunk_bytes:
            raise FrameError(f"{self._peer} sent a chunk of {lengths} bytes, the limit is {self._max_chunk_bytes}")
        return [self._discarded.wire(lengths[0]).data]
