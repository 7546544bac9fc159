"""What a container allows this process: memory and processor time, from the control groups that it is in.

A group is bound by its own limits and by those of every group around it:

    room  = min over groups of  limit - used + file cache that the kernel would give back
    cores = min over groups of  quota / period

Version 1 has a hierarchy for each controller, version 2 has one for all; a machine may have both. A container often
sees only a part of a hierarchy: `mountinfo` names that part, and paths are relative to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["Allowed", "allowed"]

_NO_LIMIT = 2**60  # version 1 says "no limit" with the largest number that it has


@dataclass(frozen=True)
class Allowed:
    """The smallest memory limit, the memory that is left, and processors' worth of time; None: no limit."""

    memory_bytes: int | None = None
    room_bytes: int | None = None
    cores: float | None = None


class _Group(NamedTuple):
    version: int
    folder: Path


def allowed(root: Path = Path("/")) -> Allowed:
    """Limits of this process; `root` is where /proc and /sys are."""
    memory = [_memory(group) for group in _groups(root, "memory")]
    cores = [_cores(group) for group in _groups(root, "cpu")]
    return Allowed(
        memory_bytes=min((limit for limit, _ in filter(None, memory)), default=None),
        room_bytes=min((room for _, room in filter(None, memory)), default=None),
        cores=min(filter(None, cores), default=None),
    )


def _groups(root: Path, controller: str) -> Iterator[_Group]:
    """The groups that bound the process, innermost first."""
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
        for place in (folder, *folder.parents):
            yield _Group(1 if mount.controllers else 2, place)
            if place == top:
                break


class _Mount(NamedTuple):
    part: str  # of the hierarchy, that is seen at `point`
    point: str
    controllers: frozenset[str]  # none: version 2


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    """`36 35 0:33 /docker/ab /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory`"""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        options = frozenset(kind[2].split(",")) if kind[0] == "cgroup" else frozenset[str]()
        yield _Mount(_plain(fields[3]), _plain(fields[4]), options)


def _plain(text: str) -> str:
    """Spaces and the like are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _paths(cgroup: str) -> dict[str, str]:
    """`4:cpu,cpuacct:/a` and `0::/b` -> the path of each controller; that of version 2 has no name."""
    found: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        found.update((name, path) for name in controllers.split(","))
    return found


def _is_under(path: str, part: str) -> bool:
    return f"{path}/".startswith(f"{part.rstrip('/')}/")


def _memory(group: _Group) -> tuple[int, int] | None:
    """The limit of a group and what is left of it."""
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
    """None for `max`, -1 and what is not there."""
    return int(text) if text.strip().isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
