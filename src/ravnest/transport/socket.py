"""Non-blocking sockets: byte channels, and handshakes that run in a thread or in an asyncio loop.

A handshake is a generator that yields the event it waits for (`selectors.EVENT_*`) and returns its result. The same
protocol code runs in a blocking call (`run_blocking`), among many others in an asyncio loop (`run_async`), and in tests
without either.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import selectors
import socket
from collections.abc import Generator, Sequence
from typing import TypeAlias, TypeVar

from ravnest.core.clock import Deadline
from ravnest.errors import HandshakeError, LinkTimeout

__all__ = ["Handshake", "SocketChannel", "run_async", "run_blocking", "wait_ready"]

T = TypeVar("T")
Handshake: TypeAlias = Generator[int, None, T]

_HAS_POLL = hasattr(select, "poll")  # not on Windows, where select() has no limit on socket numbers
_HAS_VECTORS = hasattr(socket.socket, "sendmsg") and hasattr(socket.socket, "recvmsg_into")
_MAX_POLL_MS = 2**31 - 1


def wait_ready(sock: socket.socket, event: int, timeout_s: float) -> bool:
    """Wait until `sock` is readable or writable (`selectors.EVENT_*`) or closed by the peer; false on timeout."""
    if _HAS_POLL:
        poller = select.poll()
        poller.register(sock, select.POLLIN if event == selectors.EVENT_READ else select.POLLOUT)
        return bool(poller.poll(min(math.ceil(timeout_s * 1000), _MAX_POLL_MS)))
    readers, writers = ([sock], []) if event == selectors.EVENT_READ else ([], [sock])
    return any(select.select(readers, writers, [sock], timeout_s))


def run_blocking(handshake: Handshake[T], sock: socket.socket, deadline: Deadline) -> T:
    """Run a handshake over `sock` to its end in this thread; close `sock` if it fails."""
    try:
        while True:
            event = next(handshake)
            if not wait_ready(sock, event, deadline.left_s()):
                raise LinkTimeout(f"handshake did not finish within {deadline.seconds:g} s")
    except StopIteration as done:
        result: T = done.value
        return result
    except OSError as error:
        sock.close()
        raise HandshakeError(f"connection lost during the handshake: {error}") from error
    except BaseException:
        sock.close()
        raise


async def run_async(handshake: Handshake[T], sock: socket.socket) -> T:
    """Run a handshake over `sock` to its end in the running asyncio loop."""
    while True:
        try:
            event = next(handshake)
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


class SocketChannel:
    """A `Channel` over a connected stream socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._low_watermark_bytes = 1

    def try_write(self, views: Sequence[memoryview]) -> int:
        try:
            return self._sock.sendmsg(views) if _HAS_VECTORS else self._sock.send(views[0])
        except BlockingIOError:
            return 0

    def try_flush(self) -> bool:
        return True

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        try:
            if _HAS_VECTORS and len(views) > 1:
                return self._sock.recvmsg_into(views)[0]
            return self._sock.recv_into(views[0])
        except BlockingIOError:
            return None

    def wait_writable(self, timeout_s: float) -> bool:
        return wait_ready(self._sock, selectors.EVENT_WRITE, timeout_s)

    def wait_readable(self, timeout_s: float) -> bool:
        return wait_ready(self._sock, selectors.EVENT_READ, timeout_s)

    def set_low_watermark(self, num_bytes: int) -> None:
        """Let reads become ready only after `num_bytes` have arrived or the stream has ended (SO_RCVLOWAT).

        Unread bytes take space from the TCP receive window, which costs up to two thirds of the throughput of a link
        with a long round trip. So the watermark is at most a quarter of the receive buffer, which grows with the link.
        """
        num_bytes = min(num_bytes, self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 4)
        if num_bytes != self._low_watermark_bytes:
            self._low_watermark_bytes = num_bytes
            with contextlib.suppress(OSError):  # Windows has the option and rejects it: only more wake-ups
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def detect_dead_peer(self, after_s: float) -> None:
        """Limit unacknowledged data to `after_s` (TCP_USER_TIMEOUT) and probe idle connections (keepalive)."""
        probes = {"TCP_KEEPIDLE": max(1, int(after_s / 3)), "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": max(1, int(after_s / 2))}
        with contextlib.suppress(OSError):  # not TCP: the other end is on this machine
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in {**probes, "TCP_USER_TIMEOUT": int(1000 * after_s)}.items():
                if (option := getattr(socket, name, None)) is not None:  # each system has some of them
                    self._sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):  # closed by the peer already, which has woken the waiting threads
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
