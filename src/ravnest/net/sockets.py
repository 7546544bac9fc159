"""Bytes over a socket that never blocks: system calls move what they can, one `poll` does the waiting."""

from __future__ import annotations

import contextlib
import math
import select
import selectors
import socket
from collections.abc import Sequence

__all__ = ["SocketChannel", "wait_ready"]

_HAS_POLL = hasattr(select, "poll")  # not on Windows, whose select() has no limit on socket numbers
_HAS_VECTORS = hasattr(socket.socket, "sendmsg") and hasattr(socket.socket, "recvmsg_into")
_MAX_POLL_MS = 2**31 - 1


def wait_ready(sock: socket.socket, event: int, timeout_s: float) -> bool:
    """Wait until `sock` can be read or written (`selectors.EVENT_*`), or has ended."""
    if _HAS_POLL:
        poller = select.poll()
        poller.register(sock, select.POLLIN if event == selectors.EVENT_READ else select.POLLOUT)
        return bool(poller.poll(min(math.ceil(timeout_s * 1000), _MAX_POLL_MS)))
    readers, writers = ([sock], []) if event == selectors.EVENT_READ else ([], [sock])
    return any(select.select(readers, writers, [sock], timeout_s))


class SocketChannel:
    """A `Channel` over a connected stream socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._wakes_bytes = 1  # so many must have arrived before a wait for them ends

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

    def wake_after(self, num_bytes: int) -> None:
        """Let waits to read end only when so much has arrived, where the system can do that; or at the end.

        What waits to be read takes room from what the peer may send ahead: over a long line, two thirds of its speed.
        So it is never more than a quarter of that room, which grows with the line.
        """
        num_bytes = min(num_bytes, self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 4)
        if num_bytes != self._wakes_bytes:
            self._wakes_bytes = num_bytes
            with contextlib.suppress(OSError):  # Windows knows the option and refuses it: woken more often, not wrong
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def notice_death(self, after_s: float) -> None:
        """What was sent must be acknowledged in that time; on a silent connection the system asks now and then."""
        asks = {"TCP_KEEPIDLE": max(1, int(after_s / 3)), "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": max(1, int(after_s / 2))}
        with contextlib.suppress(OSError):  # not a TCP connection: its other end is on this machine
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in {**asks, "TCP_USER_TIMEOUT": int(1000 * after_s)}.items():
                if (option := getattr(socket, name, None)) is not None:  # each system has some of them
                    self._sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):  # the peer was first; those who wait have been woken by that
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
