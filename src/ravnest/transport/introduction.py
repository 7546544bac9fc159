"""Introductions: the purpose of a connection between two nodes, and the end that controls it.

The first bytes on every connection between nodes are an introduction: generation and purpose of the link. As in ICE,
the node with the smaller name is *controlling*.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from ravnest.core.config import require
from ravnest.errors import HandshakeError
from ravnest.transport.frame import MAX_GENERATION

__all__ = [
    "INTRODUCTION_BYTES",
    "Introduction",
    "check_introduction",
    "decode_introduction",
    "encode_introduction",
    "is_controlling",
]

_MAGIC = b"RVNI"
_FORMAT = 2
_INTRODUCTION = struct.Struct("!4sBI16s")
INTRODUCTION_BYTES = _INTRODUCTION.size


@dataclass(frozen=True)
class Introduction:
    """Link that a connection is for: the plan's generation, and a hash of the purpose."""

    generation: int
    purpose: bytes

    @classmethod
    def of(cls, generation: int, purpose: str) -> Introduction:
        require(
            0 <= generation <= MAX_GENERATION, f"generation must be between 0 and {MAX_GENERATION}, got {generation}"
        )
        return cls(generation, hashlib.sha256(purpose.encode()).digest()[:16])


def is_controlling(me: str, peer: str) -> bool:
    """Whether `me` nominates the connection and is the TLS client where both or neither dialed."""
    require(me != peer, f"{me} cannot have a link to itself")
    return me < peer


def encode_introduction(introduction: Introduction) -> bytes:
    return _INTRODUCTION.pack(_MAGIC, _FORMAT, introduction.generation, introduction.purpose)


def decode_introduction(data: bytes) -> Introduction:
    """Decode exactly `INTRODUCTION_BYTES`."""
    magic, format_, generation, purpose = _INTRODUCTION.unpack(data)
    if magic != _MAGIC or format_ != _FORMAT:
        raise HandshakeError("unknown format of the peer's introduction: run the same release on both ends")
    return Introduction(generation, purpose)


def check_introduction(mine: Introduction, theirs: Introduction, peer: str) -> None:
    if theirs.generation != mine.generation:
        raise HandshakeError(f"{peer} is of generation {theirs.generation}, this node of generation {mine.generation}")
    if theirs.purpose != mine.purpose:
        raise HandshakeError(f"{peer} uses this connection for another purpose")
