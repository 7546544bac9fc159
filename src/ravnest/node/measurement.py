"""Measures the speed of this PC and its line to the coordinator. The agent itself never imports torch.

Speed is measured by `ravnest profile --json` in a subprocess, by one agent of this PC at a time. It is remembered for a
week, or for ten minutes if other programs were busy, next to the directories of the nodes and for all agents of this
user on this PC, together with the conditions of the measurement: processor, cores, release of torch. For other threads
it is scaled by their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import platform
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from ravnest.core.host import lock_file
from ravnest.errors import RavnestError, RequestRejected
from ravnest.node.client import Client
from ravnest.profiling.bandwidth import measure_download, measure_latency_s, measure_upload
from ravnest.profiling.host import usable_cores
from ravnest.protocol.control import NodeProfile

__all__ = ["MeasuredSpeed", "SpeedCache", "measure_device", "measure_speed_once", "with_line"]

_LINE_S = 1.0  # in each direction
_MAX_LATENCY_S = 60.0
_MIN_BYTES_PER_S, _MAX_BYTES_PER_S = 1e3, 1e12
_PROFILE_S = 120.0
_VALID_S, _VALID_BUSY_S = 7 * 86400.0, 600.0
_MAX_LOAD = 0.5  # of each core by other programs, for a measurement that is remembered for long
_POLL_S = 0.1
_CPU = "cpu"


async def with_line(profile: NodeProfile, client: Client, max_upload_bytes_per_s: float | None) -> NodeProfile:
    """Return the profile with the line to the coordinator; a rate that cannot be measured now keeps its value."""
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


# speed


class MeasuredSpeed(msgspec.Struct, frozen=True):
    """Speed of `threads` threads, alone on this PC. `memory_bytes` is that of an accelerator, at the measurement.

    Without `host_memory_bytes` the accelerator shares the memory of the PC.
    """

    gflops: float
    threads: int
    device: str = _CPU
    memory_bytes: int = 0
    device_name: str = ""
    host_memory_bytes: int = 0
    other_devices: tuple[str, ...] = ()


class _Remembered(msgspec.Struct, frozen=True):
    conditions: str
    at_s: float
    valid_s: float
    speed: MeasuredSpeed


def measuring_conditions() -> str:
    """Describe what the speed of this PC depends on."""
    return f"{_processor()}; {usable_cores():g} cores; torch {importlib.metadata.version('torch')}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


class SpeedCache:
    """The measured speed in a file, and in a second one if there is one, valid for the given conditions."""

    def __init__(
        self, path: Path, conditions: str, now_s: Callable[[], float] = time.time, *, shared: Path | None = None
    ) -> None:
        self._paths = (path,) if shared is None else (path, shared)
        self._conditions, self._now_s = conditions, now_s

    def get(self, threads: int) -> MeasuredSpeed | None:
        """Return the speed of `threads` threads; None if it is unknown, outdated, or that of an accelerator."""
        return next((speed for path in self._paths if (speed := self._read(path, threads)) is not None), None)

    def _read(self, path: Path, threads: int) -> MeasuredSpeed | None:
        try:
            known = msgspec.json.decode(path.read_bytes(), type=_Remembered)
        except (OSError, ValueError):
            return None
        age_s, speed = self._now_s() - known.at_s, known.speed
        if known.conditions != self._conditions or not 0 <= age_s < min(known.valid_s, _VALID_S):
            return None
        if speed.device != _CPU or not (0 < speed.gflops < 1e8 and 0 < speed.threads < 4096):
            return None
        return MeasuredSpeed(speed.gflops * threads / speed.threads, threads)

    def put(self, speed: MeasuredSpeed, *, is_busy: bool = False) -> None:
        """Remember a speed; that of a PC that was busy with other programs only for a while."""
        valid_s = _VALID_BUSY_S if is_busy else _VALID_S
        data = msgspec.json.encode(_Remembered(self._conditions, self._now_s(), valid_s, speed))
        for path in self._paths:
            draft = path.with_name(f".{path.name}-{os.getpid()}")
            with contextlib.suppress(OSError):  # the next agent measures again
                draft.write_bytes(data)
                draft.replace(path)


async def measure_speed_once(
    cache: SpeedCache,
    directory: Path,
    threads: Callable[[], int],
    memory_bytes: int | None,
    log: Callable[[str], None],
    device: str = "auto",
) -> MeasuredSpeed:
    """Return the speed of this PC with its share of `threads`: remembered, or measured by one agent at a time."""
    if (known := cache.get(threads())) is not None:
        return known
    async with _alone(directory / "measuring", lambda: log("waits until another agent has measured this PC")):
        if (known := cache.get(threads())) is not None:
            return known
        log("measuring this PC")
        is_busy = _load() > _MAX_LOAD * usable_cores()
        measured = await measure_device(device, threads(), memory_bytes)
        cache.put(measured, is_busy=is_busy)
        return measured


def _load() -> float:
    """Return the processes that run on average, in the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


@contextlib.asynccontextmanager
async def _alone(path: Path, on_wait: Callable[[], None]) -> AsyncIterator[None]:
    """Hold the lock of a file, after those that hold it now."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_waiting = False
    with path.open("ab") as file:
        while True:
            try:
                lock_file(file.fileno())
                break
            except OSError:
                if not is_waiting:
                    on_wait()
                is_waiting = True
                await asyncio.sleep(_POLL_S)
        yield


async def measure_device(device: str, threads: int, memory_bytes: int | None = None) -> MeasuredSpeed:
    """Measure a device in another process, which leaves nothing of it in this one."""
    command = [sys.executable, "-P", "-m", "ravnest", "profile", "--json", "--threads", str(threads)]
    command += ["--device", device]
    command += [] if memory_bytes is None else ["--memory", str(memory_bytes)]
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
        return msgspec.json.decode(output, type=MeasuredSpeed)
    except ValueError as error:
        raise RavnestError(f"could not decode the output of `ravnest profile --json`: {error}") from error
