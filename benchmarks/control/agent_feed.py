"""The feed of a simulated first stage: real TLS and frames; acknowledges microbatches one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, cast

import msgspec

from ravnest.protocol.control import Assignment
from ravnest.protocol.pipeline import Backward, Data, Forward, feed_purpose
from ravnest.protocol.relay import FEED_PROTOCOL
from ravnest.transport.address import Address
from ravnest.transport.frame import PREFIX_BYTES, decode_header, decode_lengths, decode_prefix, encode_head
from ravnest.transport.identity import Identity
from ravnest.transport.introduction import INTRODUCTION_BYTES, Introduction, encode_introduction
from ravnest.transport.tls import tls_context

_MAX_FRAME_BYTES = 1 << 20


class FeedListener(Protocol):
    """Receives the measurements of a feed."""

    def leased(self, seconds: float) -> None: ...

    def acknowledged(self, part: Assignment, microbatch: int, *, is_last: bool) -> None: ...


class SimulatedFeed(asyncio.Protocol):
    """One first stage. The coordinator keeps `ahead` microbatches in flight, so m is sent at the end of m - ahead."""

    def __init__(self, part: Assignment, accumulate: int, microbatch_s: float, listener: FeedListener) -> None:
        self.microbatch_s = microbatch_s
        self._part, self._accumulate, self._listener = part, accumulate, listener
        self._introduction = Introduction.of(part.generation, feed_purpose(part.cluster))
        self._decoder: msgspec.msgpack.Decoder[msgspec.Struct] = msgspec.msgpack.Decoder(Data)
        self._buffer = bytearray()
        self._is_introduced = False
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Forward] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._received = self._ahead = 0
        self._done_s: list[float] = []  # of each microbatch

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(encode_introduction(self._introduction))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_introduced and len(self._buffer) >= INTRODUCTION_BYTES:
            assert bytes(self._buffer[:INTRODUCTION_BYTES]) == encode_introduction(self._introduction)
            del self._buffer[:INTRODUCTION_BYTES]
            self._is_introduced = True
        while self._is_introduced and self._receive_frame():
            pass

    def connection_lost(self, error: Exception | None) -> None:
        self.close()

    def close(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _receive_frame(self) -> bool:
        if len(self._buffer) < PREFIX_BYTES:
            return False
        prefix = decode_prefix(self._buffer[:PREFIX_BYTES])
        start = PREFIX_BYTES + prefix.lengths_bytes
        end = start + prefix.header_bytes
        if len(self._buffer) < end:
            return False
        lengths = decode_lengths(prefix, self._buffer[PREFIX_BYTES:start], max_bytes=_MAX_FRAME_BYTES)
        if len(self._buffer) < end + sum(lengths):
            return False
        header = decode_header(self._decoder, bytes(self._buffer[start:end]))
        assert isinstance(header, Forward), f"unexpected {type(header).__name__}: this first stage only trains"
        del self._buffer[: end + sum(lengths)]
        self._enqueue(header)
        return True

    def _enqueue(self, header: Forward) -> None:
        self._received += 1
        self._ahead = max(self._ahead, self._received - len(self._done_s))
        trigger = header.microbatch - self._part.first_update * self._accumulate - self._ahead
        if header.microbatch % self._accumulate == 0 and trigger >= 0:
            self._listener.leased(self._loop.time() - self._done_s[trigger])
        self._waiting.append(header)
        if self._timer is None:
            self._start_next()

    def _start_next(self) -> None:
        if self.microbatch_s:
            self._timer = self._loop.call_later(self.microbatch_s, self._finish)
        else:
            self._timer = self._loop.call_soon(self._finish)  # type: ignore[assignment]

    def _finish(self) -> None:
        self._timer = None
        if not self._waiting or self._transport is None or self._transport.is_closing():
            return
        header = self._waiting.popleft()
        frame = encode_head(
            Backward(header.microbatch, header.batch), [], generation=self._part.generation, max_bytes=0
        )
        self._transport.write(frame)
        self._done_s.append(self._loop.time())
        is_last = header.microbatch % self._accumulate == self._accumulate - 1
        self._listener.acknowledged(self._part, header.microbatch, is_last=is_last)
        if self._waiting:
            self._start_next()


async def open_feed(feed: SimulatedFeed, address: Address, identity: Identity) -> None:
    """Connect to the coordinator's feed port as a first stage does."""
    context = tls_context(identity, server_side=False)
    context.set_alpn_protocols([FEED_PROTOCOL])
    await asyncio.get_running_loop().create_connection(lambda: feed, *address, ssl=context)
