"""What two nodes say before there is a link, as generators: each yields the event that it waits for.

So one piece of protocol runs as well in a blocking call (`listen.finish`) as among many others in an
asyncio loop (`converse`), and it can be tested without either.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import ssl
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from ravnest.core.errors import HandshakeError, LinkClosed
from ravnest.net.handshake import TlsChannel

__all__ = ["Steps", "authenticate", "converse", "hear", "say"]

T = TypeVar("T")
Steps: TypeAlias = Generator[int, None, T]


def say(channel: TlsChannel, words: bytes) -> Steps[None]:
    left = memoryview(words)
    while left:
        if taken_bytes := channel.try_write([left]):
            left = left[taken_bytes:]
        else:
            yield selectors.EVENT_WRITE
    while not channel.try_flush():
        yield selectors.EVENT_WRITE


def hear(channel: TlsChannel, num_bytes: int) -> Steps[bytes]:
    """Exactly `num_bytes`: what comes after them is for somebody else to read."""
    words = bytearray(num_bytes)
    left = memoryview(words)
    while left:
        got_bytes = channel.try_read([left])
        if got_bytes is None:
            yield selectors.EVENT_READ
        elif got_bytes == 0:
            raise LinkClosed("the other end left")
        else:
            left = left[got_bytes:]
    return bytes(words)


def authenticate(channel: TlsChannel) -> Steps[str]:
    """The TLS handshake alone; returns the name in the other side's certificate."""
    try:
        while not channel.try_handshake():
            yield selectors.EVENT_READ if channel.try_flush() else selectors.EVENT_WRITE
    except ssl.SSLError as error:
        raise HandshakeError(f"the other side could not be authenticated: {error}") from error
    return channel.peer_name()


async def converse(steps: Steps[T], sock: socket.socket) -> T:
    """Run `steps` over `sock` to their end, among all else that the loop does."""
    while True:
        try:
            event = next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        await _ready(sock, event)


async def _ready(sock: socket.socket, event: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (
        (loop.add_reader, loop.remove_reader)
        if event == selectors.EVENT_READ
        else (loop.add_writer, loop.remove_writer)
    )

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add(sock, wake)
    try:
        await ready
    finally:
        remove(sock)
