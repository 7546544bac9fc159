"""Two nodes behind routers dial each other at once, each from the port it listens on (TCP hole punching).

A router lets in what answers something that went out. When both dial the address at which the world sees
the other, each dial is what the other router takes the other's dial for an answer to. No common clock is
needed: attempts repeat until one meets its counterpart.

Such a connection has either two diallers (the dials met on the way) or one and a listener (one was late).
So a dialler first says `dialled`; it hears `dialled` or `accepted`, and knows who it talks to:

    dialled, dialled    the smaller name is the TLS client
    dialled, accepted   the dialler is
"""

from __future__ import annotations

import selectors
import socket

from ravnest.core.errors import HandshakeError, LinkClosed, LinkError
from ravnest.net.addresses import Address, show
from ravnest.net.converse import Steps

__all__ = ["CAN_PUNCH", "accept_words", "dial_words", "listen_reusable", "socket_at"]

CAN_PUNCH = hasattr(socket, "SO_REUSEPORT")  # not on Windows: there nobody may share a listener's port

_DIALLED, _ACCEPTED = b"RVNP", b"RVNA"
_TLS_FIRST_BYTE = b"\x16"


def listen_reusable(address: Address, *, backlog: int = 128) -> socket.socket:
    """Listen at `address`, so that `socket_at` can dial from the same port; "::" takes IPv4 as well."""
    try:
        # Sharing is for dialling only. A second listener would get half of our peers, so look for one first.
        with _create(address, backlog=0, shared=False) as alone:
            port = alone.getsockname()[1]
        return _create((address[0], port), backlog=backlog, shared=CAN_PUNCH)
    except OSError as error:
        raise LinkError(f"cannot listen at {show(address)}: {error}") from error


def _create(address: Address, *, backlog: int, shared: bool) -> socket.socket:
    both = address[0] == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=backlog, reuse_port=shared, dualstack_ipv6=both)


def socket_at(port: int, target: Address) -> socket.socket:
    """A socket to dial `target` from `port`, on which this node listens as well."""
    is_ipv6 = ":" in target[0]
    sock = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if CAN_PUNCH:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if is_ipv6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(("::" if is_ipv6 else "0.0.0.0", port))
    except BaseException:
        sock.close()
        raise
    return sock


def dial_words(sock: socket.socket, *, is_smaller: bool) -> Steps[bool]:
    """What a dialler says first; returns whether it is the TLS server."""
    sock.send(_DIALLED)  # a new connection has room for four bytes
    words = yield from _hear(sock)
    if words == _DIALLED:
        return not is_smaller
    if words == _ACCEPTED:
        return False
    raise HandshakeError(f"the bytes {words!r} are not how a node answers")


def accept_words(sock: socket.socket) -> Steps[bool]:
    """What a listener hears first; returns whether the connection was punched. TLS is left to be read."""
    while (first := _try_peek(sock)) is None:
        yield selectors.EVENT_READ
    if first == _TLS_FIRST_BYTE:
        return False
    if (yield from _hear(sock)) != _DIALLED:
        raise HandshakeError(f"a connection that begins with {first!r} is not one of a node")
    sock.send(_ACCEPTED)
    return True


def _try_peek(sock: socket.socket) -> bytes | None:
    try:
        return sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return None


def _hear(sock: socket.socket) -> Steps[bytes]:
    words = b""
    while len(words) < len(_DIALLED):
        try:
            part = sock.recv(len(_DIALLED) - len(words))
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if not part:
            raise LinkClosed("the other end left before it introduced itself")
        words += part
    return words
