"""The line from here to the coordinator, over the same HTTPS port as everything else.

latency = least round trip of small requests / 2, over a connection that is already there
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec

from ..core.control import NodeProfile
from ..core.errors import LinkError
from .backoff import Backoff
from .client import Client, Refused

__all__ = ["with_line"]

T = TypeVar("T")

_SECONDS = 1.0
_ROUND_TRIPS = 5
_CHUNK = bytes(32 * 1024)
_TRIES = 4
_BUSY = 503
_LEAST_BYTES_PER_S, _MOST_BYTES_PER_S = 1e3, 1e12


class _Rate(msgspec.Struct):
    bytes_per_s: float


async def with_line(profile: NodeProfile, client: Client, max_upload_bytes_per_s: float | None) -> NodeProfile:
    """The profile with the line measured; what cannot be measured now keeps its usual value."""
    latency_s = await _latency_s(client)
    down = await _patiently(lambda: _download(client), profile.down_bytes_per_s)
    up = await _patiently(lambda: _upload(client, max_upload_bytes_per_s), profile.up_bytes_per_s)
    if max_upload_bytes_per_s is not None:
        up = min(up, max_upload_bytes_per_s)
    return msgspec.structs.replace(
        profile, latency_s=min(latency_s, 60.0), down_bytes_per_s=_sane(down), up_bytes_per_s=_sane(up)
    )


async def _latency_s(client: Client) -> float:
    trips = []
    for _ in range(_ROUND_TRIPS + 1):
        began = time.perf_counter()
        await client.ask("GET", "/v1/authority")
        trips.append(time.perf_counter() - began)
    return min(trips[1:]) / 2  # the first one connects


async def _patiently(measure: Callable[[], Awaitable[float]], usual: float) -> float:
    """Again when others are measuring; `usual` when they go on."""
    backoff = Backoff(_SECONDS, 4 * _SECONDS)
    for _ in range(_TRIES):
        try:
            return await measure()
        except Refused as refused:
            if refused.status != _BUSY:
                return usual
            await asyncio.sleep(backoff.next_s())
    return usual


async def _download(client: Client) -> float:
    """From the first bytes to the last: what came before is the request's own way."""
    began = last = 0.0
    num_bytes = 0
    async with client.request("GET", "/v1/line", params={"seconds": f"{_SECONDS:g}"}) as response:
        async for chunk in response.content.iter_any():
            last = time.perf_counter()
            if began:
                num_bytes += len(chunk)
            else:
                began = last
    if not num_bytes:
        raise LinkError("the line to the coordinator carried nothing")
    return num_bytes / max(last - began, 1e-6)


async def _upload(client: Client, limit_bytes_per_s: float | None) -> float:
    async def chunks() -> AsyncIterator[bytes]:
        began = time.perf_counter()
        sent_bytes = 0
        while (passed_s := time.perf_counter() - began) < _SECONDS:
            yield _CHUNK
            sent_bytes += len(_CHUNK)
            if limit_bytes_per_s is not None:
                await asyncio.sleep(max(0.0, min(sent_bytes / limit_bytes_per_s - passed_s, _SECONDS - passed_s)))

    answer = await client.ask("POST", "/v1/line", data=chunks())
    try:
        return msgspec.json.decode(answer, type=_Rate).bytes_per_s
    except ValueError as error:
        raise LinkError(f"the coordinator's measurement cannot be read: {error}") from error


def _sane(bytes_per_s: float) -> float:
    return min(max(bytes_per_s, _LEAST_BYTES_PER_S), _MOST_BYTES_PER_S)
