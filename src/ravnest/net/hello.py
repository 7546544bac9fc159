"""What is said at a relay before it carries bytes: one short note each way, its length checked first.

    note    magic 4s | num_bytes u16 | MessagePack, at most 1024 bytes of it

A guest says `Join` and hears `Joined` when the other end has come too; from then on every byte is between
the two ends. Or it says `Observe` and hears from which address the relay sees it. Nothing here does I/O.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from ravnest.core.errors import FrameError

__all__ = [
    "FEED_PROTOCOL",
    "NOTE_PREFIX_BYTES",
    "RELAY_PROTOCOL",
    "Answer",
    "Hello",
    "Join",
    "Joined",
    "Observe",
    "Refused",
    "Seen",
    "decode_answer",
    "decode_length",
    "encode_note",
    "take_hello",
]

RELAY_PROTOCOL = "ravnest-relay"
"""What a guest of the relay asks for in the TLS handshake (ALPN); others on that port speak HTTP."""
FEED_PROTOCOL = "ravnest-feed"
"""What the first stage of a cluster asks for: from then on, frames to and from the coordinator."""

_MAGIC = b"RVNR"
_MAX_NOTE_BYTES = 1024
_PREFIX = struct.Struct("!4sH")
NOTE_PREFIX_BYTES = _PREFIX.size


class Join(msgspec.Struct, tag="join", frozen=True):
    """Join me, who is `name`, with the other end that has this token."""

    token: str
    name: str


class Observe(msgspec.Struct, tag="observe", frozen=True):
    """Tell me where you see me."""


class Joined(msgspec.Struct, tag="joined", frozen=True):
    """The other end is there: what you say from now on, it hears."""

    peer: str


class Seen(msgspec.Struct, tag="seen", frozen=True):
    """I see you at this address."""

    host: str
    port: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """No, because ..."""

    reason: str


Hello: TypeAlias = Join | Observe
Answer: TypeAlias = Joined | Seen | Refused

_encoder = msgspec.msgpack.Encoder()
_hello_decoder: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Join | Observe)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Joined | Seen | Refused)


def encode_note(note: Hello | Answer) -> bytes:
    body = _encoder.encode(note)
    _check_length(len(body))
    return _PREFIX.pack(_MAGIC, len(body)) + body


def decode_length(prefix: bytes | bytearray) -> int:
    """How many bytes follow a note's first `NOTE_PREFIX_BYTES`."""
    magic, num_bytes = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise FrameError(f"the bytes {magic!r} do not begin a note: that is no guest or relay of ours")
    _check_length(num_bytes)
    return int(num_bytes)


def decode_answer(body: bytes) -> Answer:
    try:
        return _answer_decoder.decode(body)
    except ValueError as error:
        raise FrameError(f"the relay's answer cannot be read: {error}") from error


def take_hello(arrived: bytearray) -> Hello | None:
    """The hello that `arrived` begins with, taken out of it; None while more bytes of it are to come."""
    if not _MAGIC.startswith(arrived[: len(_MAGIC)]):
        raise FrameError(f"the bytes {bytes(arrived[:4])!r} do not begin a hello")
    if len(arrived) < NOTE_PREFIX_BYTES:
        return None
    end = NOTE_PREFIX_BYTES + decode_length(arrived[:NOTE_PREFIX_BYTES])
    if len(arrived) < end:
        return None
    body = bytes(arrived[NOTE_PREFIX_BYTES:end])
    del arrived[:end]
    try:
        return _hello_decoder.decode(body)
    except ValueError as error:
        raise FrameError(f"the hello cannot be read: {error}") from error


def _check_length(num_bytes: int) -> None:
    if num_bytes > _MAX_NOTE_BYTES:
        raise FrameError(f"a note of {num_bytes} bytes is over the limit of {_MAX_NOTE_BYTES}")
