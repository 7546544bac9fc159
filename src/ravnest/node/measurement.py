"""Measurement of this PC: memory and speed in a process of its own, bandwidth and latency to the coordinator.

`ravnest profile --json` runs as a subprocess, so that the memory that torch takes is free again afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable

import msgspec

from ravnest.errors import RavnestError, RequestRejected
from ravnest.node.client import Client
from ravnest.profiling.bandwidth import measure_download, measure_latency_s, measure_upload
from ravnest.protocol.control import NodeProfile

__all__ = ["measure_pc", "with_line"]

_LINE_S = 1.0  # in each direction
_MAX_LATENCY_S = 60.0
_MIN_BYTES_PER_S, _MAX_BYTES_PER_S = 1e3, 1e12
_PROFILE_S = 120.0


async def with_line(profile: NodeProfile, client: Client, max_upload_bytes_per_s: float | None) -> NodeProfile:
    """The profile with the line to the coordinator; a rate that cannot be measured now keeps its value."""
    latency_s = await measure_latency_s(client)
    down = await _or_default(measure_download(client, _LINE_S), profile.down_bytes_per_s)
    up = await _or_default(measure_upload(client, _LINE_S, max_upload_bytes_per_s), profile.up_bytes_per_s)
    if max_upload_bytes_per_s is not None:
        up = min(up, max_upload_bytes_per_s)
    return msgspec.structs.replace(
        profile, latency_s=min(latency_s, _MAX_LATENCY_S), down_bytes_per_s=_clamped(down), up_bytes_per_s=_clamped(up)
    )


async def _or_default(measurement: Awaitable[float], default: float) -> float:
    try:
        return await measurement
    except RequestRejected:
        return default


def _clamped(bytes_per_s: float) -> float:
    return min(max(bytes_per_s, _MIN_BYTES_PER_S), _MAX_BYTES_PER_S)


class _Profile(msgspec.Struct):
    """The fields of `ravnest profile --json` that a node reports."""

    memory_bytes: int
    gflops: float
    threads: int
    device: str


async def measure_pc(memory_bytes: int | None, threads: int | None) -> NodeProfile:
    """Measure memory and speed within these limits, without the line."""
    command = [sys.executable, "-m", "ravnest", "profile", "--json"]
    command += [] if memory_bytes is None else ["--memory", str(memory_bytes)]
    command += [] if threads is None else ["--threads", str(threads)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,  # so that Ctrl-C reaches the agent only
    )
    try:
        async with asyncio.timeout(_PROFILE_S):
            output, errors = await process.communicate()
    except TimeoutError:
        raise RavnestError(f"this PC could not be measured within {_PROFILE_S:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no reason was given"]
        raise RavnestError(f"this PC could not be measured: {lines[-1].removeprefix('ravnest: ')}")
    try:
        measured = msgspec.json.decode(output, type=_Profile)
    except ValueError as error:
        raise RavnestError(f"the output of `ravnest profile --json` cannot be read: {error}") from error
    return NodeProfile(**msgspec.structs.asdict(measured))
