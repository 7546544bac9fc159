"""Bandwidth and latency of the line to another machine, measured over HTTP.

    GET  /v1/line?seconds=0    empty                               latency = least round trip / 2
    GET  /v1/line?seconds=S    bytes for S seconds                 download
    POST /v1/line?seconds=S    bytes for S seconds, up to 1 GiB    upload; the answer is the rate, in JSON

The receiver counts, after a ramp in which TCP finds its rate:

    rate = bytes received after the ramp / seconds from the end of the ramp to the last of them

The coordinator serves this to its nodes over TLS, `ravnest profile --serve` to anyone over plain HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp import web

from ravnest.core.clock import Backoff
from ravnest.core.config import require
from ravnest.errors import LinkError, RequestRejected
from ravnest.transport.address import Address, show

__all__ = [
    "Line",
    "LineEndpoint",
    "measure_download",
    "measure_latency_s",
    "measure_line",
    "measure_upload",
    "serve_line",
]

BUSY = "other nodes are measuring their lines: try again in a moment"
_PATH = "/v1/line"
_MAX_S = 3.0
_MAX_BYTES = 1 << 30  # of one measurement
_MAX_RAMP_S = 0.5
_CHUNK = os.urandom(2**18)  # random, so that nothing on the way can compress it
_CHUNK_S = 0.02  # of a limited rate
_ROUND_TRIPS = 6
_TRIES = 4  # while the other side is busy
_CONNECT_S, _READ_S = 8.0, 10.0
_MAX_ANSWER_BYTES = 4096


@dataclass(frozen=True)
class Line:
    """Bytes per second that this machine can send and receive, and the one-way time of a small message."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float


class _Rate(msgspec.Struct):
    bytes_per_s: float


class _RateCounter:
    """Received bytes and their times; the ramp is a quarter of the measurement, at most half a second."""

    def __init__(self, seconds: float) -> None:
        self._ramp_s = min(_MAX_RAMP_S, seconds / 4)
        self._first_s = self._last_s = self._ramp_end_s = 0.0
        self._first_bytes = self._ramp_bytes = self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._last_s = time.perf_counter()
        self.num_bytes += num_bytes
        if not self._first_s:  # bytes that were in flight before count neither as bytes nor as time
            self._first_s, self._first_bytes = self._last_s, self.num_bytes
        elif not self._ramp_end_s and self._last_s - self._first_s >= self._ramp_s:
            self._ramp_end_s, self._ramp_bytes = self._last_s, self.num_bytes

    @property
    def bytes_per_s(self) -> float:
        if self._ramp_end_s and self.num_bytes > self._ramp_bytes:
            return (self.num_bytes - self._ramp_bytes) / max(self._last_s - self._ramp_end_s, 1e-6)
        return (self.num_bytes - self._first_bytes) / max(self._last_s - self._first_s, 1e-6)


async def _chunks(seconds: float, max_bytes_per_s: float | None) -> AsyncIterator[bytes]:
    """Yield bytes for this time, within the rate and the size of a measurement."""
    rate = max_bytes_per_s or math.inf
    chunk = _CHUNK[: max(1, int(min(rate * _CHUNK_S, len(_CHUNK))))]
    began, sent_bytes = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - began) < seconds and sent_bytes + len(chunk) <= _MAX_BYTES:
        yield chunk
        sent_bytes += len(chunk)
        if math.isfinite(rate):
            await asyncio.sleep(min(max(0.0, sent_bytes / rate - elapsed_s), max(0.0, seconds - elapsed_s)))


class LineEndpoint:
    """The handlers of `/v1/line`; measurements beyond `max_concurrent` are rejected with status 503."""

    def __init__(self, *, timeout_s: float, max_concurrent: int, max_upload_bytes_per_s: float | None = None) -> None:
        self._timeout_s, self._max_upload = timeout_s, max_upload_bytes_per_s
        self._slots = asyncio.Semaphore(max_concurrent)

    async def download(self, request: web.Request) -> web.StreamResponse:
        """Send bytes for the requested time."""
        seconds = _seconds(request)
        if seconds <= 0:
            return web.Response()
        async with self._slot():
            response = web.StreamResponse()
            response.enable_chunked_encoding()
            await response.prepare(request)
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for chunk in _chunks(seconds, self._max_upload):
                        await response.write(chunk)
                    await response.write_eof()
            except TimeoutError:  # the client does not read, so it could not read an error either
                if request.transport is not None:
                    request.transport.abort()
                raise
            return response

    async def upload(self, request: web.Request) -> web.Response:
        """Receive the bytes of the client, and answer with the rate."""
        counter = _RateCounter(_seconds(request))
        async with self._slot(), asyncio.timeout(self._timeout_s):
            async for chunk in request.content.iter_any():
                counter.add(len(chunk))
                require(counter.num_bytes <= _MAX_BYTES, f"a measurement may have at most {_MAX_BYTES} bytes")
        return web.json_response({"bytes_per_s": counter.bytes_per_s})

    def _slot(self) -> asyncio.Semaphore:
        if self._slots.locked():
            raise web.HTTPServiceUnavailable
        return self._slots


def _seconds(request: web.Request) -> float:
    seconds = float(request.query.get("seconds", "1"))
    require(math.isfinite(seconds), f"seconds must be a finite number, got {seconds}")
    return min(seconds, _MAX_S)


class HttpClient(Protocol):
    """Requests to one server; an answer other than status 200 is a `RequestRejected`, a failed link a `LinkError`."""

    def request(
        self, method: str, path: str, **options: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]: ...


async def measure_latency_s(client: HttpClient) -> float:
    trips = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        async with client.request("GET", _PATH, params={"seconds": "0"}) as response:
            await _read(response)
        trips.append(time.perf_counter() - began)
    return min(trips[1:]) / 2  # the first one connects


async def measure_download(client: HttpClient, seconds: float) -> float:
    """Return bytes per second from the server to this machine."""

    async def measure() -> float:
        counter = _RateCounter(seconds)
        async with client.request("GET", _PATH, params={"seconds": f"{seconds:g}"}) as response:
            async for chunk in response.content.iter_any():
                counter.add(len(chunk))
        return _checked(counter.bytes_per_s)

    return await _retry_while_busy(measure, seconds)


async def measure_upload(client: HttpClient, seconds: float, max_bytes_per_s: float | None) -> float:
    """Return bytes per second from this machine to the server, at most `max_bytes_per_s`."""

    async def measure() -> float:
        sent = _chunks(seconds, max_bytes_per_s)
        async with client.request("POST", _PATH, params={"seconds": f"{seconds:g}"}, data=sent) as response:
            answer = await _read(response)
        try:
            rate = msgspec.json.decode(answer, type=_Rate).bytes_per_s
        except ValueError as error:
            raise LinkError(f"could not decode the measured upload rate: {error}") from error
        return min(_checked(rate), max_bytes_per_s or math.inf)

    return await _retry_while_busy(measure, seconds)


async def _retry_while_busy(measure: Callable[[], Awaitable[float]], seconds: float) -> float:
    backoff = Backoff(seconds, 4 * seconds)
    for _ in range(_TRIES - 1):
        try:
            return await measure()
        except RequestRejected as rejected:
            if rejected.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            await asyncio.sleep(backoff.next_s())
    return await measure()


def _checked(bytes_per_s: float) -> float:
    if not 0 < bytes_per_s < 1e15:
        raise LinkError(f"the measured rate must be > 0 and < 1e15 bytes/s, got {bytes_per_s:g}")
    return bytes_per_s


async def _read(response: aiohttp.ClientResponse) -> bytes:
    answer = bytearray()
    async for chunk in response.content.iter_any():
        answer += chunk
        if len(answer) > _MAX_ANSWER_BYTES:
            raise LinkError(f"the answer to a measurement is longer than {_MAX_ANSWER_BYTES} bytes")
    return bytes(answer)


class _PeerClient:
    """Plain HTTP to a machine that runs `ravnest profile --serve`."""

    def __init__(self, peer: Address, session: aiohttp.ClientSession) -> None:
        self._peer, self._session = peer, session

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        where = show(self._peer)
        try:
            async with self._session.request(method, path, allow_redirects=False, **options) as response:
                if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    raise RequestRejected(f"{where} is busy: {BUSY}", response.status)
                if response.status != HTTPStatus.OK:
                    raise RequestRejected(
                        f"{where} is not `ravnest profile --serve`: {response.status}", response.status
                    )
                yield response
        except aiohttp.ClientConnectorError as error:
            hint = f"Is `ravnest profile --serve :{self._peer[1]}` running there?"
            raise LinkError(f"cannot reach {where}: {error.strerror or error}. {hint}") from error
        except TimeoutError as error:
            raise LinkError(f"no answer from {where} within {_READ_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LinkError(f"the connection to {where} failed: {error}") from error


def measure_line(
    peer: Address,
    *,
    seconds: float = 2.0,
    max_upload_bytes_per_s: float | None = None,
    report: Callable[[str], None] = lambda name: None,
) -> Line:
    """Measure the line to a machine that serves it (`serve_line`): `seconds` in each direction."""
    require(0.1 <= seconds <= _MAX_S, f"seconds must be from 0.1 to {_MAX_S:g}, got {seconds}")

    async def measure() -> Line:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
        async with aiohttp.ClientSession(f"http://{show(peer)}", timeout=timeout) as session:
            client = _PeerClient(peer, session)
            report(f"latency to {peer[0]}")
            latency_s = await measure_latency_s(client)
            report(f"download from {peer[0]}")
            down = await measure_download(client, seconds)
            report(f"upload to {peer[0]}")
            return Line(await measure_upload(client, seconds, max_upload_bytes_per_s), down, latency_s)

    return asyncio.run(measure())


@contextlib.asynccontextmanager
async def serve_line(
    address: Address, *, max_upload_bytes_per_s: float | None = None, log: Callable[[str], None] = lambda text: None
) -> AsyncIterator[Address]:
    """Serve `/v1/line` at an address (port 0: any free one), one measurement at a time; yields the actual address."""
    require(
        max_upload_bytes_per_s is None or max_upload_bytes_per_s > 0,
        f"max_upload_bytes_per_s must be > 0, got {max_upload_bytes_per_s}",
    )
    endpoint = LineEndpoint(timeout_s=_READ_S, max_concurrent=1, max_upload_bytes_per_s=max_upload_bytes_per_s)

    @web.middleware
    async def rejecting(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = await handler(request)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        except TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        if request.query.get("seconds") != "0":
            log(f"{request.remote}: {'download' if request.method == 'GET' else 'upload'}")
        return response

    app = web.Application(middlewares=[rejecting])
    app.router.add_get(_PATH, endpoint.download)
    app.router.add_post(_PATH, endpoint.upload)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, *address).start()
        except OSError as error:
            raise LinkError(f"cannot listen at {show(address)}: {error.strerror or error}") from error
        yield runner.addresses[0][:2]
    finally:
        await runner.cleanup()
