"""The coordinator's end of a feed: frames to the root of a cluster, and its acknowledgements back.

A root dials the coordinator's port and asks for `FEED_PROTOCOL` in the handshake; its certificate says who it is, its
first words for which cluster and generation. Thousands of feeds live in one loop, without a thread for each. What a
root may say is small and known, so nothing is taken for more than one frame's head.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from ..core.errors import FrameError, HandshakeError, RavnestError
from ..core.messages import Backward, Data
from ..net.agree import INTRODUCTION_BYTES, Introduction, decode_introduction, encode_introduction
from ..net.frame import (
    PREFIX_BYTES,
    check_generation,
    decode_header,
    decode_lengths,
    decode_prefix,
    encode_head,
    flat,
)
from .feeder import Sending
from .people import address_of, name_of

__all__ = ["FeedLine", "FeedPort", "Fed"]

_WAITING_BYTES = 1 << 20
_MAX_FRAME_BYTES = 1 << 32


class Fed(Protocol):
    """A cluster as its feed sees it."""

    generation: int

    def attached(self, line: FeedLine) -> None: ...

    def acknowledged(self, microbatch: int) -> None: ...

    def room(self) -> None:
        """There is room on the line again."""

    def detached(self, line: FeedLine, reason: str, *, is_fault: bool) -> None:
        """The line broke; `is_fault`: because of what the root said."""


class FeedLine(Protocol):
    """The line to a root. Once it is closed, nothing more is heard of it."""

    @property
    def has_room(self) -> bool: ...

    def send(self, sending: Sending) -> None: ...

    def close(self) -> None: ...


class FeedPort(asyncio.Protocol):
    """One connection. `find(name, introduction)` says for which cluster it is, or raises a `RavnestError`."""

    def __init__(
        self, find: Callable[[str, Introduction], Fed], on_refused: Callable[[str, str], None], *, hello_s: float
    ) -> None:
        self._find, self._on_refused, self._hello_s = find, on_refused, hello_s
        self._arrived = bytearray()
        self._fed: Fed | None = None
        self._name, self._address = "", "somebody who left"
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Data)
        self._timer: asyncio.TimerHandle | None = None
        self._fault: str | None = None
        self.has_room = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WAITING_BYTES)
        self._address = address_of(transport)
        self._timer = asyncio.get_running_loop().call_later(
            self._hello_s, self._refuse, f"it did not say what for within {self._hello_s:g} s"
        )

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._arrived += data
        try:
            if self._fed is None:
                self._hear_introduction()
            while self._fed is not None and self._hear_frame():
                pass
        except RavnestError as error:
            self._refuse(str(error))

    def pause_writing(self) -> None:
        self.has_room = False

    def resume_writing(self) -> None:
        self.has_room = True
        if self._fed is not None:
            self._fed.room()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()
        fed, self._fed = self._fed, None
        self.has_room = False
        if fed is not None:
            reason = self._fault or (str(error) if error else "the root left")
            fed.detached(self, reason, is_fault=self._fault is not None)

    def send(self, sending: Sending) -> None:
        assert self._fed is not None
        views = [flat(buffer) for buffer in sending.buffers]
        lengths = [view.nbytes for view in views]
        head = encode_head(sending.header, lengths, generation=self._fed.generation, max_bytes=_MAX_FRAME_BYTES)
        self._transport.writelines([head, *views])

    def close(self) -> None:
        self._fed = None
        self._transport.close()

    def _hear_introduction(self) -> None:
        if len(self._arrived) < INTRODUCTION_BYTES:
            return
        name = name_of(self._transport)
        if name is None:
            raise HandshakeError("it has no certificate of this coordinator")
        said = decode_introduction(bytes(self._arrived[:INTRODUCTION_BYTES]))
        del self._arrived[:INTRODUCTION_BYTES]
        self._name = name
        fed = self._find(name, said)
        self._stop_waiting()
        self._fed = fed
        self._transport.write(encode_introduction(said))
        fed.attached(self)

    def _hear_frame(self) -> bool:
        """Take one whole frame, if it is there."""
        assert self._fed is not None
        if len(self._arrived) < PREFIX_BYTES:
            return False
        prefix = decode_prefix(self._arrived[:PREFIX_BYTES])
        check_generation(prefix.generation, self._fed.generation)
        start = PREFIX_BYTES + prefix.lengths_bytes
        end = start + prefix.header_bytes
        if len(self._arrived) < end:
            return False
        lengths = decode_lengths(prefix, self._arrived[PREFIX_BYTES:start], max_bytes=0)
        header = decode_header(self._decoder, bytes(self._arrived[start:end]))
        if any(lengths) or not isinstance(header, Backward):
            raise FrameError(f"a {type(header).__name__} does not come from a root")
        del self._arrived[:end]
        self._fed.acknowledged(header.microbatch)
        return True

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, reason: str) -> None:
        self._fault = reason
        self._transport.abort()
        self._on_refused(f"{self._name or 'the feed'} at {self._address}", reason)
