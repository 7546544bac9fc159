"""Negotiation between two nodes: what a connection is for, and which of several connections both use.

Both nodes may dial, to several addresses, all at once. On every connection the TLS client introduces itself first
(generation and purpose of the link), then the server. As in ICE, the node with the smaller name is *controlling*: it
nominates one connection and waits for the confirmation; only if that connection fails does it nominate another. The
controlled node uses the nominated connection, confirms, and closes the rest. So both never hold open connections that
differ, whatever the order of events.

    client  introduction ->            controlling  nominated ->
            <- introduction  server                 <- confirmed  controlled
"""

from __future__ import annotations

from ravnest.errors import HandshakeError
from ravnest.transport.introduction import (
    INTRODUCTION_BYTES,
    Introduction,
    decode_introduction,
    encode_introduction,
)
from ravnest.transport.socket import Handshake
from ravnest.transport.tls import TlsChannel, receive_bytes, send_bytes

__all__ = ["accept_nomination", "nominate", "receive_introduction", "send_introduction"]

_NOMINATED, _CONFIRMED = b"\x02", b"\x03"


def send_introduction(channel: TlsChannel, mine: Introduction) -> Handshake[None]:
    yield from send_bytes(channel, encode_introduction(mine))


def receive_introduction(channel: TlsChannel) -> Handshake[Introduction]:
    return decode_introduction((yield from receive_bytes(channel, INTRODUCTION_BYTES)))


def nominate(channel: TlsChannel) -> Handshake[None]:
    yield from send_bytes(channel, _NOMINATED)
    if (yield from receive_bytes(channel, 1)) != _CONFIRMED:
        raise HandshakeError("peer did not confirm the nomination of this connection")


def accept_nomination(channel: TlsChannel) -> Handshake[None]:
    if (yield from receive_bytes(channel, 1)) != _NOMINATED:
        raise HandshakeError("peer neither nominated nor closed this connection")
    yield from send_bytes(channel, _CONFIRMED)
