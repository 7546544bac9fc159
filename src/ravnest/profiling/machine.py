"""The profile of this machine for a planner: memory, training speed and line, measured within seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ravnest.core.config import config, require
from ravnest.core.host import host_name
from ravnest.core.ids import check_id
from ravnest.core.units import format_bytes
from ravnest.errors import RavnestError
from ravnest.profiling.bandwidth import Line, measure_line
from ravnest.profiling.host import HostMemory, device_memory
from ravnest.profiling.speed import Workload, measure_speed, usable_cores

__all__ = ["MIN_MEMORY_BYTES", "MachineLimits", "MachineProfile", "measure_machine"]

MIN_MEMORY_BYTES = 400_000_000  # a process that has imported torch takes most of it
_MIN_UPLOAD_BYTES_PER_S = 1000.0


@config
class MachineLimits:
    """Limits that the owner sets; None: all that is free."""

    memory_bytes: int | None = None
    threads: int | None = None
    max_upload_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        require(
            self.memory_bytes is None or self.memory_bytes >= MIN_MEMORY_BYTES,
            f"memory must be >= {format_bytes(MIN_MEMORY_BYTES)}, got {format_bytes(self.memory_bytes or 0)}: "
            "torch alone needs most of it",
        )
        require(self.threads is None or self.threads >= 1, f"threads must be >= 1, got {self.threads}")
        require(
            self.max_upload_bytes_per_s is None or self.max_upload_bytes_per_s >= _MIN_UPLOAD_BYTES_PER_S,
            f"the upload limit must be >= 8 kbit/s, got {self.max_upload_bytes_per_s} bytes/s",
        )


@dataclass(frozen=True)
class MachineProfile:
    """Measured resources of a machine. Without a peer there is no `line`, but there may be an upload limit."""

    name: str
    memory_bytes: int
    threads: int
    gflops: float  # per second, forward and backward
    device: str
    measured_on: str
    line: Line | None = None
    max_upload_bytes_per_s: float | None = None


def measure_machine(
    limits: MachineLimits | None = None,
    *,
    name: str | None = None,
    job: Workload | None = None,
    peer: tuple[str, int] | None = None,
    line_s: float = 2.0,
    report: Callable[[str], None] = lambda name: None,
) -> MachineProfile:
    """Measure this machine within the limits of its owner; `report` receives the name of each measurement.

    With a `job` the speed is that of its program; with a `peer` (`serve_line`) the line to it is measured too, for
    `line_s` in each direction.
    """
    limits, name = limits or MachineLimits(), check_id(name) if name else host_name()
    cores = usable_cores()
    require((limits.threads or 1) <= max(1.0, cores), f"threads must be <= {cores:g}, got {limits.threads}")
    threads = limits.threads or max(1, int(cores))
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    report("memory")
    memory_bytes = _usable_bytes(device_memory(device), limits.memory_bytes)
    line = None
    if peer is not None:  # before the speed, so that an unreachable peer is reported at once
        limit = limits.max_upload_bytes_per_s
        line = measure_line(peer, seconds=line_s, max_upload_bytes_per_s=limit, report=report)
    report("training speed")
    speed = measure_speed(job, threads=threads, device=device)
    return MachineProfile(
        name=name,
        memory_bytes=memory_bytes,
        threads=threads,
        gflops=speed.gflops,
        device=device.type,
        measured_on=speed.measured_on,
        line=line,
        max_upload_bytes_per_s=limits.max_upload_bytes_per_s,
    )


def _usable_bytes(memory: HostMemory, limit_bytes: int | None) -> int:
    total = format_bytes(memory.total_bytes)
    require(
        limit_bytes is None or limit_bytes <= memory.total_bytes,
        f"memory must be <= {total}, all of this machine, got {format_bytes(limit_bytes or 0)}",
    )
    if memory.usable_bytes < MIN_MEMORY_BYTES:
        raise RavnestError(
            f"{format_bytes(memory.usable_bytes)} of {total} memory is free, at least "
            f"{format_bytes(MIN_MEMORY_BYTES)} is needed: close other programs"
        )
    return min(memory.usable_bytes, limit_bytes or memory.usable_bytes)
