"""Links between processes of one host, over connected socket pairs, without encryption."""

from __future__ import annotations

import contextlib
import socket

from ravnest.transport.link import LinkConfig
from ravnest.transport.socket import SocketChannel
from ravnest.transport.stream import StreamLink

__all__ = ["unix_link", "unix_pair"]

_BUFFER_BYTES = 2**20  # the least CPU per byte; the usual default of 200 kB costs half as much again


def unix_pair(config: LinkConfig, *, names: tuple[str, str] = ("left", "right")) -> tuple[StreamLink, StreamLink]:
    """Create both ends of a link, for a process and its child or for two threads."""
    left, right = socket.socketpair()
    return unix_link(left, config, peer=names[1]), unix_link(right, config, peer=names[0])


def unix_link(sock: socket.socket, config: LinkConfig, *, peer: str) -> StreamLink:
    """Create a link over a connected socket, which the link then owns."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):  # over the system's limit: slower, not wrong
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return StreamLink(SocketChannel(sock), config, peer=peer)
