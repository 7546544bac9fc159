"""Limits that the owner of a machine sets, and what they leave of it. Without torch, for agents."""

from __future__ import annotations

from ravnest.core.config import config, require
from ravnest.core.units import format_bytes
from ravnest.errors import RavnestError
from ravnest.profiling.host import HostMemory

__all__ = ["MIN_MEMORY_BYTES", "MachineLimits", "usable_bytes"]

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

    def check_cores(self, cores: float) -> None:
        require((self.threads or 1) <= max(1.0, cores), f"threads must be <= {cores:g}, got {self.threads}")


def usable_bytes(memory: HostMemory, limit_bytes: int | None) -> int:
    """Return the memory to offer; raises if the limit is more than the machine has, or if too little is free."""
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
