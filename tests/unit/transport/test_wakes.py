"""Waits on a TLS channel: large reads wake up rarely, and no wait is for more bytes than are sent."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.transport.tls import TlsChannel, mutual_handshake, tls_context, tune
from tests.unit.transport.kinds import DEADLINE_S, Members

MUCH, LITTLE = 60_000, 20_000  # bytes; socket buffers hold both


class Wire:
    """Two connections, with bytes carried from one to the other under control of the test."""

    def __init__(self) -> None:
        (self.near, self._left), (self._right, self.far) = _connection(), _connection()

    def carry(self, num_bytes: int) -> int:
        """Carry at most `num_bytes` from near to far; returns their number."""
        return _carry(self._left, self._right, num_bytes)

    def carry_back(self) -> None:
        _carry(self._right, self._left, 2**20)

    def cut(self) -> None:
        self._right.close()

    def close(self) -> None:
        for sock in (self.near, self._left, self._right, self.far):
            sock.close()


def _connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=DEADLINE_S)
        far, _ = server.accept()
    for sock in (near, far):
        tune(sock)
        sock.setblocking(False)
    return near, far


def _carry(source: socket.socket, target: socket.socket, num_bytes: int) -> int:
    with contextlib.suppress(BlockingIOError):
        data = source.recv(num_bytes)
        target.sendall(data)
        return len(data)
    return 0


@contextlib.contextmanager
def channels(members: Members) -> Iterator[tuple[TlsChannel, TlsChannel, Wire]]:
    """Both ends of one connection, in one thread."""
    wire = Wire()
    near = TlsChannel(wire.near, tls_context(members["left"], server_side=False), server_side=False)
    far = TlsChannel(wire.far, tls_context(members["right"], server_side=True), server_side=True)
    handshakes = [mutual_handshake(end, lambda name: True) for end in (near, far)]
    try:
        while handshakes:
            handshakes = [handshake for handshake in handshakes if next(handshake, None) is not None]
            wire.carry(2**20)
            wire.carry_back()
        yield near, far, wire
    finally:
        wire.close()


def write(channel: TlsChannel, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[channel.try_write([left]) :]
    assert channel.try_flush()


def carry_all(wire: Wire) -> None:
    while wire.carry(2**20):
        pass


def test_few_bytes_do_not_wake_a_large_read(members: Members) -> None:
    data, received = bytes(range(250)) * (MUCH // 250), bytearray(MUCH)
    with channels(members) as (near, far, wire):
        assert far.try_read([memoryview(received)]) is None
        write(near, data)
        wire.carry(LITTLE)
        assert not far.wait_readable(0.0)
        carry_all(wire)
        assert far.wait_readable(0.0)
        assert far.try_read([memoryview(received)]) == MUCH
        assert received == data


def test_few_bytes_wake_a_small_read(members: Members) -> None:
    received = bytearray(16)
    with channels(members) as (near, far, wire):
        assert far.try_read([memoryview(bytearray(MUCH))]) is None
        assert not far.wait_readable(0.0)  # the previous wait was for a large read
        assert far.try_read([memoryview(received)]) is None
        write(near, b"a short message.")
        carry_all(wire)
        assert far.wait_readable(0.0)
        assert far.try_read([memoryview(received)]) == 16
        assert received == b"a short message."


def test_the_end_of_the_stream_wakes_a_large_read(members: Members) -> None:
    with channels(members) as (_, far, wire):
        assert far.try_read([memoryview(bytearray(MUCH))]) is None
        wire.cut()
        assert far.wait_readable(DEADLINE_S)
        assert far.try_read([memoryview(bytearray(MUCH))]) == 0


@settings(max_examples=50, deadline=None)
@given(
    written=st.lists(st.integers(1, 30_000), min_size=1, max_size=5),
    carried=st.lists(st.integers(1, 40_000), max_size=10),
)
def test_no_wait_is_for_more_than_is_sent(written: list[int], carried: list[int], members: Members) -> None:
    """For any sizes of records, and any split on the way."""
    data = b"".join(bytes([i]) * size for i, size in enumerate(written))
    received = memoryview(bytearray(len(data)))
    with channels(members) as (near, far, wire):
        at = 0
        for size in written:
            write(near, data[at : at + size])
            at += size
        at = 0
        for size in carried:
            wire.carry(size)
            if at < len(data):
                at += far.try_read([received[at:]]) or 0
        carry_all(wire)
        while at < len(data):
            assert far.wait_readable(0.0), f"the last {len(data) - at} bytes have arrived without a wake-up"
            at += far.try_read([received[at:]]) or 0
        assert received == data


@pytest.mark.parametrize("wanted_bytes", [LITTLE, MUCH, 10 * MUCH])
def test_the_watermark_leaves_space_in_the_receive_window(members: Members, wanted_bytes: int) -> None:
    """Otherwise the peer cannot send ahead, and a link with a long round trip is idle most of the time."""
    with channels(members) as (_, far, wire):
        assert far.try_read([memoryview(bytearray(wanted_bytes))]) is None
        assert not far.wait_readable(0.0)
        watermark, buffer = (wire.far.getsockopt(socket.SOL_SOCKET, o) for o in (socket.SO_RCVLOWAT, socket.SO_RCVBUF))
        assert watermark <= buffer / 4
