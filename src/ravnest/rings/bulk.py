"""Unix sockets for megabytes: the kernel waits for whole pieces, and Python is woken once for each.

A socket that never blocks gives what is there, some 30 kB at a time while the peer is writing, and every such bit costs
a poll and the interpreter's lock. Here a read or write waits in the kernel until all of it is done, at most `_WAIT_S`;
then the link looks at its deadline as ever. Averaging 64 MB between two processes takes a third of the time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

from ravnest.net.link import LinkConfig
from ravnest.net.sockets import SocketChannel
from ravnest.net.stream import StreamLink

__all__ = ["bulk_link", "bulk_pair"]

_WAIT_S = 0.25
_BUFFER_BYTES = 2**22


class _BulkChannel(SocketChannel):
    """A `Channel` over a unix socket, which it owns; trying takes up to `_WAIT_S`."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setblocking(True)
        seconds, rest = divmod(_WAIT_S, 1)
        timeout = struct.pack("ll", int(seconds), int(rest * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, timeout)

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        try:
            return self._sock.recv_into(views[0], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            return None


def bulk_link(sock: socket.socket, config: LinkConfig, *, peer: str) -> StreamLink:
    """A link over a connected unix socket, which it then owns."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):  # over the system's limit: slower, not wrong
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return StreamLink(_BulkChannel(sock), config, peer=peer)


def bulk_pair(config: LinkConfig, *, names: tuple[str, str] = ("left", "right")) -> tuple[StreamLink, StreamLink]:
    """Two linked ends, for a process and a child that it starts, or for two threads."""
    left, right = socket.socketpair()
    return bulk_link(left, config, peer=names[1]), bulk_link(right, config, peer=names[0])
