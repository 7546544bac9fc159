"""Messages between a relay and its clients, before the relay carries bytes.

    message    magic 4s | num_bytes u16 | MessagePack, at most 1024 bytes

A client sends `RelayJoin` and receives `RelayJoined` when the other end has joined too; from then on every byte goes
between the two ends. Or it sends `ObserveAddress` and receives its address as the relay observes it. No I/O here.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from ravnest.errors import FrameError

__all__ = [
    "FEED_PROTOCOL",
    "MESSAGE_PREFIX_BYTES",
    "RELAY_PROTOCOL",
    "ObserveAddress",
    "ObservedAddress",
    "RelayJoin",
    "RelayJoined",
    "RelayRejected",
    "RelayRequest",
    "RelayResponse",
    "decode_length",
    "decode_response",
    "encode_message",
    "take_request",
]

RELAY_PROTOCOL = "ravnest-relay"
"""ALPN protocol of relay clients; other clients of that port use HTTP."""
FEED_PROTOCOL = "ravnest-feed"
"""ALPN protocol of the first stage of a cluster, followed by frames to and from the coordinator."""

_MAGIC = b"RVNR"
_MAX_MESSAGE_BYTES = 1024
_PREFIX = struct.Struct("!4sH")
MESSAGE_PREFIX_BYTES = _PREFIX.size


class RelayJoin(msgspec.Struct, tag="join", frozen=True):
    """Connect the sender, node `name`, with the other end that has this token."""

    token: str
    name: str


class ObserveAddress(msgspec.Struct, tag="observe", frozen=True):
    """Report the address of the sender, as the relay observes it."""


class RelayJoined(msgspec.Struct, tag="joined", frozen=True):
    """The other end has joined and receives all bytes that follow."""

    peer: str


class ObservedAddress(msgspec.Struct, tag="observed", frozen=True):
    """The client's address, as the relay observes it."""

    host: str
    port: int


class RelayRejected(msgspec.Struct, tag="rejected", frozen=True):
    """The request was rejected; the relay closes the connection."""

    reason: str


RelayRequest: TypeAlias = RelayJoin | ObserveAddress
RelayResponse: TypeAlias = RelayJoined | ObservedAddress | RelayRejected

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[RelayRequest] = msgspec.msgpack.Decoder(RelayJoin | ObserveAddress)
_response_decoder: msgspec.msgpack.Decoder[RelayResponse] = msgspec.msgpack.Decoder(
    RelayJoined | ObservedAddress | RelayRejected
)


def encode_message(message: RelayRequest | RelayResponse) -> bytes:
    body = _encoder.encode(message)
    _check_length(len(body))
    return _PREFIX.pack(_MAGIC, len(body)) + body


def decode_length(prefix: bytes | bytearray) -> int:
    """Number of bytes that follow the first `MESSAGE_PREFIX_BYTES` of a message."""
    magic, num_bytes = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise FrameError(f"the bytes {magic!r} do not begin a relay message")
    _check_length(num_bytes)
    return int(num_bytes)


def decode_response(body: bytes) -> RelayResponse:
    try:
        return _response_decoder.decode(body)
    except ValueError as error:
        raise FrameError(f"malformed relay response: {error}") from error


def take_request(received: bytearray) -> RelayRequest | None:
    """Remove and return the request at the start of `received`; None if it is incomplete."""
    if not _MAGIC.startswith(received[: len(_MAGIC)]):
        raise FrameError(f"the bytes {bytes(received[:4])!r} do not begin a relay message")
    if len(received) < MESSAGE_PREFIX_BYTES:
        return None
    end = MESSAGE_PREFIX_BYTES + decode_length(received[:MESSAGE_PREFIX_BYTES])
    if len(received) < end:
        return None
    body = bytes(received[MESSAGE_PREFIX_BYTES:end])
    del received[:end]
    try:
        return _request_decoder.decode(body)
    except ValueError as error:
        raise FrameError(f"malformed relay request: {error}") from error


def _check_length(num_bytes: int) -> None:
    if num_bytes > _MAX_MESSAGE_BYTES:
        raise FrameError(f"relay message of {num_bytes} bytes is over the limit of {_MAX_MESSAGE_BYTES}")
