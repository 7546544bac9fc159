"""Lines are measured over real sockets, and rates exactly on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import pytest

from ravnest.errors import LinkError, RavnestError
from ravnest.profiling import bandwidth
from ravnest.profiling.bandwidth import measure_line, serve_line


@contextmanager
def served(max_upload_bytes_per_s: float | None = None) -> Iterator[tuple[tuple[str, int], list[str]]]:
    """`serve_line` in a thread; its address and its log."""
    log: list[str] = []
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    address: list[tuple[str, int]] = []
    started = threading.Event()

    async def serve() -> None:
        async with serve_line(("127.0.0.1", 0), max_upload_bytes_per_s=max_upload_bytes_per_s, log=log.append) as at:
            address.append(at)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(60)
    try:
        yield address[0], log
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=60)
        assert not thread.is_alive()
        loop.close()


@asynccontextmanager
async def download(address: tuple[str, int], seconds: str) -> AsyncIterator[aiohttp.ClientResponse]:
    async with (
        aiohttp.ClientSession(f"http://{address[0]}:{address[1]}") as session,
        session.get("/v1/line", params={"seconds": seconds}) as response,
    ):
        yield response


class VirtualTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def perf_counter(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_limited_sender_and_the_receiver_agree_on_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = VirtualTime()
    for name in ("time", "asyncio"):
        monkeypatch.setattr(bandwidth, name, virtual)

    async def send() -> bandwidth._RateCounter:
        counter = bandwidth._RateCounter(2.0)
        async for chunk in bandwidth._chunks(2.0, 5e6):
            counter.add(len(chunk))
        return counter

    counter = asyncio.run(send())
    assert virtual.now_s == pytest.approx(3.0)
    assert counter.num_bytes == pytest.approx(2 * 5e6, rel=0.02)
    assert counter.bytes_per_s == pytest.approx(5e6, rel=0.02)


def test_both_directions_are_measured_within_their_limits() -> None:
    with served(max_upload_bytes_per_s=8e6) as (address, log):
        line = measure_line(address, seconds=0.6, max_upload_bytes_per_s=5e6)
    assert 0 < line.up_bytes_per_s <= 5e6
    assert 0 < line.down_bytes_per_s < 16e6, "at most its limit, apart from bursts"
    assert line.latency_s > 0
    assert log == ["127.0.0.1: download", "127.0.0.1: upload"]


def test_a_slow_line() -> None:
    with served(max_upload_bytes_per_s=2e4) as (address, _):
        line = measure_line(address, seconds=0.6, max_upload_bytes_per_s=2e4)
    assert 0 < line.up_bytes_per_s <= 2e4
    assert 0 < line.down_bytes_per_s < 1e5, "at most its limit, apart from bursts"


def test_a_fast_line_is_not_held_back() -> None:
    with served() as (address, _):
        line = measure_line(address, seconds=0.2)
    assert min(line.up_bytes_per_s, line.down_bytes_per_s) > 1e6  # loopback carries a thousand times that


def test_a_busy_peer_is_asked_again() -> None:
    with served(max_upload_bytes_per_s=1e6) as (address, _):
        began = threading.Event()

        async def occupy() -> None:
            async with download(address, "1.2") as response:
                began.set()
                await response.read()

        occupant = threading.Thread(target=lambda: asyncio.run(occupy()))
        occupant.start()
        assert began.wait(60)
        line = measure_line(address, seconds=0.5)
        occupant.join()
    assert 0 < line.down_bytes_per_s < 3e6, "measured, not the default"


GARBAGE = {
    "noise": os.urandom(64) + b"\r\n\r\n",
    "another page": b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n",
    "no time": b"GET /v1/line?seconds=soon HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n",
    "not a number": b"POST /v1/line?seconds=nan HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n",
}


def test_bad_requests_are_rejected_and_harm_no_others() -> None:
    with served() as (address, _):
        for name, content in GARBAGE.items():
            with socket.create_connection(address, timeout=60) as sock:
                sock.sendall(content)
                assert sock.recv(12) in (b"HTTP/1.0 400", b"HTTP/1.1 400", b"HTTP/1.1 404"), name
        with socket.create_connection(address, timeout=60):
            pass  # closes without a request
        assert measure_line(address, seconds=0.2).down_bytes_per_s > 0


def test_a_download_has_a_longest_time() -> None:
    async def download_hour(address: tuple[str, int]) -> None:
        async with download(address, "3600") as response:
            await response.read()

    with served(max_upload_bytes_per_s=1e6) as (address, _):
        asyncio.run(asyncio.wait_for(download_hour(address), 60))


BAD_ANSWERS = {
    "nothing": b"",
    "no HTTP": b"not the bytes that were expected" * 9,
    "another server": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "a long answer": b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\nConnection: close\r\n\r\n" + b"x" * 9000,
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_peer_that_does_not_serve_lines(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):  # the server is shut down
                while True:
                    sock, _ = server.accept()
                    with sock:
                        sock.recv(1000)
                        sock.sendall(BAD_ANSWERS[name])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(
            RavnestError, match=r"connection to .* failed|is not `ravnest profile --serve`|is longer than"
        ):
            measure_line(server.getsockname()[:2], seconds=0.2)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_unreachable_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    with pytest.raises(LinkError, match=r"cannot reach 127.0.0.1:\d+.*ravnest profile --serve"):
        measure_line(address)


def test_a_port_that_is_taken() -> None:
    async def serve(address: tuple[str, int]) -> None:
        async with serve_line(address):
            pass

    with served() as (address, _), pytest.raises(LinkError, match="cannot listen"):
        asyncio.run(serve(address))
