"""The profile of this machine for a planner: memory, training speed and line, measured within seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ravnest.core.host import host_name
from ravnest.core.ids import check_id
from ravnest.profiling.bandwidth import Line, measure_line
from ravnest.profiling.host import device_memory, usable_cores
from ravnest.profiling.limits import MIN_MEMORY_BYTES, MachineLimits, usable_bytes
from ravnest.profiling.speed import Workload, measure_speed

__all__ = ["MIN_MEMORY_BYTES", "MachineLimits", "MachineProfile", "measure_machine"]


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
    limits.check_cores(cores)
    threads = limits.threads or max(1, int(cores))
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    report("memory")
    memory_bytes = usable_bytes(device_memory(device), limits.memory_bytes)
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
