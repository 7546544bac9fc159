"""A node without a model: it enrols, says hello, is ready at once, and acknowledges what it is fed. Real sockets.

It lives in one asyncio loop with others like it. What it does about a part is a function of its own, so that a test
can give it another: `honest` by default.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import aiohttp
import msgspec

from ravnest.core.control import (
    MAX_MESSAGE_BYTES,
    Beat,
    Desired,
    Hello,
    LetGo,
    NodeProfile,
    Part,
    Report,
    Said,
    Told,
    Welcome,
    Whereabouts,
)
from ravnest.core.messages import Backward, Data, Forward
from ravnest.core.orders import Ready
from ravnest.net.addresses import Address
from ravnest.net.agree import INTRODUCTION_BYTES, Introduction, decode_introduction, encode_introduction
from ravnest.net.feeding import feed_purpose
from ravnest.net.frame import PREFIX_BYTES, decode_header, decode_lengths, decode_prefix, encode_head
from ravnest.net.hello import FEED_PROTOCOL
from ravnest.net.identity import Identity
from ravnest.net.ticket import Ticket
from ravnest.net.tls import tls_context
from ravnest.node.client import Client, member_context
from ravnest.node.enrol import Applicant, enrol

T = TypeVar("T")

PATIENCE_S = 20.0
PROFILE = NodeProfile(memory_bytes=4 * 10**9, gflops=10.0)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)
_frames: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Data)


async def enrolled(ticket: str, name: str, directory: Path) -> Identity:
    """An identity from the coordinator of this ticket."""
    parsed = Ticket.parse(ticket)
    applicant = Applicant(ticket=parsed, name=name, release="test", directory=directory / name)
    return await enrol(applicant, parsed.addresses[0])


def feed_context(identity: Identity) -> ssl.SSLContext:
    context = tls_context(identity, server_side=False)
    context.set_alpn_protocols([FEED_PROTOCOL])
    return context


class Feed:
    """A root's end of the line on which its batches come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generation: int) -> None:
        self._reader, self._writer, self.generation = reader, writer, generation

    @classmethod
    async def dial(cls, address: Address, context: ssl.SSLContext, generation: int, cluster: str) -> Feed:
        """Raises an `OSError` or `EOFError` where the coordinator does not want it."""
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        feed = cls(reader, writer, generation)
        said = Introduction.of(generation, feed_purpose(cluster))
        feed.write(encode_introduction(said))
        try:
            assert decode_introduction(await reader.readexactly(INTRODUCTION_BYTES)) == said
        except BaseException:
            feed.close()
            raise
        return feed

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def acknowledge(self, microbatch: int, *, generation: int | None = None) -> None:
        header = Backward(microbatch, 1)
        self.write(encode_head(header, [], generation=generation or self.generation, max_bytes=0))

    async def next(self) -> msgspec.Struct:
        """The next frame's header; its buffers are read and dropped."""
        prefix = decode_prefix(await self._reader.readexactly(PREFIX_BYTES))
        assert prefix.generation == self.generation
        lengths = decode_lengths(prefix, await self._reader.readexactly(prefix.lengths_bytes), max_bytes=1 << 24)
        header = decode_header(_frames, await self._reader.readexactly(prefix.header_bytes))
        await self._reader.readexactly(sum(lengths))
        return header

    async def ended(self) -> None:
        """Read on until the coordinator closes it."""
        with contextlib.suppress(OSError, EOFError):
            while await self._reader.read(1 << 16):
                pass

    def close(self) -> None:
        self._writer.transport.abort()


class Guest:
    """A node in conversation with its coordinator; `told` is all it was told, in order."""

    def __init__(
        self,
        identity: Identity,
        address: Address,
        *,
        profile: NodeProfile = PROFILE,
        where: Whereabouts | None = None,
        does: Does | None = None,
    ) -> None:
        self.name, self.identity, self.address, self.profile = identity.name, identity, address, profile
        self.where = where or Whereabouts((("127.0.0.1", 9),))
        self.told: list[Told] = []
        self.feed: Feed | None = None
        self.fed: list[int] = []  # microbatches
        self.holding = 0
        self.why_ended: str | None = None
        self._does = does or honest
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._client = Client(address, member_context(identity))

    async def __aenter__(self) -> Guest:
        await self._client.__aenter__()
        try:
            self._socket = await self._client.connect("/v1/control", max_message_bytes=MAX_MESSAGE_BYTES)
        except BaseException:
            await self._client.__aexit__()
            raise
        await self.say(Hello(release="test", profile=self.profile, where=self.where, holding=self.holding))
        self._tasks = [asyncio.create_task(self._hear())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.feed is not None:
            self.feed.close()
        await self._socket.close()
        await self._client.__aexit__()
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, OSError | EOFError):  # those the coordinator causes
                raise end

    @property
    def part(self) -> Part:
        """The latest that it was told to be."""
        return next(told.part for told in reversed(self.told) if isinstance(told, Desired) and told.part is not None)

    async def say(self, said: Said) -> None:
        await self.send(_encoder.encode(said))

    async def send(self, data: bytes) -> None:
        """Whatever bytes, as one message."""
        await self._socket.send_bytes(data)

    async def report_ready(self, part: Part) -> None:
        await self.say(Report(part.generation, Ready(part.stage)))

    async def hears(self, kind: type[T], holds: Callable[[T], bool] = lambda told: True) -> T:
        """The first such message that it was told, now or later."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for told in self.told:
                    if isinstance(told, kind) and holds(told):
                        return told
                assert self.why_ended is None, f"{self.name} did not hear it, and its conversation ended"
                self._changed.clear()
                await self._changed.wait()

    async def ended(self) -> str:
        """Wait for the end of the conversation; returns how it ended."""
        async with asyncio.timeout(PATIENCE_S):
            while self.why_ended is None:
                self._changed.clear()
                await self._changed.wait()
        return self.why_ended

    async def dial_feed(self, part: Part, *, generation: int | None = None) -> Feed:
        return await Feed.dial(self.address, feed_context(self.identity), generation or part.generation, part.cluster)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Have it done as long as this guest is there."""
        self._tasks.append(asyncio.create_task(work))

    async def _hear(self) -> None:
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                break
            told = _decoder.decode(message.data)
            self.told.append(told)
            self._changed.set()
            if isinstance(told, Desired):
                await self._take(told.part)
            elif isinstance(told, Welcome):
                self.keep(self._beat(told.beat_s))
        self.why_ended = f"close code {self._socket.close_code}"
        self._changed.set()

    async def _beat(self, beat_s: float) -> None:
        while True:
            await asyncio.sleep(beat_s)
            await self.say(Beat())

    async def _take(self, part: Part | None) -> None:
        if part is not None and part.generation == self.holding:
            return  # told again
        if self.feed is not None:
            self.feed.close()
            self.feed = None
        if self.holding:
            await self.say(LetGo(self.holding))
        self.holding = part.generation if part is not None else 0
        if part is not None:
            self.keep(self._does(self, part))


Does: TypeAlias = Callable[[Guest, Part], Coroutine[Any, Any, None]]
"""What a guest does about a part it should be."""


async def honest(guest: Guest, part: Part) -> None:
    """Be ready; the root acknowledges each microbatch that comes."""
    if part.stage == 0:
        guest.feed = await guest.dial_feed(part)
    await guest.report_ready(part)
    if guest.feed is not None:
        await train(guest, guest.feed)


async def train(guest: Guest, feed: Feed) -> None:
    while True:
        header = await feed.next()
        if isinstance(header, Forward):
            guest.fed.append(header.microbatch)
            feed.acknowledge(header.microbatch)
