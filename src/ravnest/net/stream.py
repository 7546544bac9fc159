"""Frames over a stream of bytes: the one implementation of a link, whatever carries the bytes.

A `Channel` moves what it can without waiting, and waits when asked; `StreamLink` makes whole frames of
it. The bytes of a buffer are never copied here: views of the caller's memory go down to the channel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from ravnest.core.errors import FrameError, LinkClosed, LinkTimeout
from ravnest.net.deadline import Deadline
from ravnest.net.frame import (
    PREFIX_BYTES,
    Prefix,
    check_generation,
    decode_header,
    decode_lengths,
    decode_prefix,
    encode_head,
    flat,
)
from ravnest.net.gate import Gate
from ravnest.net.link import Flow, LinkConfig, LinkStats, Place

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Channel", "StreamLink"]

_MAX_VIEWS = 1024  # what one vectored system call takes on every system


class Channel(Protocol):
    """Bytes in order, both ways. One thread writes, one reads; a third may shut down."""

    def try_write(self, views: Sequence[memoryview]) -> int:
        """Take some of the bytes without waiting; 0 when there is no room now."""

    def try_flush(self) -> bool:
        """Pass on, without waiting, what was taken; true when nothing of it is left here."""

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        """Fill some of the memory without waiting; None when nothing is there yet, 0 at the end."""

    def wait_writable(self, timeout_s: float) -> bool: ...

    def wait_readable(self, timeout_s: float) -> bool: ...

    def notice_death(self, after_s: float) -> None:
        """End when the other machine has answered nothing for so long, where the system can tell."""

    def shutdown(self) -> None:
        """End both ways and wake both waiting threads; the channel still exists."""

    def close(self) -> None:
        """Free what the channel holds; nobody uses it any more."""


class _Transfer:
    """The memory of one frame that is still to be moved, and how many bytes have been."""

    __slots__ = ("_at", "_views", "moved_bytes")

    def __init__(self, views: Sequence[memoryview] = ()) -> None:
        self.moved_bytes = 0
        self.expect(views)

    def expect(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if view.nbytes]  # reading nothing looks like the end
        self._at = 0

    def left(self) -> list[memoryview]:
        """What to move next; nothing when all has been."""
        return self._views[self._at : self._at + _MAX_VIEWS]

    def moved(self, num_bytes: int) -> None:
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
        self._gate = Gate(f"the link to {peer}", channel.close)
        self._send_turn, self._receive_turn = threading.Lock(), threading.Lock()
        self._sent, self._received = Flow(), Flow()
        if config.dead_after_s is not None:
            channel.notice_death(config.dead_after_s)

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def closed(self) -> bool:
        return self._gate.is_shut

    @property
    def stats(self) -> LinkStats:
        return LinkStats(sent=dataclasses.replace(self._sent), received=dataclasses.replace(self._received))

    def close(self) -> None:
        self._gate.shut(self._channel.shutdown)

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
        with self._turn(self._send_turn, transfer, self._sent, deadline):
            self._write(transfer, deadline)

    def receive(self, place: Place, *, deadline_s: float) -> msgspec.Struct:
        deadline = Deadline(deadline_s)
        transfer = _Transfer()
        with self._turn(self._receive_turn, transfer, self._received, deadline):
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
    def _turn(self, lock: threading.Lock, transfer: _Transfer, flow: Flow, deadline: Deadline) -> Iterator[None]:
        """One frame at a time each way; counted if it went whole, and the link closed if only a part did."""
        if not lock.acquire(timeout=deadline.left_s()):
            raise LinkTimeout(f"the link to {self._peer} was busy for {deadline.seconds:g} s")
        try:
            with self._gate:
                try:
                    yield
                except BaseException as error:
                    self._end(transfer, error)
                    raise
                flow.frames += 1
                flow.num_bytes += transfer.moved_bytes
        finally:
            lock.release()

    def _end(self, transfer: _Transfer, error: BaseException) -> None:
        """Close the link, unless it only timed out before a frame began; a socket's error is told as ours."""
        if isinstance(error, OSError):
            raise self._broken(error) from error
        if transfer.moved_bytes or not isinstance(error, LinkTimeout):
            self.close()

    def _write(self, transfer: _Transfer, deadline: Deadline) -> None:
        while views := transfer.left():
            if taken_bytes := self._channel.try_write(views):
                transfer.moved(taken_bytes)
            else:
                self._wait(self._channel.wait_writable, self._sent, deadline)
        while not self._channel.try_flush():
            self._wait(self._channel.wait_writable, self._sent, deadline)

    def _read(self, transfer: _Transfer, deadline: Deadline) -> None:
        while views := transfer.left():
            got_bytes = self._channel.try_read(views)
            if got_bytes is None:
                self._wait(self._channel.wait_readable, self._received, deadline)
            elif got_bytes == 0:
                raise self._broken("it ended in the middle of a frame" if transfer.moved_bytes else "it ended")
            else:
                if not transfer.moved_bytes:
                    deadline.restart()  # waiting for a frame to begin is not the frame being slow
                transfer.moved(got_bytes)

    def _wait(self, wait: Callable[[float], bool], flow: Flow, deadline: Deadline) -> None:
        started_s = time.monotonic()
        ready = wait(deadline.left_s())
        flow.blocked_s += time.monotonic() - started_s
        if self.closed:
            raise self._gate.closed_here()
        if not ready:
            raise LinkTimeout(f"the link to {self._peer} did not move for {deadline.seconds:g} s")

    def _broken(self, reason: object) -> LinkClosed:
        """Close the link; the error says which side ended it."""
        if self.closed:
            return self._gate.closed_here()
        self.close()
        return LinkClosed(f"{self._peer} has closed the link or died: {reason}")


def _check_place(views: Sequence[memoryview], lengths: tuple[int, ...]) -> list[memoryview]:
    """The caller's memory as flat bytes, if it is for exactly this frame."""
    places = [flat(view) for view in views]
    expected = tuple(view.nbytes for view in places)
    if expected != lengths:
        raise FrameError(f"the frame brings {_sizes(lengths)} where {_sizes(expected)} are expected")
    if any(view.readonly and view.nbytes for view in places):
        raise ValueError("memory to receive into must be writable")
    return places


def _sizes(lengths: tuple[int, ...]) -> str:
    shown = ", ".join(str(length) for length in lengths[:8]) + (", ..." if len(lengths) > 8 else "")
    return f"{len(lengths)} buffers of [{shown}] bytes"
