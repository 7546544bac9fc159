"""How two nodes with several connections between them come to use the same one.

Both may dial, to several addresses, all at once. On every connection the TLS client introduces itself
first (generation and purpose of the link), then the server. Of two nodes the one with the smaller name
*leads*: it says `chosen` on one connection and waits for `confirmed`; only when that connection fails does
it try another. The other node takes the connection on which it hears `chosen`, confirms, and closes the
rest. So never do both hold open connections that differ, whatever the order in which things arrive.

    client  introduction ->            leader  chosen ->
            <- introduction  server            <- confirmed  follower
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from ravnest.core.config import require
from ravnest.core.errors import HandshakeError
from ravnest.net.converse import Steps, hear, say
from ravnest.net.frame import MAX_GENERATION
from ravnest.net.handshake import TlsChannel

__all__ = [
    "INTRODUCTION_BYTES", "Introduction", "be_chosen", "check_same", "choose", "decode_introduction",
    "encode_introduction", "hear_introduction", "introduce", "leads",
]  # fmt: skip

_MAGIC = b"RVNI"
_FORMAT = 1
_INTRODUCTION = struct.Struct("!4sBI16s")
INTRODUCTION_BYTES = _INTRODUCTION.size
_CHOSEN, _CONFIRMED = b"\x02", b"\x03"


@dataclass(frozen=True)
class Introduction:
    """Which link a connection is for: of which plan, and for what between these two nodes."""

    generation: int
    purpose: bytes

    @classmethod
    def of(cls, generation: int, purpose: str) -> Introduction:
        require(0 <= generation <= MAX_GENERATION, f"generation {generation} does not fit in 32 bits")
        return cls(generation, hashlib.sha256(purpose.encode()).digest()[:16])


def leads(me: str, peer: str) -> bool:
    """Whether `me` chooses the connection."""
    require(me != peer, f"{me} has no link to itself")
    return me < peer


def introduce(channel: TlsChannel, mine: Introduction) -> Steps[None]:
    yield from say(channel, encode_introduction(mine))


def hear_introduction(channel: TlsChannel) -> Steps[Introduction]:
    return decode_introduction((yield from hear(channel, INTRODUCTION_BYTES)))


def encode_introduction(mine: Introduction) -> bytes:
    return _INTRODUCTION.pack(_MAGIC, _FORMAT, mine.generation, mine.purpose)


def decode_introduction(words: bytes) -> Introduction:
    """Of exactly `INTRODUCTION_BYTES`."""
    magic, format_, generation, purpose = _INTRODUCTION.unpack(words)
    if magic != _MAGIC or format_ != _FORMAT:
        raise HandshakeError("the peer introduces itself in another way: run the same release on both ends")
    return Introduction(generation, purpose)


def check_same(mine: Introduction, theirs: Introduction, peer: str) -> None:
    if theirs.generation != mine.generation:
        raise HandshakeError(f"{peer} is of generation {theirs.generation}, this node of generation {mine.generation}")
    if theirs.purpose != mine.purpose:
        raise HandshakeError(f"{peer} wants this connection for another purpose")


def choose(channel: TlsChannel) -> Steps[None]:
    yield from say(channel, _CHOSEN)
    if (yield from hear(channel, 1)) != _CONFIRMED:
        raise HandshakeError("the peer did not confirm the choice of this connection")


def be_chosen(channel: TlsChannel) -> Steps[None]:
    if (yield from hear(channel, 1)) != _CHOSEN:
        raise HandshakeError("the peer neither chose this connection nor closed it")
    yield from say(channel, _CONFIRMED)
