"""The coordinator's end of a feed: frames to the first stage of a cluster, and its acknowledgements back.

The first stage connects to the coordinator's port with ALPN protocol `FEED_PROTOCOL`. Its certificate names the node,
its introduction the cluster and generation. Thousands of feeds run in one loop, without threads. Messages of the first
stage are small, so at most one frame header is buffered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from ravnest.coordinator.certificates import address_of, is_local, name_of
from ravnest.coordinator.policy.feed import FeedMessage
from ravnest.errors import FrameError, HandshakeError, RavnestError
from ravnest.protocol.pipeline import Backward, Data
from ravnest.transport.frame import (
    PREFIX_BYTES,
    check_generation,
    decode_header,
    decode_lengths,
    decode_prefix,
    encode_head,
    flat,
)
from ravnest.transport.introduction import INTRODUCTION_BYTES, Introduction, decode_introduction, encode_introduction
from ravnest.transport.local import HELLO_BYTES, decode_hello

__all__ = ["FeedConnection", "FeedProtocol"]

_MAX_BUFFER_BYTES = 1 << 20
_MAX_FRAME_BYTES = 1 << 32


class FeedHandler(Protocol):
    """A cluster, as seen by its feed."""

    generation: int

    def attached(self, connection: FeedConnection) -> None: ...

    def acknowledged(self, microbatch: int) -> None: ...

    def room(self) -> None:
        """Handle free space in the send buffer of the connection."""

    def detached(self, connection: FeedConnection, reason: str, *, is_fault: bool) -> None:
        """Handle the end of the connection; `is_fault`: because of an invalid message."""


class FeedConnection(Protocol):
    """The connection to a first stage. Once it is closed, it no longer calls its handler."""

    @property
    def has_room(self) -> bool: ...

    def send(self, sending: FeedMessage) -> None: ...

    def close(self) -> None: ...


class FeedProtocol(asyncio.Protocol):
    """One connection. `find(name, introduction)` returns its cluster, or raises a `RavnestError`."""

    def __init__(
        self,
        find: Callable[[str, Introduction], FeedHandler],
        on_rejected: Callable[[str, str], None],
        *,
        hello_s: float,
    ) -> None:
        self._find, self._on_rejected, self._hello_s = find, on_rejected, hello_s
        self._received = bytearray()
        self._handler: FeedHandler | None = None
        self._name, self._address = "", "unknown address"
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Data)
        self._timer: asyncio.TimerHandle | None = None
        self._fault: str | None = None
        self.has_room = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_MAX_BUFFER_BYTES)
        self._address = address_of(transport)
        self._timer = asyncio.get_running_loop().call_later(
            self._hello_s, self._reject, f"no introduction within {self._hello_s:g} s"
        )

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._received += data
        try:
            if self._handler is None:
                self._receive_introduction()
            while self._handler is not None and self._receive_frame():
                pass
        except RavnestError as error:
            self._reject(str(error))

    def pause_writing(self) -> None:
        self.has_room = False

    def resume_writing(self) -> None:
        self.has_room = True
        if self._handler is not None:
            self._handler.room()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()
        handler, self._handler = self._handler, None
        self.has_room = False
        if handler is not None:
            reason = self._fault or (str(error) if error else "the first stage disconnected")
            handler.detached(self, reason, is_fault=self._fault is not None)

    def send(self, sending: FeedMessage) -> None:
        assert self._handler is not None
        views = [flat(buffer) for buffer in sending.buffers]
        lengths = [view.nbytes for view in views]
        head = encode_head(sending.header, lengths, generation=self._handler.generation, max_bytes=_MAX_FRAME_BYTES)
        self._transport.writelines([head, *views])

    def close(self) -> None:
        self._handler = None
        self._transport.close()

    def _read_hello(self) -> tuple[str, Introduction] | None:
        """Return the name of the first stage's node and its introduction, once both have arrived."""
        if is_local(self._transport):
            if len(self._received) < HELLO_BYTES:
                return None
            hello = decode_hello(bytes(self._received[:HELLO_BYTES]))
            del self._received[:HELLO_BYTES]
            return hello
        if len(self._received) < INTRODUCTION_BYTES:
            return None
        name = name_of(self._transport)
        if name is None:
            raise HandshakeError("the client has no certificate of this coordinator")
        introduction = decode_introduction(bytes(self._received[:INTRODUCTION_BYTES]))
        del self._received[:INTRODUCTION_BYTES]
        return name, introduction

    def _receive_introduction(self) -> None:
        hello = self._read_hello()
        if hello is None:
            return
        self._name, introduction = hello
        handler = self._find(self._name, introduction)
        self._stop_waiting()
        self._handler = handler
        self._transport.write(encode_introduction(introduction))
        handler.attached(self)

    def _receive_frame(self) -> bool:
        """Handle one complete frame, if there is one."""
        assert self._handler is not None
        if len(self._received) < PREFIX_BYTES:
            return False
        prefix = decode_prefix(self._received[:PREFIX_BYTES])
        check_generation(prefix.generation, self._handler.generation)
        start = PREFIX_BYTES + prefix.lengths_bytes
        end = start + prefix.header_bytes
        if len(self._received) < end:
            return False
        lengths = decode_lengths(prefix, self._received[PREFIX_BYTES:start], max_bytes=0)
        header = decode_header(self._decoder, bytes(self._received[start:end]))
        if any(lengths) or not isinstance(header, Backward):
            raise FrameError(f"the first stage sent a {type(header).__name__}, expected an acknowledgement")
        del self._received[:end]
        self._handler.acknowledged(header.microbatch)
        return True

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _reject(self, reason: str) -> None:
        self._fault = reason
        self._transport.abort()
        self._on_rejected(f"{self._name or 'the feed'} at {self._address}", reason)
