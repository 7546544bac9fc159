"""A node without a model: it enrolls, connects, is ready at once, and acknowledges its microbatches. Uses real sockets.

Nodes run in one asyncio loop. `behaviour` is what a node does about an assignment, `honest` by default.
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

from ravnest.node.client import Client, member_context
from ravnest.node.membership import EnrollmentRequest, enrol
from ravnest.protocol.commands import StageReady
from ravnest.protocol.control import (
    MAX_MESSAGE_BYTES,
    Assignment,
    AssignmentReleased,
    DesiredAssignment,
    FromCoordinator,
    FromNode,
    Heartbeat,
    Hello,
    NodeProfile,
    StageReport,
    Welcome,
)
from ravnest.protocol.peer import PeerAddresses
from ravnest.protocol.pipeline import Backward, Data, Forward, feed_purpose
from ravnest.protocol.relay import FEED_PROTOCOL
from ravnest.transport.address import Address
from ravnest.transport.frame import PREFIX_BYTES, decode_header, decode_lengths, decode_prefix, encode_head
from ravnest.transport.identity import Identity
from ravnest.transport.introduction import INTRODUCTION_BYTES, Introduction, decode_introduction, encode_introduction
from ravnest.transport.ticket import Ticket
from ravnest.transport.tls import tls_context

T = TypeVar("T")

TIMEOUT_S = 20.0
PROFILE = NodeProfile(memory_bytes=4 * 10**9, gflops=10.0)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)
_frames: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Data)


async def enrolled(ticket: str, name: str, directory: Path) -> Identity:
    """Enroll with this ticket."""
    parsed = Ticket.parse(ticket)
    request = EnrollmentRequest(ticket=parsed, name=name, release="test", directory=directory / name)
    return await enrol(request, parsed.addresses[0])


def feed_context(identity: Identity) -> ssl.SSLContext:
    context = tls_context(identity, server_side=False)
    context.set_alpn_protocols([FEED_PROTOCOL])
    return context


class Feed:
    """The first stage's end of a feed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generation: int) -> None:
        self._reader, self._writer, self.generation = reader, writer, generation

    @classmethod
    async def dial(cls, address: Address, context: ssl.SSLContext, generation: int, cluster: str) -> Feed:
        """Raises an `OSError` or `EOFError` if the coordinator rejects it."""
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        feed = cls(reader, writer, generation)
        introduction = Introduction.of(generation, feed_purpose(cluster))
        feed.write(encode_introduction(introduction))
        try:
            assert decode_introduction(await reader.readexactly(INTRODUCTION_BYTES)) == introduction
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


class FakeNode:
    """A node with a session; `received` are all messages of the coordinator, in order."""

    def __init__(
        self,
        identity: Identity,
        address: Address,
        *,
        profile: NodeProfile = PROFILE,
        where: PeerAddresses | None = None,
        behaviour: Behaviour | None = None,
    ) -> None:
        self.name, self.identity, self.address, self.profile = identity.name, identity, address, profile
        self.where = where or PeerAddresses((("127.0.0.1", 9),))
        self.received: list[FromCoordinator] = []
        self.feed: Feed | None = None
        self.fed: list[int] = []  # microbatches
        self.holding = 0
        self.end_reason: str | None = None
        self._behaviour = behaviour or honest
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._client = Client(address, member_context(identity))

    async def __aenter__(self) -> FakeNode:
        await self._client.__aenter__()
        try:
            self._socket = await self._client.connect("/v1/control", max_message_bytes=MAX_MESSAGE_BYTES)
        except BaseException:
            await self._client.__aexit__()
            raise
        await self.send(Hello(release="test", profile=self.profile, addresses=self.where, held_generation=self.holding))
        self._tasks = [asyncio.create_task(self._receive_all())]
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
    def assignment(self) -> Assignment:
        """The latest assignment."""
        return next(
            message.assignment
            for message in reversed(self.received)
            if isinstance(message, DesiredAssignment) and message.assignment is not None
        )

    async def send(self, message: FromNode) -> None:
        await self.send_bytes(_encoder.encode(message))

    async def send_bytes(self, data: bytes) -> None:
        """Any bytes, as one message."""
        await self._socket.send_bytes(data)

    async def report_ready(self, part: Assignment) -> None:
        await self.send(StageReport(part.generation, StageReady(part.stage)))

    async def receive(self, kind: type[T], holds: Callable[[T], bool] = lambda message: True) -> T:
        """The first such message, waiting for it if needed."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for message in self.received:
                    if isinstance(message, kind) and holds(message):
                        return message
                assert self.end_reason is None, f"{self.name} did not receive it before its session ended"
                self._changed.clear()
                await self._changed.wait()

    async def ended(self) -> str:
        """Wait for the end of the session; returns the reason."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.end_reason is None:
                self._changed.clear()
                await self._changed.wait()
        return self.end_reason

    async def dial_feed(self, part: Assignment, *, generation: int | None = None) -> Feed:
        return await Feed.dial(self.address, feed_context(self.identity), generation or part.generation, part.cluster)

    def run_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task until this node exits."""
        self._tasks.append(asyncio.create_task(work))

    async def _receive_all(self) -> None:
        async for frame in self._socket:
            if frame.type is not aiohttp.WSMsgType.BINARY:
                break
            message = _decoder.decode(frame.data)
            self.received.append(message)
            self._changed.set()
            if isinstance(message, DesiredAssignment):
                await self._take(message.assignment)
            elif isinstance(message, Welcome):
                self.run_task(self._send_heartbeats(message.heartbeat_s))
        self.end_reason = f"close code {self._socket.close_code}"
        self._changed.set()

    async def _send_heartbeats(self, heartbeat_s: float) -> None:
        while True:
            await asyncio.sleep(heartbeat_s)
            await self.send(Heartbeat())

    async def _take(self, part: Assignment | None) -> None:
        if part is not None and part.generation == self.holding:
            return  # repeated
        if self.feed is not None:
            self.feed.close()
            self.feed = None
        if self.holding:
            await self.send(AssignmentReleased(self.holding))
        self.holding = part.generation if part is not None else 0
        if part is not None:
            self.run_task(self._behaviour(self, part))


Behaviour: TypeAlias = Callable[[FakeNode, Assignment], Coroutine[Any, Any, None]]
"""What a node does about an assignment."""


async def honest(node: FakeNode, part: Assignment) -> None:
    """Report ready; the first stage acknowledges each microbatch."""
    if part.stage == 0:
        node.feed = await node.dial_feed(part)
    await node.report_ready(part)
    if node.feed is not None:
        await train(node, node.feed)


async def train(node: FakeNode, feed: Feed) -> None:
    while True:
        header = await feed.next()
        if isinstance(header, Forward):
            node.fed.append(header.microbatch)
            feed.acknowledge(header.microbatch)
