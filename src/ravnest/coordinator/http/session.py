"""The session of one connected node: MessagePack over a WebSocket, with every message validated.

Outgoing messages wait in a short queue, so that a node that does not read delays no other: when its queue is full it is
disconnected, and gets all its messages again when it reconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import msgspec
from aiohttp import WSMsgType, web

from ravnest.coordinator.http.limits import HttpTimeouts
from ravnest.errors import FrameError, LinkClosed
from ravnest.protocol.control import MAX_MESSAGE_BYTES, Disconnect, FromCoordinator, FromNode, Hello, NodeWork

__all__ = ["Session", "run_session"]

_MAX_QUEUED = 64

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)


class SessionHandler(Protocol):
    """Handles messages of nodes. A `FrameError` or `ValueError` disconnects the node with that reason."""

    heartbeat_s: float

    def handle_hello(self, session: Session, hello: Hello) -> None: ...

    def handle_message(self, session: Session, message: FromNode) -> None: ...

    def handle_disconnect(self, session: Session, reason: str) -> None: ...

    def log_rejection(self, address: str, reason: str) -> None:
        """Log a connection that ended before its hello."""


class Session:
    """The connection of one node."""

    def __init__(
        self, socket: web.WebSocketResponse, request: web.Request, name: str, address: str, timeouts: HttpTimeouts
    ) -> None:
        self.name, self.address = name, address
        self._socket, self._transport, self._timeouts = socket, request.transport, timeouts
        self._queue: asyncio.Queue[FromCoordinator] = asyncio.Queue(_MAX_QUEUED)
        self._end_reason: str | None = None
        self._loop = asyncio.get_running_loop()
        self._received_s, self._silence_s = self._loop.time(), timeouts.hello_s
        self._liveness_timer = self._loop.call_later(timeouts.hello_s, self._check_liveness)

    @property
    def is_open(self) -> bool:
        return self._end_reason is None

    def send(self, message: FromCoordinator) -> None:
        """Queue a message; a full queue disconnects the node."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.end(f"the queue is full: the node has not received {_MAX_QUEUED} messages")

    def disconnect(
        self, reason: str, *, may_reconnect: bool, is_run_over: bool = False, contribution: NodeWork | None = None
    ) -> None:
        """Send a `Disconnect` and close after it; further messages of the node are ignored."""
        if self.is_open:
            self.send(Disconnect(reason, may_reconnect, is_run_over, contribution))
            self._end_reason = self._end_reason or reason

    def end(self, reason: str) -> None:
        """Close now."""
        self._end_reason = self._end_reason or reason
        if self._transport is not None:
            self._transport.abort()

    async def send_all(self) -> None:
        """Send queued messages, until a `Disconnect` is sent or sending fails."""
        try:
            while True:
                message = await self._queue.get()
                async with asyncio.timeout(self._timeouts.send_s):
                    await self._socket.send_bytes(_encoder.encode(message))
                if isinstance(message, Disconnect):
                    await self._socket.close()
                    return
        except (ConnectionError, TimeoutError, RuntimeError) as error:
            self.end(f"cannot send to the node: {error or 'timed out'}")

    def allow_silence(self, silence_s: float) -> None:
        """Set the liveness timeout."""
        self._silence_s = silence_s
        self._liveness_timer.cancel()
        self._check_liveness()

    def _check_liveness(self) -> None:
        """End a silent session. One timer serves many messages: one for each would double their cost."""
        left_s = self._received_s + self._silence_s - self._loop.time()
        if left_s > 0:
            self._liveness_timer = self._loop.call_later(left_s, self._check_liveness)
        else:
            self.end(f"no message for {self._silence_s:g} s")

    def stop_liveness_timer(self) -> None:
        self._liveness_timer.cancel()

    async def receive(self) -> FromNode:
        """Receive a message; raises `FrameError` for an invalid one, `LinkClosed` at the end."""
        message = await self._socket.receive()
        self._received_s = self._loop.time()
        if self._end_reason is not None:
            raise LinkClosed(self._end_reason)
        if message.type is WSMsgType.BINARY:
            try:
                return _decoder.decode(message.data)
            except (ValueError, RecursionError) as error:
                raise FrameError(f"invalid message: {error}") from error
        if message.type is WSMsgType.ERROR:
            raise LinkClosed(f"invalid message: {message.data}")
        if message.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            raise LinkClosed("the connection ended")
        raise FrameError("expected MessagePack, got text")


async def run_session(
    request: web.Request, name: str, address: str, handler: SessionHandler, timeouts: HttpTimeouts
) -> web.WebSocketResponse:
    """Run the session of a node, from its hello to its end."""
    socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False, timeout=timeouts.goodbye_s)
    await socket.prepare(request)
    session = Session(socket, request, name, address, timeouts)
    sending = asyncio.create_task(session.send_all())
    has_arrived, reason = False, "the connection ended"
    try:
        hello = await session.receive()
        if not isinstance(hello, Hello):
            raise FrameError("expected a hello as the first message")
        handler.handle_hello(session, hello)
        has_arrived = True
        session.allow_silence(3 * handler.heartbeat_s)
        while True:
            handler.handle_message(session, await session.receive())
    except LinkClosed as error:
        reason = str(error)
    except (FrameError, ValueError) as error:  # invalid message: the node gets the reason
        reason = str(error)
        session.disconnect(reason, may_reconnect=True)
    finally:
        session.stop_liveness_timer()
        if has_arrived:
            handler.handle_disconnect(session, reason)
        else:
            handler.log_rejection(f"{name} at {address}", reason)
        await _close(socket, sending, has_disconnect=not session.is_open, within_s=timeouts.goodbye_s)
    return socket


async def _close(
    socket: web.WebSocketResponse, sending: asyncio.Task[None], *, has_disconnect: bool, within_s: float
) -> None:
    """Close the socket, after a queued `Disconnect` if there is one."""
    with contextlib.suppress(ConnectionError, TimeoutError, RuntimeError, asyncio.CancelledError):
        async with asyncio.timeout(within_s):
            if has_disconnect:
                await asyncio.wait([sending])
            await socket.close()
    sending.cancel()
