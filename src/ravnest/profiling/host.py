"""Memory and processor time that a process may use on this host, within its control groups.

A group is bound by its own limits and by those of all its parents:

    room  = min over groups of  limit - used + file cache that the kernel can free
    cores = min over groups of  quota / period

    usable = min(available now, room in the container) - reserve        reserve = a tenth of all, at most 1 GB

cgroup v1 has a hierarchy for each controller, v2 has one for all; a machine may have both. A container often sees only
a part of a hierarchy: `mountinfo` names that part, and paths are relative to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    import torch  # an agent measures memory without it

__all__ = ["HostLimits", "HostMemory", "device_memory", "host_limits", "host_memory", "usable_cores"]

_NO_LIMIT = 2**60  # cgroup v1 writes "no limit" as the largest number it has


@dataclass(frozen=True)
class HostLimits:
    """The smallest memory limit, the memory left within the limits, and the number of processors; None: no limit."""

    memory_bytes: int | None = None
    room_bytes: int | None = None
    cores: float | None = None


class _Group(NamedTuple):
    version: int
    folder: Path


def host_limits(root: Path = Path("/")) -> HostLimits:
    """Return the limits of this process; `root` is the directory of /proc and /sys."""
    memory = [_memory(group) for group in _groups(root, "memory")]
    cores = [_cores(group) for group in _groups(root, "cpu")]
    return HostLimits(
        memory_bytes=min((limit for limit, _ in filter(None, memory)), default=None),
        room_bytes=min((room for _, room in filter(None, memory)), default=None),
        cores=min(filter(None, cores), default=None),
    )


def _groups(root: Path, controller: str) -> Iterator[_Group]:
    """Yield the groups that limit the process, innermost first."""
    paths = _paths(_read(root / "proc/self/cgroup"))
    for mount in _mounts(_read(root / "proc/self/mountinfo")):
        if mount.controllers and controller not in mount.controllers:
            continue
        path = paths.get(controller if mount.controllers else "")
        if path is None:
            continue
        top = root / mount.point.lstrip("/")
        inside = path[len(mount.part.rstrip("/")) :] if _is_under(path, mount.part) else ""
        folder = top / inside.strip("/")
        for each in (folder, *folder.parents):
            yield _Group(1 if mount.controllers else 2, each)
            if each == top:
                break


class _Mount(NamedTuple):
    part: str  # of the hierarchy, mounted at `point`
    point: str
    controllers: frozenset[str]  # empty: cgroup v2


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    """Parse lines such as `36 35 0:33 /docker/ab /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory`."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        options = frozenset(kind[2].split(",")) if kind[0] == "cgroup" else frozenset[str]()
        yield _Mount(_unescaped(fields[3]), _unescaped(fields[4]), options)


def _unescaped(text: str) -> str:
    """Replace octal escapes, such as those of spaces in `mountinfo`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _paths(cgroup: str) -> dict[str, str]:
    """Return the path of each controller from `4:cpu,cpuacct:/a` and `0::/b`; that of cgroup v2 has no name."""
    by_controller: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        by_controller.update((name, path) for name in controllers.split(","))
    return by_controller


def _is_under(path: str, part: str) -> bool:
    return f"{path}/".startswith(f"{part.rstrip('/')}/")


def _memory(group: _Group) -> tuple[int, int] | None:
    """Return the limit of a group and the memory left within it; None: no limit."""
    names = ("memory.max", "memory.current", "inactive_file")
    if group.version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, used = (_number(_read(group.folder / name)) for name in names[:2])
    if limit is None or limit >= _NO_LIMIT:
        return None
    cache = re.search(rf"^{names[2]} (\d+)$", _read(group.folder / "memory.stat"), re.MULTILINE)
    return limit, max(0, limit - (used or 0) + (int(cache[1]) if cache else 0))


def _cores(group: _Group) -> float | None:
    if group.version == 1:
        quota, period = (_number(_read(group.folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    else:
        quota, period = map(_number, [*_read(group.folder / "cpu.max").split(), "", ""][:2])
    return quota / period if quota and period else None


def _number(text: str) -> int | None:
    """Parse a number; None for `max`, -1 and a missing file."""
    return int(text) if text.strip().isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def usable_cores() -> float:
    """Return the processors that this process may use, within its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(cores), host_limits().cores or cores)


# memory of the host

_MAX_RESERVE_BYTES = 10**9


@dataclass(frozen=True)
class HostMemory:
    """All memory, and the part that may be used."""

    total_bytes: int
    usable_bytes: int


def _with_reserve(total_bytes: int, available_bytes: int) -> HostMemory:
    reserve = min(total_bytes // 10, _MAX_RESERVE_BYTES)
    return HostMemory(total_bytes, max(0, available_bytes - reserve))


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of the machine, or of the container of this process."""
    machine, container = psutil.virtual_memory(), host_limits(root)
    total, free = machine.total, machine.available
    if container.memory_bytes is not None and container.room_bytes is not None:
        total, free = min(total, container.memory_bytes), min(free, container.room_bytes)
    return _with_reserve(total, free)


def device_memory(device: torch.device) -> HostMemory:
    """Return the memory of an accelerator, or of the machine if they share it or torch cannot report it."""
    if device.type == "cpu":
        return host_memory()
    from ravnest.graph import device as devices  # imports torch

    memory = devices.device_memory(device)
    return host_memory() if memory is None else _with_reserve(memory.total_bytes, memory.free_bytes)
