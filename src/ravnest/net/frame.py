"""The wire form of one message, checked before any memory is taken for it.

    prefix    magic 4s | format u8 | flags u8 | num_buffers u16 | generation u32 | header_bytes u32
    lengths   num_buffers x u64
    header    header_bytes of MessagePack, a struct that the reader knows
    buffers   the bytes themselves, in order, nothing between them

Integers are in network byte order. Prefix, lengths and header together are the *head*; it is at most
16 + 8 * 4096 + 65536 bytes, so a reader never holds more than that for a frame it has not yet accepted.
Nothing here does I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ravnest.core.config import format_bytes
from ravnest.core.errors import FrameError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "MAX_BUFFERS",
    "MAX_GENERATION",
    "MAX_HEADER_BYTES",
    "PREFIX_BYTES",
    "Prefix",
    "check_generation",
    "decode_header",
    "decode_lengths",
    "decode_prefix",
    "encode_head",
    "flat",
]

MAX_HEADER_BYTES = 64 * 1024
MAX_BUFFERS = 4096
MAX_GENERATION = 2**32 - 1

_MAGIC = b"RVNF"
_FORMAT = 1
_PREFIX = struct.Struct("!4sBBHII")
_LENGTH_BYTES = 8
PREFIX_BYTES = _PREFIX.size

_encoder = msgspec.msgpack.Encoder()


class Prefix(NamedTuple):
    """What the first 16 bytes of a frame announce."""

    generation: int
    num_buffers: int
    header_bytes: int

    @property
    def lengths_bytes(self) -> int:
        return self.num_buffers * _LENGTH_BYTES


def encode_head(header: msgspec.Struct, lengths: Sequence[int], *, generation: int, max_bytes: int) -> bytes:
    """Everything of a frame that comes before its buffers."""
    body = _encoder.encode(header)
    _check_counts(len(lengths), len(body))
    _check_total(lengths, max_bytes)
    prefix = _PREFIX.pack(_MAGIC, _FORMAT, 0, len(lengths), generation, len(body))
    return b"".join((prefix, struct.pack(f"!{len(lengths)}Q", *lengths), body))


def decode_prefix(data: ReadableBuffer) -> Prefix:
    """Read the first `PREFIX_BYTES` of a frame, or say why they begin none that we read."""
    magic, format_, flags, num_buffers, generation, header_bytes = _PREFIX.unpack(data)
    if magic != _MAGIC:
        raise FrameError(f"the bytes {magic!r} do not begin a frame: the peer does not speak this protocol")
    if format_ != _FORMAT or flags:
        raise FrameError(
            f"the frame has format {format_} and flags {flags}, this node reads format {_FORMAT}, no flags:"
            " run the same release on both ends"
        )
    _check_counts(num_buffers, header_bytes)
    return Prefix(generation, num_buffers, header_bytes)


def decode_lengths(prefix: Prefix, data: ReadableBuffer, *, max_bytes: int) -> tuple[int, ...]:
    """Read the buffers' lengths; together they must not exceed `max_bytes`."""
    lengths: tuple[int, ...] = struct.unpack(f"!{prefix.num_buffers}Q", data)
    _check_total(lengths, max_bytes)
    return lengths


def decode_header(decoder: msgspec.msgpack.Decoder[msgspec.Struct], data: ReadableBuffer) -> msgspec.Struct:
    """Read the header as the struct that `decoder` expects."""
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, as is bad UTF-8
        raise FrameError(f"the frame's header is not one this link expects: {error}") from error


def check_generation(found: int, expected: int) -> None:
    """A frame of another plan is never for us."""
    if found != expected:
        raise FrameError(f"the frame is of generation {found}, this link is of generation {expected}")


def flat(buffer: ReadableBuffer) -> memoryview:
    """The bytes of `buffer` in order, without copying them."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("a buffer must be contiguous in memory: pass a contiguous copy")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _check_counts(num_buffers: int, header_bytes: int) -> None:
    if num_buffers > MAX_BUFFERS:
        raise FrameError(f"a frame of {num_buffers} buffers is over the limit of {MAX_BUFFERS}")
    if header_bytes > MAX_HEADER_BYTES:
        raise FrameError(f"a frame with a header of {header_bytes} bytes is over the limit of {MAX_HEADER_BYTES}")


def _check_total(lengths: Sequence[int], max_bytes: int) -> None:
    total_bytes = sum(lengths)
    if total_bytes > max_bytes:
        limit = format_bytes(max_bytes)
        raise FrameError(f"a frame of {format_bytes(total_bytes)} is over the limit of {limit} for this link")
