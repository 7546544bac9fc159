"""How much memory this machine can spare: what is free, less a reserve for everything else that its owner does.

usable = min(available now, room in the container) - reserve        reserve = a tenth of all, at most 1 GB
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from .cgroup import allowed

__all__ = ["Memory", "device_memory", "host_memory", "spare"]

_MAX_RESERVE_BYTES = 10**9


@dataclass(frozen=True)
class Memory:
    """All that there is, and what may be used of it."""

    total_bytes: int
    usable_bytes: int


def spare(total_bytes: int, available_bytes: int) -> Memory:
    reserve = min(total_bytes // 10, _MAX_RESERVE_BYTES)
    return Memory(total_bytes, max(0, available_bytes - reserve))


def host_memory(root: Path = Path("/")) -> Memory:
    """Of the machine, or of the container that we are in."""
    machine, container = psutil.virtual_memory(), allowed(root)
    total, free = machine.total, machine.available
    if container.memory_bytes is not None and container.room_bytes is not None:
        total, free = min(total, container.memory_bytes), min(free, container.room_bytes)
    return spare(total, free)


def device_memory(device: torch.device) -> Memory:
    """Of an accelerator; the machine's where the two share it or torch cannot tell."""
    if device.type == "cpu":
        return host_memory()
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return host_memory()
    return spare(total, free)
