"""Removes what testbeds left behind whose owner and forwarder were both killed: control groups and their processes.

A testbed is left over if the process that its name refers to is gone. Nothing else is touched.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from testbed.groups import PREFIX, CgroupRoot, ControlGroups, roots, start_ticks

__all__ = ["clean"]

_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-(\d+)-\d+")


def clean() -> list[str]:
    """Kill and remove what is left of testbeds without an owner; returns one sentence for each."""
    folders: dict[str, dict[str, CgroupRoot]] = {}
    for controller, root in roots().items():
        for folder in _testbeds_below(_mount_point(root.folder)):
            folders.setdefault(folder.name, {})[controller] = CgroupRoot(root.version, folder.parent)
    return [_remove(ControlGroups(name, where)) for name, where in sorted(folders.items()) if not _has_owner(name)]


def _mount_point(folder: Path) -> Path:
    """The top of a hierarchy: other owners may have made their testbeds below other groups."""
    while not folder.is_mount():
        folder = folder.parent
    return folder


def _testbeds_below(top: Path) -> list[Path]:
    return [Path(parent, name) for parent, names, _ in os.walk(top) for name in names if _NAME.fullmatch(name)]


def _has_owner(name: str) -> bool:
    match = _NAME.fullmatch(name)
    assert match is not None
    return start_ticks(int(match[1])) == int(match[2])


def _remove(groups: ControlGroups) -> str:
    num_processes = len({pid for host in groups.hosts() for pid in groups.processes(host)})
    stuck = groups.remove()
    if stuck:
        return f"{groups.testbed}: processes {', '.join(map(str, stuck))} cannot be killed"
    return f"{groups.testbed}: killed {num_processes} processes and removed its control groups"
