"""Links between hosts: mutual TLS 1.3 over TCP, for members of one run only.

Both sides present a certificate of the run's authority, and each asks `allowed` whether the node it
names may be at the other end. Addresses prove nothing: a node is its certificate, wherever it is.
"""

from __future__ import annotations

import socket
import ssl

from ravnest.core.errors import HandshakeError, IdentityError, LinkClosed, LinkError, LinkTimeout
from ravnest.net.addresses import Address
from ravnest.net.deadline import Deadline
from ravnest.net.handshake import Allowed, TlsChannel, shake_hands
from ravnest.net.identity import Identity
from ravnest.net.link import LinkConfig
from ravnest.net.listen import Greeting, ListenConfig, Listener, finish
from ravnest.net.stream import StreamLink

__all__ = ["connect_tcp", "dial_tls", "listen_tls", "secure", "tls_context", "tune"]

# A host that lost its power says nothing: an idle link notices after about half a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def tls_context(identity: Identity, *, server_side: bool) -> ssl.SSLContext:
    """TLS 1.3 and nothing older, a certificate demanded from the other side, no resumption."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a node's name is checked by `allowed`; where it is does not matter
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(identity.certificate_path, identity.key_path)
        context.load_verify_locations(identity.authority_path)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(f"the identity in {identity.directory} cannot be used: {error}") from error
    if server_side:
        context.num_tickets = 0
    return context


def dial_tls(
    address: Address, identity: Identity, config: LinkConfig, *, allowed: Allowed, deadline_s: float
) -> StreamLink:
    """Connect to `address` and prove to each other who we are, all within `deadline_s`."""
    deadline = Deadline(deadline_s)
    context = tls_context(identity, server_side=False)
    sock = connect_tcp(address, deadline)
    return _finish(sock, _greet(sock, context, config, allowed, server_side=False), deadline)


def connect_tcp(address: Address, deadline: Deadline) -> socket.socket:
    """A connection to `address`, over which nothing has been said yet."""
    host, port = address
    try:
        return socket.create_connection(address, timeout=max(deadline.left_s(), 0.001))  # 0 would not wait at all
    except TimeoutError as error:
        raise LinkTimeout(f"{host}:{port} did not answer within {deadline.seconds:g} s") from error
    except OSError as error:
        raise LinkClosed(f"cannot reach {host}:{port}: {error}") from error


def secure(
    sock: socket.socket,
    identity: Identity,
    config: LinkConfig,
    *,
    allowed: Allowed,
    server_side: bool,
    deadline_s: float,
) -> StreamLink:
    """A link over a TCP connection that already exists, however it was made; the link owns it."""
    context = tls_context(identity, server_side=server_side)
    greeting = _greet(sock, context, config, allowed, server_side=server_side)
    return _finish(sock, greeting, Deadline(deadline_s))


def listen_tls(
    address: Address,
    identity: Identity,
    config: LinkConfig,
    *,
    allowed: Allowed,
    listening: ListenConfig | None = None,
) -> Listener:
    """Listen at `address` (port 0: any free one) for members of the run."""
    context = tls_context(identity, server_side=True)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        raise LinkError(f"cannot listen at {address[0]}:{address[1]}: {error}") from error
    return Listener(
        sock,
        lambda guest: _greet(guest, context, config, allowed, server_side=True),
        listening or ListenConfig(),
    )


def _greet(
    sock: socket.socket, context: ssl.SSLContext, config: LinkConfig, allowed: Allowed, *, server_side: bool
) -> Greeting:
    tune(sock)
    channel = TlsChannel(sock, context, server_side=server_side)
    peer = yield from shake_hands(channel, allowed)
    return StreamLink(channel, config, peer=peer)


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice a peer that has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # each system has some of them
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _finish(sock: socket.socket, greeting: Greeting, deadline: Deadline) -> StreamLink:
    try:
        return finish(greeting, sock, deadline)
    except OSError as error:
        raise HandshakeError(f"the connection broke during the handshake: {error}") from error
