"""Wire format: frames round-trip, and malformed bytes are rejected."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.errors import FrameError
from ravnest.transport.frame import (
    MAX_BUFFERS,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    check_generation,
    decode_header,
    decode_lengths,
    decode_prefix,
    encode_head,
    flat,
)
from tests.unit.transport.kinds import Note, Other

DECODER: msgspec.msgpack.Decoder[msgspec.Struct] = msgspec.msgpack.Decoder(Note)
LIMIT = 2**32

no_deadline = settings(deadline=None)  # the machine may be busy


def prefix_bytes(
    *,
    magic: bytes = b"RVNF",
    format_: int = 2,
    flags: int = 0,
    num_buffers: int = 0,
    generation: int = 0,
    header_bytes: int = 0,
) -> bytes:
    return struct.pack("!4sBBHII", magic, format_, flags, num_buffers, generation, header_bytes)


@no_deadline
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**20), max_size=300), st.text(max_size=2000))
def test_heads_round_trip(generation: int, lengths: list[int], text: str) -> None:
    head = encode_head(Note(5, text), lengths, generation=generation, max_bytes=LIMIT)
    prefix = decode_prefix(head[:PREFIX_BYTES])
    end = PREFIX_BYTES + prefix.lengths_bytes
    assert prefix.generation == generation
    assert decode_lengths(prefix, head[PREFIX_BYTES:end], max_bytes=LIMIT) == tuple(lengths)
    assert decode_header(DECODER, head[end:]) == Note(5, text)
    assert len(head) == end + prefix.header_bytes


@no_deadline
@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
def test_any_prefix_is_rejected_or_within_limits(data: bytes) -> None:
    check_prefix(data)


@no_deadline
@given(st.binary(min_size=PREFIX_BYTES - 6, max_size=PREFIX_BYTES - 6))
def test_any_prefix_with_valid_magic_is_rejected_or_within_limits(tail: bytes) -> None:
    check_prefix(b"RVNF\x02\x00" + tail)


def check_prefix(data: bytes) -> None:
    try:
        prefix = decode_prefix(data)
    except FrameError:
        return
    assert prefix.num_buffers <= MAX_BUFFERS
    assert prefix.header_bytes <= MAX_HEADER_BYTES


@no_deadline
@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(0, 2**64))
def test_lengths_never_exceed_the_limit(lengths: list[int], max_bytes: int) -> None:
    prefix = decode_prefix(prefix_bytes(num_buffers=len(lengths)))
    data = struct.pack(f"!{len(lengths)}Q", *lengths)
    if sum(lengths) <= max_bytes:
        assert decode_lengths(prefix, data, max_bytes=max_bytes) == tuple(lengths)
    else:
        with pytest.raises(FrameError, match="over the limit"):
            decode_lengths(prefix, data, max_bytes=max_bytes)


@no_deadline
@given(st.binary(max_size=200))
def test_any_header_is_rejected_or_the_struct(data: bytes) -> None:
    try:
        header = decode_header(DECODER, data)
    except FrameError:
        return
    assert isinstance(header, Note)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x83\xa4type\xa4note\xa6number\x01\xa1z" + b"\x91" * 60000 + b"\x01", id="nested deeply"),
        pytest.param(b"\x83\xa4type\xa4note\xa6number\x01\xa1z\xdd\xff\xff\xff\xff", id="huge array announced"),
        pytest.param(b"\x83\xa4type\xa4note\xa6number\x01\xa4text\xa2\xff\xfe", id="bad text"),
        pytest.param(msgspec.msgpack.encode(Other(1)), id="another struct"),
        pytest.param(msgspec.msgpack.encode(Note(1)) + b"x", id="more after it"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_hostile_headers_are_rejected(data: bytes) -> None:
    with pytest.raises(FrameError, match="unexpected frame header"):
        decode_header(DECODER, data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (prefix_bytes(magic=b"GET "), "another protocol"),
        (prefix_bytes(format_=1), "run the same release"),
        (prefix_bytes(flags=1), "run the same release"),
        (prefix_bytes(num_buffers=MAX_BUFFERS + 1), "buffers is over the limit"),
        (prefix_bytes(header_bytes=MAX_HEADER_BYTES + 1), "over the limit"),
    ],
)
def test_errors_tell_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        decode_prefix(data)


def test_the_writer_has_the_same_limits() -> None:
    with pytest.raises(FrameError, match="buffers is over the limit"):
        encode_head(Note(1), [0] * (MAX_BUFFERS + 1), generation=0, max_bytes=LIMIT)
    with pytest.raises(FrameError, match="header of"):
        encode_head(Note(1, "x" * MAX_HEADER_BYTES), [], generation=0, max_bytes=LIMIT)
    with pytest.raises(FrameError, match="over the limit"):
        encode_head(Note(1), [60, 50], generation=0, max_bytes=100)


def test_another_generation_is_rejected() -> None:
    check_generation(3, 3)
    with pytest.raises(FrameError, match="generation 2"):
        check_generation(2, 3)


def test_buffers_are_flattened_without_copying() -> None:
    memory = bytearray(24)
    floats = memoryview(memory).cast("f", (2, 3))
    flat(floats)[0] = 9
    assert memory[0] == 9
    assert flat(memoryview(b"").cast("f")).nbytes == 0
    with pytest.raises(ValueError, match="contiguous"):
        flat(memoryview(memory)[::2])
