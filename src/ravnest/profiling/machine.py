"""The profile of this machine for a planner: memory, training speed and line, measured within seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ravnest.core.host import host_name
from ravnest.core.ids import check_id
from ravnest.graph import device as devices
from ravnest.graph.device import CPU, available_devices, check_device, choose_device, device_name
from ravnest.profiling.bandwidth import Line, measure_line
from ravnest.profiling.host import device_memory, host_memory, usable_cores
from ravnest.profiling.limits import MIN_MEMORY_BYTES, MachineLimits, usable_bytes
from ravnest.profiling.speed import Workload, measure_speed

__all__ = ["MIN_MEMORY_BYTES", "MachineLimits", "MachineProfile", "measure_machine"]


@dataclass(frozen=True)
class MachineProfile:
    """Measured resources of a machine. Without a peer there is no `line`, but there may be an upload limit.

    `memory_bytes` is that of the device; `host_memory_bytes`, besides it, that of the machine (0: they are the same).
    """

    name: str
    memory_bytes: int
    threads: int
    gflops: float  # per second, forward and backward
    device: str
    measured_on: str
    line: Line | None = None
    max_upload_bytes_per_s: float | None = None
    device_name: str = ""
    host_memory_bytes: int = 0
    low_precision: str = ""  # bf16 or fp16, of an accelerator
    low_precision_gflops: float = 0.0
    other_devices: tuple[str, ...] = ()  # the accelerators that were not measured


def measure_machine(
    limits: MachineLimits | None = None,
    *,
    name: str | None = None,
    job: Workload | None = None,
    peer: tuple[str, int] | None = None,
    line_s: float = 2.0,
    device: str = "auto",
    report: Callable[[str], None] = lambda name: None,
) -> MachineProfile:
    """Measure this machine within the limits of its owner; `report` receives the name of each measurement.

    The speed and the memory are those of `device`, which also computes in a run.

    With a `job` the speed is that of its program; with a `peer` (`serve_line`) the line to it is measured too, for
    `line_s` in each direction.
    """
    limits, name = limits or MachineLimits(), check_id(name) if name else host_name()
    cores = usable_cores()
    limits.check_cores(cores)
    threads = limits.threads or max(1, int(cores))
    chosen = choose_device(device)
    check_device(chosen)
    report("memory")
    is_shared = devices.device_memory(chosen) is None
    memory_bytes = usable_bytes(device_memory(chosen), limits.memory_bytes)
    host_memory_bytes = 0 if is_shared else usable_bytes(host_memory(), None)
    line = None
    if peer is not None:  # before the speed, so that an unreachable peer is reported at once
        limit = limits.max_upload_bytes_per_s
        line = measure_line(peer, seconds=line_s, max_upload_bytes_per_s=limit, report=report)
    report("training speed")
    speed = measure_speed(job, threads=threads, device=chosen)
    return MachineProfile(
        name=name,
        memory_bytes=memory_bytes,
        threads=threads,
        gflops=speed.gflops,
        device=str(chosen),
        measured_on=speed.measured_on,
        line=line,
        max_upload_bytes_per_s=limits.max_upload_bytes_per_s,
        device_name="" if chosen.type == "cpu" else device_name(chosen),
        host_memory_bytes=host_memory_bytes,
        low_precision=speed.low_precision,
        low_precision_gflops=speed.low_precision_gflops,
        other_devices=tuple(str(each) for each in available_devices() if each not in (chosen, CPU)),
    )
