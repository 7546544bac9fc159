"""This machine as a planner wants to know it: memory, training speed, line; all of it measured, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.config import config, format_bytes, require
from ..core.errors import RavnestError
from ..core.here import host_name
from ..core.ids import check_id
from .line import Line, measure_line
from .memory import Memory, device_memory
from .mix import Workload
from .speed import measure_speed, usable_cores

__all__ = ["LEAST_BYTES", "Offer", "Profile", "measure_machine"]

LEAST_BYTES = 400_000_000  # a process that has imported torch takes most of it
_LEAST_BYTES_PER_S = 1000.0


@config
class Offer:
    """What the owner lends; None: all that can be spared."""

    memory_bytes: int | None = None
    threads: int | None = None
    max_upload_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        require(
            self.memory_bytes is None or self.memory_bytes >= LEAST_BYTES,
            f"{format_bytes(self.memory_bytes or 0)} of memory is too little to lend: torch alone needs most of "
            f"{format_bytes(LEAST_BYTES)}",
        )
        require(self.threads is None or self.threads >= 1, f"at least 1 thread is lent, not {self.threads}")
        require(
            self.max_upload_bytes_per_s is None or self.max_upload_bytes_per_s >= _LEAST_BYTES_PER_S,
            f"an upload of {self.max_upload_bytes_per_s} bytes/s is of no use: allow at least 8 kbit/s",
        )


@dataclass(frozen=True)
class Profile:
    """What a machine has to give. Without a peer there is no `line`, but there may be an upload limit."""

    name: str
    memory_bytes: int
    threads: int
    gflops: float  # per second, forward and backward
    device: str
    measured_on: str
    line: Line | None = None
    max_upload_bytes_per_s: float | None = None


def measure_machine(
    offer: Offer | None = None,
    *,
    name: str | None = None,
    job: Workload | None = None,
    peer: tuple[str, int] | None = None,
    line_s: float = 2.0,
    report: Callable[[str], None] = lambda what: None,
) -> Profile:
    """Measure this machine within what its owner offers; `report` hears what is being measured.

    With a `job` the speed is of its program; with a `peer` that answers (`Answerer`) the line to it is measured too,
    for `line_s` in each direction.
    """
    offer, name = offer or Offer(), check_id(name) if name else host_name()
    cores = usable_cores()
    require((offer.threads or 1) <= max(1.0, cores), f"{offer.threads} threads, but {cores:g} cores may be used here")
    threads = offer.threads or max(1, int(cores))
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    report("memory")
    memory_bytes = _lent(device_memory(device), offer.memory_bytes)
    line = None
    if peer is not None:  # first, because a peer that is not there is told at once
        limit = offer.max_upload_bytes_per_s
        line = measure_line(peer, seconds=line_s, max_upload_bytes_per_s=limit, report=report)
    report("training speed")
    speed = measure_speed(job, threads=threads, device=device)
    return Profile(
        name=name,
        memory_bytes=memory_bytes,
        threads=threads,
        gflops=speed.gflops,
        device=device.type,
        measured_on=speed.measured_on,
        line=line,
        max_upload_bytes_per_s=offer.max_upload_bytes_per_s,
    )


def _lent(memory: Memory, wanted_bytes: int | None) -> int:
    """As much as the owner allows and there is."""
    there = format_bytes(memory.total_bytes)
    require(
        wanted_bytes is None or wanted_bytes <= memory.total_bytes,
        f"{format_bytes(wanted_bytes or 0)} of memory is more than the {there} that there is",
    )
    if memory.usable_bytes < LEAST_BYTES:
        raise RavnestError(
            f"only {format_bytes(memory.usable_bytes)} of {there} memory can be spared now, "
            f"{format_bytes(LEAST_BYTES)} are the least: close something"
        )
    return min(memory.usable_bytes, wanted_bytes or memory.usable_bytes)
