"""TCP hole punching: two nodes behind NATs dial each other at once, each from the port it listens on.

A NAT lets in replies to outgoing packets. When both nodes dial each other's observed address, each NAT takes the
incoming dial for a reply to the outgoing one. No common clock is needed: attempts repeat until two of them meet.

The connection then has either two dialers (simultaneous open) or a dialer and a listener (one was late). So a dialer
first sends `dialed` and receives `dialed` or `accepted`, which determines the TLS roles:

    dialed, dialed      the controlling node is the TLS client
    dialed, accepted    the dialer is the TLS client
"""

from __future__ import annotations

import selectors
import socket

from ravnest.errors import HandshakeError, LinkClosed, LinkError
from ravnest.transport.address import Address, show
from ravnest.transport.socket import Handshake

__all__ = ["CAN_PUNCH", "dialing_socket", "listen_reusable", "negotiate_as_dialer", "negotiate_as_listener"]

CAN_PUNCH = hasattr(socket, "SO_REUSEPORT")  # not on Windows, where a listener's port cannot be shared

_DIALED, _ACCEPTED = b"RVNP", b"RVNA"
_TLS_FIRST_BYTE = b"\x16"


def listen_reusable(address: Address, *, backlog: int = 128) -> socket.socket:
    """Listen at `address`, so that `dialing_socket` can use the same port; "::" accepts IPv4 as well."""
    try:
        # The port is shared for dialing only. A second listener would receive half of the peers: check for one first.
        with _create(address, backlog=0, shared=False) as probe:
            port = probe.getsockname()[1]
        return _create((address[0], port), backlog=backlog, shared=CAN_PUNCH)
    except OSError as error:
        raise LinkError(f"cannot listen at {show(address)}: {error}") from error


def _create(address: Address, *, backlog: int, shared: bool) -> socket.socket:
    dual_stack = address[0] == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=backlog, reuse_port=shared, dualstack_ipv6=dual_stack)


def dialing_socket(port: int, target: Address) -> socket.socket:
    """Create a socket to dial `target` from `port`, on which this node listens as well."""
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


def negotiate_as_dialer(sock: socket.socket, *, is_controlling: bool) -> Handshake[bool]:
    """Exchange roles over a dialed connection; returns whether this node is the TLS server."""
    sock.send(_DIALED)  # a new connection has space for four bytes
    answer = yield from _receive(sock)
    if answer == _DIALED:
        return not is_controlling
    if answer == _ACCEPTED:
        return False
    raise HandshakeError(f"unexpected response to a hole punching dial: {answer!r}")


def negotiate_as_listener(sock: socket.socket) -> Handshake[bool]:
    """Answer a punched connection; returns whether it is one. TLS bytes stay unread."""
    while (first := _try_peek(sock)) is None:
        yield selectors.EVENT_READ
    if first == _TLS_FIRST_BYTE:
        return False
    if (yield from _receive(sock)) != _DIALED:
        raise HandshakeError(f"unknown protocol: the connection begins with {first!r}")
    sock.send(_ACCEPTED)
    return True


def _try_peek(sock: socket.socket) -> bytes | None:
    try:
        return sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return None


def _receive(sock: socket.socket) -> Handshake[bytes]:
    data = b""
    while len(data) < len(_DIALED):
        try:
            part = sock.recv(len(_DIALED) - len(data))
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if not part:
            raise LinkClosed("peer closed the connection before the handshake")
        data += part
    return data
