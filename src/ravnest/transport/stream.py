"""Frames over a stream of bytes: the implementation of `Link` over any `Channel`.

A `Channel` moves as many bytes as it can without waiting, and waits on request; `StreamLink` assembles whole frames.
The bytes of a buffer are never copied here: views of the caller's memory go down to the channel.

Closing a socket while another thread waits on it would let the system reuse its descriptor for another file. So a link
closes in two steps: reject new users and wake the present ones, then free the channel when the last one has left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from ravnest.core.clock import Deadline
from ravnest.errors import FrameError, LinkClosed, LinkTimeout
from ravnest.transport.frame import (
    PREFIX_BYTES,
    Prefix,
    check_generation,
    decode_header,
    decode_lengths,
    decode_prefix,
    encode_head,
    flat,
)
from ravnest.transport.link import Flow, LinkConfig, LinkStats, Place

__all__ = ["RefCount", "StreamLink"]


if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_MAX_VIEWS = 1024  # accepted by one vectored system call on every system


class RefCount:
    """Counts users, as a context manager; `free` runs once, after `close` and after the last user has left."""

    def __init__(self, name: str, free: Callable[[], None]) -> None:
        self._name = name
        self._free = free
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def __enter__(self) -> None:
        with self._lock:
            if self._is_closed:
                raise self.closed_error()
            self._num_users += 1

    def __exit__(self, *exc: object) -> None:
        self._release()

    def closed_error(self) -> LinkClosed:
        return LinkClosed(f"{self._name} closed locally")

    def close(self, wake: Callable[[], None]) -> None:
        """Reject new users and call `wake`, which must make the present ones leave; acts only once."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._num_users += 1  # the channel must not be freed while `wake` uses it
        try:
            wake()
        finally:
            self._release()

    def _release(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = self._is_closed and self._num_users == 0
        if is_last:
            self._free()


class Channel(Protocol):
    """Ordered bytes in both directions. One thread writes, one reads; a third may shut down."""

    def try_write(self, views: Sequence[memoryview]) -> int:
        """Take some of the bytes without waiting; 0 if there is no space now."""

    def try_flush(self) -> bool:
        """Pass on the taken bytes without waiting; true if none are left here."""

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        """Fill some of the memory without waiting; None if nothing has arrived, 0 at the end of the stream."""

    def wait_writable(self, timeout_s: float) -> bool: ...

    def wait_readable(self, timeout_s: float) -> bool: ...

    def detect_dead_peer(self, after_s: float) -> None:
        """End the stream when the other machine has not responded for `after_s`, where the system supports it."""

    def shutdown(self) -> None:
        """End both directions and wake the waiting threads; the channel stays allocated."""

    def close(self) -> None:
        """Free the channel, after its last use."""


class _Transfer:
    """Memory of one frame that is still to be moved, and the number of bytes moved."""

    __slots__ = ("_at", "_views", "moved_bytes")

    def __init__(self, views: Sequence[memoryview] = ()) -> None:
        self.moved_bytes = 0
        self.expect(views)

    def expect(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if view.nbytes]  # a read of 0 bytes would look like the end
        self._at = 0

    def remaining(self) -> list[memoryview]:
        """Views to move next; empty when the transfer is complete."""
        return self._views[self._at : self._at + _MAX_VIEWS]

    def advance(self, num_bytes: int) -> None:
        self.moved_bytes += num_bytes
        while num_bytes:
            view = self._views[self._at]
            if num_bytes < view.nbytes:
                self._views[self._at] = view[num_bytes:]
                return
            num_bytes -= view.nbytes
            self._at += 1


class StreamLink:
    """A `Link` over a `Channel`, which it owns."""

    def __init__(self, channel: Channel, config: LinkConfig, *, peer: str) -> None:
        self.generation = config.generation
        self._peer = peer
        self._channel = channel
        self._max_bytes = config.max_frame_bytes
        self._decoder: msgspec.msgpack.Decoder[msgspec.Struct] = msgspec.msgpack.Decoder(config.headers)
        self._users = RefCount(f"link to {peer}", channel.close)
        self._send_lock, self._receive_lock = threading.Lock(), threading.Lock()
        self._sent, self._received = Flow(), Flow()
        if config.dead_after_s is not None:
            channel.detect_dead_peer(config.dead_after_s)

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def closed(self) -> bool:
        return self._users.is_closed

    @property
    def stats(self) -> LinkStats:
        return LinkStats(sent=dataclasses.replace(self._sent), received=dataclasses.replace(self._received))

    def close(self) -> None:
        self._users.close(self._channel.shutdown)

    def __enter__(self) -> StreamLink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def send(self, header: msgspec.Struct, buffers: Sequence[ReadableBuffer] = (), *, deadline_s: float) -> None:
        deadline = Deadline(deadline_s)
        views = [flat(buffer) for buffer in buffers]
        lengths = [view.nbytes for view in views]
        head = encode_head(header, lengths, generation=self.generation, max_bytes=self._max_bytes)
        transfer = _Transfer([memoryview(head), *views])
        with self._exclusive(self._send_lock, transfer, self._sent, deadline):
            self._write(transfer, deadline)

    def receive(self, place: Place, *, deadline_s: float) -> msgspec.Struct:
        deadline = Deadline(deadline_s)
        transfer = _Transfer()
        with self._exclusive(self._receive_lock, transfer, self._received, deadline):
            prefix = self._read_prefix(transfer, deadline)
            header, lengths = self._read_head(prefix, transfer, deadline)
            transfer.expect(_check_place(place(header, lengths), lengths))
            self._read(transfer, deadline)
            return header

    def _read_prefix(self, transfer: _Transfer, deadline: Deadline) -> Prefix:
        data = bytearray(PREFIX_BYTES)
        transfer.expect([memoryview(data)])
        self._read(transfer, deadline)
        prefix = decode_prefix(data)
        check_generation(prefix.generation, self.generation)
        return prefix

    def _read_head(
        self, prefix: Prefix, transfer: _Transfer, deadline: Deadline
    ) -> tuple[msgspec.Struct, tuple[int, ...]]:
        data = memoryview(bytearray(prefix.lengths_bytes + prefix.header_bytes))
        transfer.expect([data])
        self._read(transfer, deadline)
        lengths = decode_lengths(prefix, data[: prefix.lengths_bytes], max_bytes=self._max_bytes)
        return decode_header(self._decoder, data[prefix.lengths_bytes :]), lengths

    @contextlib.contextmanager
    def _exclusive(self, lock: threading.Lock, transfer: _Transfer, flow: Flow, deadline: Deadline) -> Iterator[None]:
        """Move one frame at a time per direction; count it if complete, close the link if only a part was moved."""
        if not lock.acquire(timeout=deadline.left_s()):
            raise LinkTimeout(f"link to {self._peer} busy for {deadline.seconds:g} s")
        try:
            with self._users:
                try:
                    yield
                except BaseException as error:
                    self._fail(transfer, error)
                    raise
                flow.frames += 1
                flow.num_bytes += transfer.moved_bytes
        finally:
            lock.release()

    def _fail(self, transfer: _Transfer, error: BaseException) -> None:
        """Close the link, unless the call timed out before a frame began; turn an `OSError` into `LinkClosed`."""
        if isinstance(error, OSError):
            raise self._lost(error) from error
        if transfer.moved_bytes or not isinstance(error, LinkTimeout):
            self.close()

    def _write(self, transfer: _Transfer, deadline: Deadline) -> None:
        while views := transfer.remaining():
            if taken_bytes := self._channel.try_write(views):
                transfer.advance(taken_bytes)
            else:
                self._wait(self._channel.wait_writable, self._sent, deadline)
        while not self._channel.try_flush():
            self._wait(self._channel.wait_writable, self._sent, deadline)

    def _read(self, transfer: _Transfer, deadline: Deadline) -> None:
        while views := transfer.remaining():
            got_bytes = self._channel.try_read(views)
            if got_bytes is None:
                self._wait(self._channel.wait_readable, self._received, deadline)
            elif got_bytes == 0:
                raise self._lost("stream ended in the middle of a frame" if transfer.moved_bytes else "stream ended")
            else:
                if not transfer.moved_bytes:
                    deadline.restart()  # the wait for a frame to begin does not count against its transfer
                transfer.advance(got_bytes)

    def _wait(self, wait: Callable[[float], bool], flow: Flow, deadline: Deadline) -> None:
        started_s = time.monotonic()
        ready = wait(deadline.left_s())
        flow.blocked_s += time.monotonic() - started_s
        if self.closed:
            raise self._users.closed_error()
        if not ready:
            raise LinkTimeout(f"no progress on the link to {self._peer} for {deadline.seconds:g} s")

    def _lost(self, reason: object) -> LinkClosed:
        """Close the link; the error names the side that ended it."""
        if self.closed:
            return self._users.closed_error()
        self.close()
        return LinkClosed(f"connection to {self._peer} lost: {reason}")


def _check_place(views: Sequence[memoryview], lengths: tuple[int, ...]) -> list[memoryview]:
    """Return the caller's memory as flat bytes; reject the frame if the sizes differ."""
    targets = [flat(view) for view in views]
    expected = tuple(view.nbytes for view in targets)
    if expected != lengths:
        raise FrameError(f"frame has {_sizes(lengths)}, expected {_sizes(expected)}")
    if any(view.readonly and view.nbytes for view in targets):
        raise ValueError("memory to receive into must be writable")
    return targets


def _sizes(lengths: tuple[int, ...]) -> str:
    shown = ", ".join(str(length) for length in lengths[:8]) + (", ..." if len(lengths) > 8 else "")
    return f"{len(lengths)} buffers of [{shown}] bytes"
