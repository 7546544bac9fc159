"""Connections through a relay: TLS between the two ends, inside TLS to the relay.

    this end  ==TLS==  relay  ==TLS==  other end
    this end  ----------TLS----------  other end      carried by the relay, which cannot decrypt it

The outer layer hides from the network which nodes communicate, and lets the relay share a port with HTTP. The relay
must present the expected name, so another member cannot impersonate it.
"""

from __future__ import annotations

import dataclasses
import socket
import ssl
from collections.abc import Sequence

from ravnest.core.config import config, require
from ravnest.core.ids import COORDINATOR, check_id
from ravnest.errors import HandshakeError
from ravnest.protocol.relay import (
    MESSAGE_PREFIX_BYTES,
    RELAY_PROTOCOL,
    ObserveAddress,
    ObservedAddress,
    RelayJoin,
    RelayJoined,
    RelayRejected,
    RelayRequest,
    RelayResponse,
    decode_length,
    decode_response,
    encode_message,
)
from ravnest.transport.address import Address, show
from ravnest.transport.identity import Identity
from ravnest.transport.introduction import is_controlling
from ravnest.transport.socket import Handshake, SocketChannel
from ravnest.transport.tls import (
    TlsChannel,
    authenticate,
    mutual_handshake,
    receive_bytes,
    send_bytes,
    tls_context,
    tune,
)

__all__ = ["Observation", "RelayInfo", "observe", "open_tunnel", "relay_context"]


@config
class RelayInfo:
    """A relay's address, the name in its certificate, and the token of the pair to join."""

    address: Address
    token: str
    name: str = COORDINATOR

    def __post_init__(self) -> None:
        require(0 < self.address[1] < 2**16, f"port must be between 1 and 65535, got {self.address[1]}")
        check_id(self.name)


@dataclasses.dataclass(frozen=True)
class Observation:
    """This node's address as observed by the relay, and its local address on that connection.

    The connection stays open until `close`, because a NAT drops its mapping soon after a connection ends.
    """

    observed: Address
    local: Address
    sock: socket.socket

    def close(self) -> None:
        self.sock.close()


def relay_context(identity: Identity) -> ssl.SSLContext:
    context = tls_context(identity, server_side=False)
    context.set_alpn_protocols([RELAY_PROTOCOL])
    return context


def open_tunnel(
    sock: socket.socket, relay: RelayInfo, me: str, peer: str, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> Handshake[TlsChannel]:
    """Join `peer` over a connection to the relay and authenticate both ends.

    `contexts` are those of the outer and the inner TLS layer; the controlling node is the client of the inner one.
    """
    outer, inner = contexts
    carrier, response = yield from _request(sock, relay, outer, RelayJoin(relay.token, me))
    if not isinstance(response, RelayJoined):
        raise HandshakeError(f"unexpected response of relay {relay.name} to a join request: {response}")
    channel = _TunneledTls(carrier, sock, inner, server_side=not is_controlling(me, peer))
    yield from mutual_handshake(channel, lambda name: name == peer)
    return channel


def observe(sock: socket.socket, relay: RelayInfo, context: ssl.SSLContext) -> Handshake[Observation]:
    """Request the address of this end of the connection, which stays open, from the relay."""
    _, response = yield from _request(sock, relay, context, ObserveAddress())
    if not isinstance(response, ObservedAddress):
        raise HandshakeError(f"unexpected response of relay {relay.name} to an address request: {response}")
    host, port = sock.getsockname()[:2]
    return Observation((response.host, response.port), (host, port), sock)


def _request(
    sock: socket.socket, relay: RelayInfo, context: ssl.SSLContext, request: RelayRequest
) -> Handshake[tuple[TlsChannel, RelayResponse]]:
    tune(sock)
    carrier = TlsChannel(sock, context, server_side=False)
    name = yield from authenticate(carrier)
    if name != relay.name:
        raise HandshakeError(f"expected relay {relay.name} at {show(relay.address)}, found {name}")
    yield from send_bytes(carrier, encode_message(request))
    prefix = yield from receive_bytes(carrier, MESSAGE_PREFIX_BYTES)
    response = decode_response((yield from receive_bytes(carrier, decode_length(prefix))))
    if isinstance(response, RelayRejected):
        raise HandshakeError(f"rejected by relay {relay.name}: {response.reason}")
    return carrier, response


class _TunneledSocket(SocketChannel):
    """Reads and writes another channel over the same socket instead of the socket itself."""

    _carrier: TlsChannel

    def try_write(self, views: Sequence[memoryview]) -> int:
        return self._carrier.try_write(views)

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        return self._carrier.try_read(views)


class _TunneledTls(TlsChannel, _TunneledSocket):
    """TLS inside TLS: the socket calls of `TlsChannel` go to `_TunneledSocket`, the next class of the MRO."""

    def __init__(self, carrier: TlsChannel, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._carrier = carrier
        super().__init__(sock, context, server_side=server_side)

    def try_flush(self) -> bool:
        return super().try_flush() and self._carrier.try_flush()

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait for any bytes: the relay announces its closing in a few, below every watermark."""
        return SocketChannel.wait_readable(self, timeout_s)
