"""This PC measured by a process of its own, `ravnest profile --json`: what that needs in memory is gone afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import msgspec

from ..core.control import NodeProfile
from ..core.errors import RavnestError

__all__ = ["measure_pc"]

_MEASURE_S = 120.0


class _Found(msgspec.Struct):
    """What we take from its answer."""

    memory_bytes: int
    gflops: float
    threads: int
    device: str


async def measure_pc(memory_bytes: int | None, threads: int | None) -> NodeProfile:
    """Memory and speed, within what is lent; the line is measured elsewhere."""
    command = [sys.executable, "-m", "ravnest", "profile", "--json"]
    command += [] if memory_bytes is None else ["--memory", str(memory_bytes)]
    command += [] if threads is None else ["--threads", str(threads)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,  # Ctrl-C is for the agent alone
    )
    try:
        async with asyncio.timeout(_MEASURE_S):
            answer, errors = await process.communicate()
    except TimeoutError:
        raise RavnestError(f"this PC could not be measured within {_MEASURE_S:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        words = errors.decode(errors="replace").strip().splitlines() or ["no reason was given"]
        raise RavnestError(f"this PC could not be measured: {words[-1].removeprefix('ravnest: ')}")
    try:
        found = msgspec.json.decode(answer, type=_Found)
    except ValueError as error:
        raise RavnestError(f"what was measured cannot be read: {error}") from error
    return NodeProfile(memory_bytes=found.memory_bytes, gflops=found.gflops, threads=found.threads, device=found.device)
