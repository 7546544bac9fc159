"""TLS links without an endpoint, for tests of the handshake and of the link itself."""

from __future__ import annotations

import socket

from ravnest.core.clock import Deadline
from ravnest.transport.address import Address
from ravnest.transport.identity import Identity
from ravnest.transport.link import LinkConfig
from ravnest.transport.socket import Handshake, run_blocking
from ravnest.transport.stream import StreamLink
from ravnest.transport.tls import Allowed, TlsChannel, connect_tcp, mutual_handshake, tls_context, tune


def allow_all(name: str) -> bool:
    return True


class TlsListener:
    """Listens on this host and accepts one link at a time."""

    def __init__(self, identity: Identity, config: LinkConfig, allowed: Allowed = allow_all) -> None:
        self._identity, self._config, self._allowed = identity, config, allowed
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._sock.getsockname()

    def accept(self, *, deadline_s: float) -> StreamLink:
        self._sock.settimeout(deadline_s)
        sock, _ = self._sock.accept()
        return secure(
            sock, self._identity, self._config, self._allowed, server_side=True, deadline=Deadline(deadline_s)
        )

    def __enter__(self) -> TlsListener:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()


def dial_tls(
    address: Address, identity: Identity, config: LinkConfig, allowed: Allowed = allow_all, *, deadline_s: float
) -> StreamLink:
    deadline = Deadline(deadline_s)
    sock = connect_tcp(address, deadline)
    return secure(sock, identity, config, allowed, server_side=False, deadline=deadline)


def secure(
    sock: socket.socket,
    identity: Identity,
    config: LinkConfig,
    allowed: Allowed,
    *,
    server_side: bool,
    deadline: Deadline,
) -> StreamLink:
    def handshake() -> Handshake[StreamLink]:
        tune(sock)
        channel = TlsChannel(sock, tls_context(identity, server_side=server_side), server_side=server_side)
        peer = yield from mutual_handshake(channel, allowed)
        return StreamLink(channel, config, peer=peer)

    return run_blocking(handshake(), sock, deadline)
