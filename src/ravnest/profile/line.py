"""The line from here to a peer: how fast it carries bytes there and back, and how long a message takes.

latency = median round trip of small messages / 2
"""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..core.config import require
from ..core.errors import FrameError, LinkError
from ..net.deadline import Deadline
from .talk import PING_BYTES, Kind, Request, read_exactly, receive_rate, send_all, send_for

__all__ = ["Line", "measure_line", "parse_address"]

_PINGS = 20
_PINGING_S = 1.5
_PATIENCE_S = 8.0  # it may be busy measuring with another


@dataclass(frozen=True)
class Line:
    """Bytes per second that this machine can send and receive, and the one-way time of a small message."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float


def measure_line(
    peer: tuple[str, int],
    *,
    seconds: float = 2.0,
    max_upload_bytes_per_s: float | None = None,
    report: Callable[[str], None] = lambda what: None,
) -> Line:
    """Measure against a machine that answers (`Answerer`): `seconds` in each direction."""
    require(0.1 <= seconds <= 5, f"a measurement takes 0.1 to 5 s, not {seconds}")
    report(f"latency to {peer[0]}")
    latency_s = _latency_s(peer)
    report(f"download from {peer[0]}")
    down = _download(peer, seconds)
    report(f"upload to {peer[0]}")
    up = _upload(peer, seconds, max_upload_bytes_per_s)
    if min(up, down) <= 0:
        raise LinkError(f"the line to {peer[0]} carried nothing in {seconds:g} s")
    return Line(min(up, max_upload_bytes_per_s or math.inf), down, latency_s)


def _latency_s(peer: tuple[str, int]) -> float:
    trips: list[float] = []
    with _ask(peer, Kind.ECHO, _PINGING_S) as sock:
        until = Deadline(_PINGING_S)
        while len(trips) < _PINGS and not (trips and until.passed()):
            message = struct.pack("!Q", len(trips))
            began = time.perf_counter()
            send_all(sock, message, Deadline(_PATIENCE_S))
            if read_exactly(sock, PING_BYTES, Deadline(_PATIENCE_S)) != message:
                raise FrameError(f"{peer[0]} did not send back what it got")
            trips.append(time.perf_counter() - began)
    return statistics.median(trips) / 2


def _download(peer: tuple[str, int], seconds: float) -> float:
    with _ask(peer, Kind.GIVE, seconds) as sock:
        return receive_rate(sock, seconds, _PATIENCE_S)


def _upload(peer: tuple[str, int], seconds: float, max_bytes_per_s: float | None) -> float:
    with _ask(peer, Kind.TAKE, seconds) as sock:
        send_for(sock, seconds, max_bytes_per_s)
        with contextlib.suppress(OSError):  # it has closed already: then its answer is here
            sock.shutdown(socket.SHUT_WR)
        (rate,) = struct.unpack("!d", read_exactly(sock, 8, Deadline(_PATIENCE_S)))
    if not 0 <= rate < 1e15:
        raise FrameError(f"{peer[0]} says it received {rate} bytes/s")
    return float(rate)


@contextlib.contextmanager
def _ask(peer: tuple[str, int], kind: Kind, seconds: float) -> Iterator[socket.socket]:
    try:
        sock = socket.create_connection(peer, timeout=_PATIENCE_S)
    except OSError as error:
        raise LinkError(
            f"cannot reach {peer[0]}:{peer[1]}: {error}. Is `ravnest profile --serve :{peer[1]}` running there?"
        ) from error
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        Request(kind, seconds).send(sock, Deadline(_PATIENCE_S))
        yield sock


def parse_address(text: str, *, default_host: str = "") -> tuple[str, int]:
    """`"attic:7710"` -> ("attic", 7710); `"[::1]:7710"`; `":7710"` where there is a default."""
    host, colon, port = text.strip().rpartition(":")
    require(bool(colon) and port.isdecimal(), f"{text!r} is not an address: write HOST:PORT, such as 192.168.1.5:7710")
    require(int(port) < 2**16, f"{text!r}: a port is a number up to 65535")
    host = (host[1:-1] if host.startswith("[") and host.endswith("]") else host) or default_host
    require(bool(host), f"{text!r} names no host: write HOST:PORT")
    return host, int(port)
