"""Wire format of one message, validated before memory is allocated for it.

    prefix    magic 4s | format u8 | flags u8 | num_buffers u16 | generation u32 | header_bytes u32
    lengths   num_buffers x u64
    header    header_bytes of MessagePack, a struct known to the reader
    buffers   their bytes, in order, without padding

Integers are in network byte order. Prefix, lengths and header together are the *head* of at most
16 + 8 * 4096 + 65536 bytes: the most that a reader holds for a frame that it has not accepted yet. No I/O here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ravnest.core.units import format_bytes
from ravnest.errors import FrameError

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

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


MAX_HEADER_BYTES = 64 * 1024
MAX_BUFFERS = 4096
MAX_GENERATION = 2**32 - 1

_MAGIC = b"RVNF"
_FORMAT = 2
_PREFIX = struct.Struct("!4sBBHII")
_LENGTH_BYTES = 8
PREFIX_BYTES = _PREFIX.size

_encoder = msgspec.msgpack.Encoder()


class Prefix(NamedTuple):
    """Fields of the first 16 bytes of a frame."""

    generation: int
    num_buffers: int
    header_bytes: int

    @property
    def lengths_bytes(self) -> int:
        return self.num_buffers * _LENGTH_BYTES


def encode_head(header: msgspec.Struct, lengths: Sequence[int], *, generation: int, max_bytes: int) -> bytes:
    """Encode the part of a frame that precedes its buffers."""
    body = _encoder.encode(header)
    _check_counts(len(lengths), len(body))
    _check_total(lengths, max_bytes)
    prefix = _PREFIX.pack(_MAGIC, _FORMAT, 0, len(lengths), generation, len(body))
    return b"".join((prefix, struct.pack(f"!{len(lengths)}Q", *lengths), body))


def decode_prefix(data: ReadableBuffer) -> Prefix:
    """Decode the first `PREFIX_BYTES` of a frame."""
    magic, format_, flags, num_buffers, generation, header_bytes = _PREFIX.unpack(data)
    if magic != _MAGIC:
        raise FrameError(f"the bytes {magic!r} do not begin a frame: the peer uses another protocol")
    if format_ != _FORMAT or flags:
        raise FrameError(
            f"unsupported frame format {format_} with flags {flags}, expected format {_FORMAT} without flags:"
            " run the same release on both ends"
        )
    _check_counts(num_buffers, header_bytes)
    return Prefix(generation, num_buffers, header_bytes)


def decode_lengths(prefix: Prefix, data: ReadableBuffer, *, max_bytes: int) -> tuple[int, ...]:
    """Decode the lengths of the buffers; their sum must not exceed `max_bytes`."""
    lengths: tuple[int, ...] = struct.unpack(f"!{prefix.num_buffers}Q", data)
    _check_total(lengths, max_bytes)
    return lengths


def decode_header(decoder: msgspec.msgpack.Decoder[msgspec.Struct], data: ReadableBuffer) -> msgspec.Struct:
    """Decode the header as the struct that `decoder` expects."""
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, as is bad UTF-8
        raise FrameError(f"unexpected frame header: {error}") from error


def check_generation(received: int, expected: int) -> None:
    """Reject a frame of another plan."""
    if received != expected:
        raise FrameError(f"frame of generation {received} on a link of generation {expected}")


def flat(buffer: ReadableBuffer) -> memoryview:
    """View the bytes of `buffer` in order, without a copy."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("buffer must be contiguous in memory: pass a contiguous copy")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _check_counts(num_buffers: int, header_bytes: int) -> None:
    if num_buffers > MAX_BUFFERS:
        raise FrameError(f"frame of {num_buffers} buffers is over the limit of {MAX_BUFFERS}")
    if header_bytes > MAX_HEADER_BYTES:
        raise FrameError(f"frame header of {header_bytes} bytes is over the limit of {MAX_HEADER_BYTES}")


def _check_total(lengths: Sequence[int], max_bytes: int) -> None:
    total_bytes = sum(lengths)
    if total_bytes > max_bytes:
        raise FrameError(f"frame of {format_bytes(total_bytes)} is over the limit of {format_bytes(max_bytes)}")
