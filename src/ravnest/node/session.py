"""Runs one session with the coordinator: `Hello`, then messages in both directions until the connection breaks.

Messages wait in an outbox that outlives the session, so that the next session sends those from in between. The
outbox is bounded; when it is full, the oldest messages are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import msgspec

from ravnest.errors import FrameError, LinkClosed, LinkTimeout, RavnestError
from ravnest.node.client import Client
from ravnest.protocol.control import (
    MAX_MESSAGE_BYTES,
    Disconnect,
    FromCoordinator,
    FromNode,
    Heartbeat,
    Hello,
    NodeWork,
    Welcome,
)

__all__ = ["Outbox", "DisconnectedByCoordinator", "run_session"]

_WELCOME_S = 20.0
_SEND_S = 30.0
_MIN_HEARTBEAT_S, _MAX_HEARTBEAT_S = 0.1, 60.0
_MAX_WAITING = 4096

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)


class DisconnectedByCoordinator(RavnestError):
    """The coordinator ended the session: because the run is over, or the node may reconnect or not."""

    def __init__(
        self, reason: str, *, may_reconnect: bool, is_run_over: bool = False, contribution: NodeWork | None = None
    ) -> None:
        super().__init__(reason)
        self.may_reconnect, self.is_run_over, self.contribution = may_reconnect, is_run_over, contribution


class Outbox:
    """Messages to send, in order; for one asyncio loop."""

    def __init__(self, capacity: int = _MAX_WAITING) -> None:
        self._waiting: deque[FromNode] = deque(maxlen=capacity)
        self._changed = asyncio.Event()

    def put(self, message: FromNode) -> None:
        self._waiting.append(message)
        self._changed.set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def first(self) -> FromNode:
        """Wait for the next message; it stays until `drop`, in case sending fails."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting[0]

    def drop(self, message: FromNode) -> None:
        if self._waiting and self._waiting[0] is message:
            self._waiting.popleft()


async def run_session(
    client: Client,
    hello: Hello,
    outbox: Outbox,
    on_message: Callable[[FromCoordinator], None],
    activity: Callable[[], str],
) -> None:
    """Run until the connection breaks (`LinkError`) or the coordinator ends it (`DisconnectedByCoordinator`).

    The coordinator answers a `LeaveRequest` by ending the session. `activity` is the text of heartbeats.
    """
    socket = await client.connect("/v1/control", max_message_bytes=MAX_MESSAGE_BYTES)
    try:
        await _send(socket, hello)
        welcome = await _receive(socket, _WELCOME_S)
        if not isinstance(welcome, Welcome):
            raise FrameError(f"the coordinator answered a Hello with {type(welcome).__name__}, expected Welcome")
        on_message(welcome)
        interval_s = min(max(welcome.heartbeat_s, _MIN_HEARTBEAT_S), _MAX_HEARTBEAT_S)
        await _until_first(
            _send_all(socket, outbox),
            _receive_all(socket, on_message),
            _send_heartbeats(outbox, interval_s, activity),
        )
    finally:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(1.0):
                await socket.close()


async def _until_first(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends or fails; then cancel the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_all(socket: aiohttp.ClientWebSocketResponse[bool], outbox: Outbox) -> None:
    while True:
        message = await outbox.first()
        await _send(socket, message)
        outbox.drop(message)


async def _receive_all(
    socket: aiohttp.ClientWebSocketResponse[bool], on_message: Callable[[FromCoordinator], None]
) -> None:
    while True:
        on_message(await _receive(socket, None))  # the WebSocket's own heartbeat detects a dead connection


async def _send_heartbeats(outbox: Outbox, interval_s: float, activity: Callable[[], str]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        if not len(outbox):  # any other message is a sign of life too
            outbox.put(Heartbeat(activity()[:200]))


async def _send(socket: aiohttp.ClientWebSocketResponse[bool], message: FromNode) -> None:
    try:
        async with asyncio.timeout(_SEND_S):
            await socket.send_bytes(_encoder.encode(message))
    except TimeoutError as error:
        raise LinkTimeout(f"the coordinator accepted no message within {_SEND_S:g} s") from error
    except (aiohttp.ClientError, OSError, RuntimeError) as error:
        raise LinkClosed(f"lost the session with the coordinator: {error}") from error


async def _receive(socket: aiohttp.ClientWebSocketResponse[bool], timeout_s: float | None) -> FromCoordinator:
    """Receive a message; a `Disconnect` raises `DisconnectedByCoordinator`."""
    try:
        frame = await socket.receive(timeout_s)
    except TimeoutError as error:
        raise LinkTimeout(f"the coordinator sent nothing within {timeout_s:g} s") from error
    if frame.type is not aiohttp.WSMsgType.BINARY:
        raise LinkClosed("lost the session with the coordinator")
    try:
        message = _decoder.decode(frame.data)
    except ValueError as error:
        raise FrameError(f"could not decode a message of the coordinator: {error}") from error
    if isinstance(message, Disconnect):
        raise DisconnectedByCoordinator(
            message.reason, may_reconnect=message.may_reconnect, is_run_over=message.is_run_over,
            contribution=message.contribution,
        )  # fmt: skip
    return message
