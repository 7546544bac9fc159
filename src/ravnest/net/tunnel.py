"""A link through a relay: TLS between the two ends, inside TLS to the relay.

    this end  ==TLS==  relay  ==TLS==  other end
    this end  ----------TLS----------  other end      the relay carries this one and cannot read it

The outer layer hides who talks to whom from the line and lets relay and web pages share a port. The relay
must show the name that this end was told, so another member cannot stand in for it.
"""

from __future__ import annotations

import dataclasses
import socket
import ssl
from collections.abc import Sequence

from ravnest.core.config import config, require
from ravnest.core.errors import HandshakeError
from ravnest.core.ids import check_id
from ravnest.net.addresses import Address, show
from ravnest.net.converse import Steps, authenticate, hear, say
from ravnest.net.deadline import Deadline
from ravnest.net.handshake import TlsChannel, shake_hands
from ravnest.net.hello import (
    NOTE_PREFIX_BYTES,
    RELAY_PROTOCOL,
    Answer,
    Hello,
    Join,
    Joined,
    Observe,
    Refused,
    Seen,
    decode_answer,
    decode_length,
    encode_note,
)
from ravnest.net.identity import Identity
from ravnest.net.link import LinkConfig
from ravnest.net.listen import Greeting, finish
from ravnest.net.sockets import SocketChannel
from ravnest.net.stream import StreamLink
from ravnest.net.tls import connect_tcp, tls_context, tune

__all__ = ["Observation", "RelayInfo", "dial_relay", "observe", "relay_context", "tunnel"]


@config
class RelayInfo:
    """A relay: where it is, what its certificate names it, and the pair's token there."""

    address: Address
    token: str
    name: str = "coordinator"

    def __post_init__(self) -> None:
        require(0 < self.address[1] < 2**16, f"{self.address[1]} is not a port: it is 1 to 65535")
        check_id(self.name)


@dataclasses.dataclass(frozen=True)
class Observation:
    """Where the relay sees this node, and the address this node has itself on the way there.

    A router forgets what it has translated soon after the connection ends; so it stays open until `close`.
    """

    seen: Address
    local: Address
    sock: socket.socket

    def close(self) -> None:
        self.sock.close()


def relay_context(identity: Identity) -> ssl.SSLContext:
    context = tls_context(identity, server_side=False)
    context.set_alpn_protocols([RELAY_PROTOCOL])
    return context


def dial_relay(relay: RelayInfo, identity: Identity, config: LinkConfig, *, peer: str, deadline_s: float) -> StreamLink:
    """A link to `peer`, who dials the same relay with the same token, all within `deadline_s`."""
    deadline = Deadline(deadline_s)
    outer = relay_context(identity)
    inner = tls_context(identity, server_side=not _dials(identity.name, peer))
    sock = connect_tcp(relay.address, deadline)

    def greet() -> Greeting:
        channel = yield from tunnel(sock, relay, identity.name, peer, (outer, inner))
        return StreamLink(channel, config, peer=peer)

    try:
        return finish(greet(), sock, deadline)
    except OSError as error:
        raise HandshakeError(f"the connection to the relay broke during the handshake: {error}") from error


def tunnel(
    sock: socket.socket, relay: RelayInfo, me: str, peer: str, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> Steps[TlsChannel]:
    """Be joined with `peer` over a connection to the relay, and prove to each other who we are.

    `contexts` are those of the two layers, outer and inner; of the inner one the smaller name is the client.
    """
    outer, inner = contexts
    carrier, answer = yield from _ask(sock, relay, outer, Join(relay.token, me))
    if not isinstance(answer, Joined):
        raise HandshakeError(f"the relay {relay.name} answered {answer} to a guest who wanted to be joined")
    channel = _CarriedTls(carrier, sock, inner, server_side=not _dials(me, peer))
    yield from shake_hands(channel, lambda name: name == peer)
    return channel


def observe(sock: socket.socket, relay: RelayInfo, context: ssl.SSLContext) -> Steps[Observation]:
    """Ask over a connection to the relay from where it comes; the connection goes on."""
    _, answer = yield from _ask(sock, relay, context, Observe())
    if not isinstance(answer, Seen):
        raise HandshakeError(f"the relay {relay.name} answered {answer} to the question from where it sees us")
    host, port = sock.getsockname()[:2]
    return Observation((answer.host, answer.port), (host, port), sock)


def _ask(
    sock: socket.socket, relay: RelayInfo, context: ssl.SSLContext, hello: Hello
) -> Steps[tuple[TlsChannel, Answer]]:
    tune(sock)
    carrier = TlsChannel(sock, context, server_side=False)
    name = yield from authenticate(carrier)
    if name != relay.name:
        raise HandshakeError(f"at {show(relay.address)} is {name}, not the relay {relay.name}")
    yield from say(carrier, encode_note(hello))
    prefix = yield from hear(carrier, NOTE_PREFIX_BYTES)
    answer = decode_answer((yield from hear(carrier, decode_length(prefix))))
    if isinstance(answer, Refused):
        raise HandshakeError(f"the relay {relay.name} refused: {answer.reason}")
    return carrier, answer


def _dials(me: str, peer: str) -> bool:
    return me < peer


class _Carried(SocketChannel):
    """Where bytes go down the socket, these go down another channel over the same socket."""

    _carrier: TlsChannel

    def try_write(self, views: Sequence[memoryview]) -> int:
        return self._carrier.try_write(views)

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        return self._carrier.try_read(views)


class _CarriedTls(TlsChannel, _Carried):
    """TLS in TLS: what `TlsChannel` takes for the socket is `_Carried`, which comes next among the bases."""

    def __init__(self, carrier: TlsChannel, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._carrier = carrier
        super().__init__(sock, context, server_side=server_side)

    def try_flush(self) -> bool:
        return super().try_flush() and self._carrier.try_flush()

    def wait_readable(self, timeout_s: float) -> bool:
        """The relay says goodbye in a few bytes and then waits: any must wake this end."""
        return SocketChannel.wait_readable(self, timeout_s)
