"""Bytes from a malicious peer: rejected with an error, the link closed, no memory allocated."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from ravnest.transport.frame import PREFIX_BYTES, encode_head
from ravnest.transport.link import LinkConfig
from ravnest.transport.stream import StreamLink
from tests.unit.transport.kinds import CONFIG, DEADLINE_S, Kind, Note, Other, receive
from tests.unit.transport.memory import memory_channels


def head(header: msgspec.Struct, *lengths: int, generation: int = CONFIG.generation) -> bytes:
    return encode_head(header, lengths, generation=generation, max_bytes=2**80)


GOOD = head(Note(1), 3) + b"abc"

BAD = {
    "plain text": b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n",
    "noise": bytes(range(7, 90)),
    "wrong format": GOOD[:4] + b"\x01" + GOOD[5:],
    "wrong flags": GOOD[:5] + b"\x80" + GOOD[6:],
    "too many buffers": struct.pack("!4sBBHII", b"RVNF", 1, 0, 5000, 7, 10),
    "header too long": struct.pack("!4sBBHII", b"RVNF", 1, 0, 0, 7, 2**31),
    "no header": struct.pack("!4sBBHII", b"RVNF", 1, 0, 0, 7, 0),
    "wrong generation": head(Note(1), generation=6),
    "oversize buffer": head(Note(1), 2**63),
    "oversize together": head(Note(1), *[2**30] * 5),
    "another header": head(Other(1)),
    "broken header": GOOD[:-6] + b"\xc1" * 6,
}


def never(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
    pytest.fail("a rejected frame must not be given memory")


@pytest.mark.parametrize("case", BAD)
def test_bad_bytes_are_rejected_and_the_link_closed(kind: Kind, case: str) -> None:
    with kind.raw() as (link, far):
        far.sendall(BAD[case])
        tracemalloc.start()
        try:
            with pytest.raises(FrameError) as caught:
                link.receive(never, deadline_s=DEADLINE_S)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()
        assert " " in str(caught.value)
        assert link.closed
        with pytest.raises(LinkClosed):
            receive(link)


def test_a_good_frame_before_a_bad_one_is_received(kind: Kind) -> None:
    with kind.raw() as (link, far):
        far.sendall(GOOD + BAD["noise"])
        assert receive(link) == (Note(1), [b"abc"])
        with pytest.raises(FrameError):
            receive(link)


@pytest.mark.parametrize("num_bytes", [1, PREFIX_BYTES - 1, PREFIX_BYTES, PREFIX_BYTES + 9, len(GOOD) - 1])
def test_an_incomplete_frame_closes_the_link(kind: Kind, num_bytes: int) -> None:
    with kind.raw() as (link, far):
        far.sendall(GOOD[:num_bytes])
        far.close()
        with pytest.raises(LinkClosed, match="in the middle of a frame"):
            receive(link)
        assert link.closed
    with kind.raw() as (link, far):
        far.sendall(GOOD[:num_bytes])
        with pytest.raises(LinkTimeout):
            receive(link, deadline_s=0.05)
        assert link.closed


def reject(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
    raise FrameError("no frame is expected now")


def too_small(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
    return [memoryview(bytearray(2))]


def too_many(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
    return [memoryview(bytearray(3)), memoryview(bytearray(3))]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (reject, "no frame is expected"),
        (too_small, r"1 buffers of \[3\] bytes, expected"),
        (too_many, "expected 2 buffers"),
    ],
)
def test_unexpected_frames_are_rejected(
    kind: Kind, place: Callable[[msgspec.Struct, tuple[int, ...]], list[memoryview]], message: str
) -> None:
    with kind.pair() as (left, right):
        left.send(Note(1), [b"abc"], deadline_s=DEADLINE_S)
        with pytest.raises(FrameError, match=message):
            right.receive(place, deadline_s=DEADLINE_S)
        assert right.closed
        with pytest.raises(LinkClosed):
            receive(left)


def test_a_frame_over_the_limit_is_not_sent_and_leaves_the_link_usable(kind: Kind) -> None:
    with kind.pair(LinkConfig(headers=Note, max_frame_bytes=100)) as (left, right):
        with pytest.raises(FrameError, match="over the limit of 100 B"):
            left.send(Note(1), [bytes(101)], deadline_s=DEADLINE_S)
        left.send(Note(2), [bytes(100)], deadline_s=DEADLINE_S)
        assert receive(right) == (Note(2), [bytes(100)])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_frames_are_rejected(data: st.DataObject) -> None:
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
    near, far = memory_channels(2**16)
    far.try_write([memoryview(damaged)[: data.draw(st.integers(1, len(GOOD)))]])
    far.shutdown()
    with StreamLink(near, LinkConfig(headers=Note, generation=7, max_frame_bytes=1000), peer="far") as link:
        try:
            receive(link)
        except LinkError:
            assert link.closed
