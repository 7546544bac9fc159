"""A simulated root's feed: real TLS and frames; a microbatch is acknowledged after a while, one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, cast

import msgspec

from ravnest.core.control import Part
from ravnest.core.messages import Backward, Data, Forward
from ravnest.net.addresses import Address
from ravnest.net.agree import INTRODUCTION_BYTES, Introduction, encode_introduction
from ravnest.net.feeding import feed_purpose
from ravnest.net.frame import PREFIX_BYTES, decode_header, decode_lengths, decode_prefix, encode_head
from ravnest.net.hello import FEED_PROTOCOL
from ravnest.net.identity import Identity
from ravnest.net.tls import tls_context

_MAX_FRAME_BYTES = 1 << 20


class Listener(Protocol):
    """Who wants to know."""

    def leased(self, seconds: float) -> None: ...

    def acknowledged(self, part: Part, microbatch: int, *, is_last: bool) -> None: ...


class Feed(asyncio.Protocol):
    """One root. The coordinator keeps `ahead` microbatches on their way, so number m answers the end of m - ahead."""

    def __init__(self, part: Part, accumulate: int, microbatch_s: float, listener: Listener) -> None:
        self.microbatch_s = microbatch_s
        self._part, self._accumulate, self._listener = part, accumulate, listener
        self._mine = Introduction.of(part.generation, feed_purpose(part.cluster))
        self._decoder: msgspec.msgpack.Decoder[msgspec.Struct] = msgspec.msgpack.Decoder(Data)
        self._arrived = bytearray()
        self._is_known = False
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Forward] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._received = self._ahead = 0
        self._done_s: list[float] = []  # of each microbatch

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(encode_introduction(self._mine))

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        if not self._is_known and len(self._arrived) >= INTRODUCTION_BYTES:
            assert bytes(self._arrived[:INTRODUCTION_BYTES]) == encode_introduction(self._mine)
            del self._arrived[:INTRODUCTION_BYTES]
            self._is_known = True
        while self._is_known and self._hear_frame():
            pass

    def connection_lost(self, error: Exception | None) -> None:
        self.close()

    def close(self) -> None:
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _hear_frame(self) -> bool:
        if len(self._arrived) < PREFIX_BYTES:
            return False
        prefix = decode_prefix(self._arrived[:PREFIX_BYTES])
        start = PREFIX_BYTES + prefix.lengths_bytes
        end = start + prefix.header_bytes
        if len(self._arrived) < end:
            return False
        lengths = decode_lengths(prefix, self._arrived[PREFIX_BYTES:start], max_bytes=_MAX_FRAME_BYTES)
        if len(self._arrived) < end + sum(lengths):
            return False
        header = decode_header(self._decoder, bytes(self._arrived[start:end]))
        assert isinstance(header, Forward), f"a {type(header).__name__} is not for a root that only trains"
        del self._arrived[: end + sum(lengths)]
        self._take(header)
        return True

    def _take(self, header: Forward) -> None:
        self._received += 1
        self._ahead = max(self._ahead, self._received - len(self._done_s))
        asked = header.microbatch - self._part.begin * self._accumulate - self._ahead
        if header.microbatch % self._accumulate == 0 and asked >= 0:
            self._listener.leased(self._loop.time() - self._done_s[asked])
        self._waiting.append(header)
        if self._timer is None:
            self._work()

    def _work(self) -> None:
        if self.microbatch_s:
            self._timer = self._loop.call_later(self.microbatch_s, self._done)
        else:
            self._timer = self._loop.call_soon(self._done)  # type: ignore[assignment]

    def _done(self) -> None:
        self._timer = None
        if not self._waiting or self._transport is None or self._transport.is_closing():
            return
        header = self._waiting.popleft()
        words = encode_head(
            Backward(header.microbatch, header.batch), [], generation=self._part.generation, max_bytes=0
        )
        self._transport.write(words)
        self._done_s.append(self._loop.time())
        is_last = header.microbatch % self._accumulate == self._accumulate - 1
        self._listener.acknowledged(self._part, header.microbatch, is_last=is_last)
        if self._waiting:
            self._work()


async def open_feed(feed: Feed, address: Address, identity: Identity) -> None:
    """Dial the coordinator's port as a root does."""
    context = tls_context(identity, server_side=False)
    context.set_alpn_protocols([FEED_PROTOCOL])
    await asyncio.get_running_loop().create_connection(lambda: feed, *address, ssl=context)
