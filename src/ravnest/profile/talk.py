"""What two machines say to each other to measure the line between them: one request per connection, then bytes.

    request:  "ravline1" | kind | milliseconds          13 bytes
    ECHO      the answerer sends back every 8 bytes that come
    GIVE      the answerer sends for so long, and closes
    TAKE      the answerer receives for so long, and says at what rate: 8 bytes, a double

Whoever receives does the counting, from when the first `RAMP_S` are over: by then TCP has found its pace.

    rate = bytes that came after the ramp / seconds between the last of them and the ramp's end

Nothing is kept of what comes, every wait has an end, and what is not a request ends the connection.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from ..core.errors import FrameError, LinkClosed, LinkTimeout
from ..net.deadline import Deadline
from ..net.sockets import wait_ready

__all__ = ["MAX_ECHOES", "PING_BYTES", "Kind", "Request", "read_exactly", "receive_rate", "send_all", "send_for"]

MAX_ECHOES = 100
PING_BYTES = 8
RAMP_S = 0.5
_MAX_S = 5.0
_MAX_BYTES = 8 * 10**9  # of one measurement, whatever the line could carry
_BLOCK_BYTES = 2**18
_PACE_BYTES = 2**14
_MAGIC = b"ravline1"
_REQUEST = struct.Struct("!8sBI")


class Kind(IntEnum):
    ECHO = 1
    GIVE = 2
    TAKE = 3


@dataclass(frozen=True)
class Request:
    """What a connection is for, and for how long."""

    kind: Kind
    seconds: float

    def send(self, sock: socket.socket, deadline: Deadline) -> None:
        send_all(sock, _REQUEST.pack(_MAGIC, self.kind, round(self.seconds * 1000)), deadline)

    @classmethod
    def read(cls, sock: socket.socket, deadline: Deadline) -> Request:
        magic, kind, milliseconds = _REQUEST.unpack(read_exactly(sock, _REQUEST.size, deadline))
        if magic != _MAGIC or kind not in list(Kind) or not 0 < milliseconds <= _MAX_S * 1000:
            raise FrameError("that is not a request to measure a line")
        return cls(Kind(kind), milliseconds / 1000)


def send_all(sock: socket.socket, content: bytes, deadline: Deadline) -> None:
    left = memoryview(content)
    while left:
        left = left[_send(sock, left, deadline) :]


def read_exactly(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = _receive(sock, view, deadline)
        if not got:
            raise LinkClosed("the other side closed the connection")
        view = view[got:]
    return bytes(buffer)


def send_for(sock: socket.socket, seconds: float, max_bytes_per_s: float | None = None) -> None:
    """Send bytes that nothing on the way can compress, no faster than allowed."""
    block = memoryview(os.urandom(_BLOCK_BYTES))
    until, began, sent = Deadline(seconds), time.monotonic(), 0
    while not until.passed() and sent < _MAX_BYTES:
        size = _BLOCK_BYTES
        if max_bytes_per_s is not None:
            size = min(size, _PACE_BYTES)
            ahead_s = (sent + size) / max_bytes_per_s - (time.monotonic() - began)
            time.sleep(min(max(0.0, ahead_s), until.left_s()))
        try:
            sent += _send(sock, block[:size], until)
        except LinkTimeout:
            return


def receive_rate(sock: socket.socket, seconds: float, patience_s: float) -> float:
    """Bytes per second of what comes in the next seconds, counted after the ramp; 0.0 if nothing comes."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    got = total = _receive(sock, buffer, Deadline(patience_s))
    began = ramp_s = last_s = time.monotonic()
    until, at_ramp = Deadline(seconds), 0
    while got and total < _MAX_BYTES:
        try:
            got = _receive(sock, buffer, until)
        except LinkTimeout:
            break
        if got:
            last_s, total = time.monotonic(), total + got
        if not at_ramp and last_s - began >= min(RAMP_S, seconds / 4):
            ramp_s, at_ramp = last_s, total
    if last_s > ramp_s and at_ramp:
        return (total - at_ramp) / (last_s - ramp_s)
    return total / seconds  # too slow to have come to its pace


def _send(sock: socket.socket, content: memoryview, deadline: Deadline) -> int:
    while True:
        try:
            return sock.send(content)
        except BlockingIOError:
            _wait(sock, selectors.EVENT_WRITE, deadline)
        except OSError as error:
            raise LinkClosed(f"the connection broke: {error}") from error


def _receive(sock: socket.socket, buffer: memoryview, deadline: Deadline) -> int:
    while True:
        try:
            if deadline.passed():
                raise LinkTimeout(f"nothing came in {deadline.seconds:g} s")
            return sock.recv_into(buffer)
        except BlockingIOError:
            _wait(sock, selectors.EVENT_READ, deadline)
        except OSError as error:
            raise LinkClosed(f"the connection broke: {error}") from error


def _wait(sock: socket.socket, event: int, deadline: Deadline) -> None:
    if not wait_ready(sock, event, deadline.left_s()):
        raise LinkTimeout(f"the other side did nothing for {deadline.seconds:g} s")
