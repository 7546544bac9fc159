"""The conversation with one node: MessagePack over a WebSocket, each message checked before anybody acts on it.

What is told waits in a short queue of its own, so a node that does not read keeps nobody else waiting: when its queue
is full it is sent away, and is told all of it again when it comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import msgspec
from aiohttp import WSMsgType, web

from ..core.control import MAX_MESSAGE_BYTES, Goodbye, Hello, Said, Told
from ..core.errors import FrameError, LinkClosed
from .patience import Patience

__all__ = ["Desk", "Session", "converse"]

_WAITING = 64

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


class Desk(Protocol):
    """Who hears what nodes say. Methods may raise `FrameError` or `ValueError`: the node is sent away with that."""

    beat_s: float

    def arrived(self, session: Session, hello: Hello) -> None: ...

    def heard(self, session: Session, said: Said) -> None: ...

    def left(self, session: Session, reason: str) -> None: ...

    def refused(self, address: str, reason: str) -> None:
        """It was sent away before it had arrived."""


class Session:
    """One node that is connected."""

    def __init__(
        self, socket: web.WebSocketResponse, request: web.Request, name: str, address: str, patience: Patience
    ) -> None:
        self.name, self.address = name, address
        self._socket, self._transport, self._patience = socket, request.transport, patience
        self._waiting: asyncio.Queue[Told] = asyncio.Queue(_WAITING)
        self._ending: str | None = None
        self._loop = asyncio.get_running_loop()
        self._heard_s, self._silence_s = self._loop.time(), patience.hello_s
        self._watching = self._loop.call_later(patience.hello_s, self._look)

    @property
    def is_open(self) -> bool:
        return self._ending is None

    def tell(self, message: Told) -> None:
        """Queue a message; a node that takes none is sent away."""
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            self.end(f"it took none of {_WAITING} messages")

    def dismiss(self, reason: str, *, again: bool) -> None:
        """Say goodbye, and close once that is said; from now on it is not heard."""
        if self.is_open:
            self.tell(Goodbye(reason, again))
            self._ending = self._ending or reason

    def end(self, reason: str) -> None:
        """Close now."""
        self._ending = self._ending or reason
        if self._transport is not None:
            self._transport.abort()

    async def send_all(self) -> None:
        """Send what is queued, until a goodbye has been sent or nothing goes through any more."""
        try:
            while True:
                message = await self._waiting.get()
                async with asyncio.timeout(self._patience.send_s):
                    await self._socket.send_bytes(_encoder.encode(message))
                if isinstance(message, Goodbye):
                    await self._socket.close()
                    return
        except (ConnectionError, TimeoutError, RuntimeError) as error:
            self.end(f"it takes no messages: {error or 'it is too slow'}")

    def allow_silence(self, silence_s: float) -> None:
        """From now on it must be heard so often."""
        self._silence_s = silence_s
        self._watching.cancel()
        self._look()

    def _look(self) -> None:
        """End it if it is silent for too long. One timer serves many messages: one for each would double their cost."""
        left_s = self._heard_s + self._silence_s - self._loop.time()
        if left_s > 0:
            self._watching = self._loop.call_later(left_s, self._look)
        else:
            self.end(f"nothing was heard for {self._silence_s:g} s")

    def unwatch(self) -> None:
        self._watching.cancel()

    async def hear(self) -> Said:
        """The next message; raises `FrameError` for what is none, `LinkClosed` at the end."""
        message = await self._socket.receive()
        self._heard_s = self._loop.time()
        if self._ending is not None:
            raise LinkClosed(self._ending)
        if message.type is WSMsgType.BINARY:
            try:
                return _decoder.decode(message.data)
            except (ValueError, RecursionError) as error:
                raise FrameError(f"its message cannot be read: {error}") from error
        if message.type is WSMsgType.ERROR:
            raise LinkClosed(f"its message cannot be read: {message.data}")
        if message.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            raise LinkClosed("the connection ended")
        raise FrameError("it sent text, where MessagePack is spoken")


async def converse(
    request: web.Request, name: str, address: str, desk: Desk, patience: Patience
) -> web.WebSocketResponse:
    """Hear a node out, from its hello to its end."""
    socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False, timeout=patience.goodbye_s)
    await socket.prepare(request)
    session = Session(socket, request, name, address, patience)
    sending = asyncio.create_task(session.send_all())
    has_arrived, reason = False, "the connection ended"
    try:
        hello = await session.hear()
        if not isinstance(hello, Hello):
            raise FrameError("it did not say hello first")
        desk.arrived(session, hello)
        has_arrived = True
        session.allow_silence(3 * desk.beat_s)
        while True:
            desk.heard(session, await session.hear())
    except LinkClosed as error:
        reason = str(error)
    except (FrameError, ValueError) as error:  # what it said is wrong: it is told so
        reason = str(error)
        session.dismiss(reason, again=True)
    finally:
        session.unwatch()
        if has_arrived:
            desk.left(session, reason)
        else:
            desk.refused(f"{name} at {address}", reason)
        await _close(socket, sending, has_goodbye=not session.is_open, within_s=patience.goodbye_s)
    return socket


async def _close(
    socket: web.WebSocketResponse, sending: asyncio.Task[None], *, has_goodbye: bool, within_s: float
) -> None:
    """The goodbye goes out first, if there is one and somebody takes it."""
    with contextlib.suppress(ConnectionError, TimeoutError, RuntimeError, asyncio.CancelledError):
        async with asyncio.timeout(within_s):
            if has_goodbye:
                await asyncio.wait([sending])
            await socket.close()
    sending.cancel()
