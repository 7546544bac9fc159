"""One conversation with the coordinator: `Hello`, then what there is to say and to hear, until it breaks.

What is to be said waits in an outbox that outlives the conversation, so what happened while nobody listened is said
afterwards. It is bounded: of what happened in a long silence, the newest is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import msgspec

from ..core.control import MAX_MESSAGE_BYTES, Beat, Goodbye, Hello, Said, Told, Welcome
from ..core.errors import FrameError, LinkClosed, LinkTimeout, RavnestError
from .client import Client

__all__ = ["Outbox", "SentAway", "converse"]

_WELCOME_S = 20.0
_SEND_S = 30.0
_LEAST_BEAT_S, _MOST_BEAT_S = 0.1, 60.0
_MOST_WAITING = 4096

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


class SentAway(RavnestError):
    """The coordinator said goodbye; `again`: and that one may come back."""

    def __init__(self, reason: str, *, again: bool) -> None:
        super().__init__(reason)
        self.again = again


class Outbox:
    """What is to be said, in order; used in one asyncio loop."""

    def __init__(self, most: int = _MOST_WAITING) -> None:
        self._waiting: deque[Said] = deque(maxlen=most)
        self._changed = asyncio.Event()

    def put(self, said: Said) -> None:
        self._waiting.append(said)
        self._changed.set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def first(self) -> Said:
        """What is to be said next; it stays until `drop`, in case saying it fails."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting[0]

    def drop(self, said: Said) -> None:
        if self._waiting and self._waiting[0] is said:
            self._waiting.popleft()


async def converse(
    client: Client, hello: Hello, outbox: Outbox, heard: Callable[[Told], None], doing: Callable[[], str]
) -> None:
    """Until it breaks (`LinkError`) or the coordinator says goodbye (`SentAway`), which it does after a `Leave`."""
    socket = await client.connect("/v1/control", max_message_bytes=MAX_MESSAGE_BYTES)
    try:
        await _send(socket, hello)
        welcome = await _hear(socket, _WELCOME_S)
        _raise_goodbye(welcome)
        if not isinstance(welcome, Welcome):
            raise FrameError(f"the coordinator answered {type(welcome).__name__} to a hello")
        heard(welcome)
        await _until_first(
            _say_all(socket, outbox),
            _hear_all(socket, heard),
            _beat(outbox, min(max(welcome.beat_s, 0.1), 60.0), doing),
        )
    finally:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(1.0):
                await socket.close()


async def _until_first(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, or fails; then end the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _say_all(socket: aiohttp.ClientWebSocketResponse[bool], outbox: Outbox) -> None:
    while True:
        said = await outbox.first()
        await _send(socket, said)
        outbox.drop(said)


async def _hear_all(socket: aiohttp.ClientWebSocketResponse[bool], heard: Callable[[Told], None]) -> None:
    while True:
        told = await _hear(socket, None)  # a silent connection is noticed by the WebSocket's own heartbeat
        _raise_goodbye(told)
        heard(told)


async def _beat(outbox: Outbox, beat_s: float, doing: Callable[[], str]) -> None:
    while True:
        await asyncio.sleep(beat_s)
        if not len(outbox):  # else something is being said anyway
            outbox.put(Beat(doing()[:200]))


def _raise_goodbye(told: Told) -> None:
    if isinstance(told, Goodbye):
        raise SentAway(told.reason, again=told.again)


async def _send(socket: aiohttp.ClientWebSocketResponse[bool], said: Said) -> None:
    try:
        async with asyncio.timeout(_SEND_S):
            await socket.send_bytes(_encoder.encode(said))
    except TimeoutError as error:
        raise LinkTimeout("the coordinator hears nothing") from error
    except (aiohttp.ClientError, OSError, RuntimeError) as error:
        raise LinkClosed(f"the coordinator has closed the conversation or died: {error}") from error


async def _hear(socket: aiohttp.ClientWebSocketResponse[bool], within_s: float | None) -> Told:
    try:
        message = await socket.receive(within_s)
    except TimeoutError as error:
        raise LinkTimeout("the coordinator says nothing") from error
    if message.type is aiohttp.WSMsgType.BINARY:
        try:
            return _decoder.decode(message.data)
        except ValueError as error:
            raise FrameError(f"what the coordinator says cannot be read: {error}") from error
    raise LinkClosed("the coordinator has closed the conversation or died")
