"""What beds left behind whose owner and forwarder were both killed: control groups and the processes in them.

A bed is left over if the process that its name tells of is gone. Nothing else is touched.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .groups import PREFIX, Groups, Root, roots, started_at

__all__ = ["clean"]

_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-(\d+)-\d+")


def clean() -> list[str]:
    """Kill and remove what is left of beds without an owner; one sentence for each bed."""
    found: dict[str, dict[str, Root]] = {}
    for controller, root in roots().items():
        for folder in _beds_below(_top(root.folder)):
            found.setdefault(folder.name, {})[controller] = Root(root.version, folder.parent)
    return [_clear(Groups(bed, where)) for bed, where in sorted(found.items()) if not _has_owner(bed)]


def _top(folder: Path) -> Path:
    """The mount point of a hierarchy: the beds of others may be below groups of their own."""
    while not folder.is_mount():
        folder = folder.parent
    return folder


def _beds_below(top: Path) -> list[Path]:
    found = []
    for place, folders, _ in os.walk(top):
        found += [Path(place, folder) for folder in folders if _NAME.fullmatch(folder)]
    return found


def _has_owner(bed: str) -> bool:
    match = _NAME.fullmatch(bed)
    assert match is not None
    return started_at(int(match[1])) == int(match[2])


def _clear(groups: Groups) -> str:
    num_processes = len({pid for host in groups.hosts() for pid in groups.processes(host)})
    stuck = groups.remove()
    if stuck:
        return f"{groups.bed}: processes {', '.join(map(str, stuck))} cannot be killed"
    return f"{groups.bed}: ended {num_processes} processes and removed its control groups"
