"""Control groups of a testbed: for each host a CPU quota, a memory limit and the list of its processes.

Version 1 has a hierarchy for each controller, and our groups go below the group of this process; version 2 has one
hierarchy, and they go below its top, because a group with processes may not delegate controllers. A machine may have
both.

The group of a testbed is named after its owner, `ravnest-testbed-<pid>-<start time of that process>-<number>`, so that
`cleanup` can see whether the owner is still alive.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from testbed.topology import HostSpec

__all__ = ["PREFIX", "ControlGroups", "CgroupRoot", "Usage", "roots", "start_ticks"]

PREFIX = "ravnest-testbed-"
_PERIOD_US = 20_000  # short, so that half a core is slow rather than stuttering
_CONTROLLERS = ("cpu", "cpuacct", "memory")


@dataclass(frozen=True)
class Usage:
    """Resources that a host has used: CPU seconds, memory, and bytes on the wire."""

    cpu_s: float
    memory_bytes: int
    peak_memory_bytes: int
    sent_bytes: int = 0
    received_bytes: int = 0
    lost_bytes: int = 0


class CgroupRoot(NamedTuple):
    """The folder in which groups of one controller are created, and the version of its hierarchy."""

    version: int
    folder: Path


def roots() -> dict[str, CgroupRoot]:
    """The root of each controller. Version 2 counts CPU time in `cpu`, version 1 in `cpuacct`."""
    found: dict[str, CgroupRoot] = {}
    own_paths = _paths_of_this_process()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup":
            for controller in set(options.split(",")) & set(_CONTROLLERS):
                folder = Path(point) / own_paths.get(controller, "/").lstrip("/")
                found[controller] = CgroupRoot(1, folder if folder.is_dir() else Path(point))  # in a container: its top
        elif kind == "cgroup2":
            for controller in (Path(point) / "cgroup.controllers").read_text().split():
                found.setdefault(controller, CgroupRoot(2, Path(point)))
    if "cpu" in found and found["cpu"].version == 2:
        found.setdefault("cpuacct", found["cpu"])
    return {controller: found[controller] for controller in _CONTROLLERS if controller in found}


def _paths_of_this_process() -> dict[str, str]:
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update((controller, path) for controller in controllers.split(","))
    return paths


def start_ticks(pid: int) -> int | None:
    """The start time of a process in kernel ticks, which with its pid identifies it for good; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


class ControlGroups:
    """The control groups of one testbed."""

    def __init__(self, testbed: str, root_folders: dict[str, CgroupRoot] | None = None) -> None:
        self.testbed = testbed
        self._roots = roots() if root_folders is None else root_folders

    @classmethod
    def name_for(cls, number: int) -> str:
        """The name of a testbed of this process."""
        return f"{PREFIX}{os.getpid()}-{start_ticks(os.getpid())}-{number}"

    def create(self, spec: HostSpec) -> None:
        """Create the group of a host, if there is none yet, and set its limits."""
        for root in self._roots.values():
            if root.version == 2:
                (root.folder / self.testbed).mkdir(exist_ok=True)
                for folder in (root.folder, root.folder / self.testbed):
                    (folder / "cgroup.subtree_control").write_text("+cpu +memory")
        for folder in self._folders(spec.name):
            folder.mkdir(parents=True, exist_ok=True)
        if spec.cpu is not None:
            quota = str(int(spec.cpu * _PERIOD_US))
            self._write(spec.name, "cpu", [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", quota)],
                        [("cpu.max", f"{quota} {_PERIOD_US}")])  # fmt: skip
        if spec.memory_bytes is not None:
            limit = str(spec.memory_bytes)
            self._write(spec.name, "memory", [("memory.limit_in_bytes", limit)], [("memory.max", limit)])
            with suppress(OSError):  # a kernel without swap has no limit for it
                self._write(spec.name, "memory", [("memory.memsw.limit_in_bytes", limit)], [("memory.swap.max", "0")])

    def _write(self, host: str, controller: str, v1: list[tuple[str, str]], v2: list[tuple[str, str]]) -> None:
        root = self._roots[controller]
        for file, value in v1 if root.version == 1 else v2:
            (root.folder / self.testbed / host / file).write_text(value)

    def _folders(self, host: str) -> list[Path]:
        return sorted({root.folder / self.testbed / host for root in self._roots.values()})

    def procs_files(self, host: str) -> list[str]:
        """The `cgroup.procs` files to which a process writes 0 to join the host's groups."""
        return [str(folder / "cgroup.procs") for folder in self._folders(host)]

    def usage(self, host: str) -> Usage:
        """CPU and memory of all processes that the host has had; traffic is left at 0."""

        def read(controller: str, *names: str) -> int:
            root = self._roots[controller]
            file, _, key = names[root.version - 1].partition(" ")
            text = (root.folder / self.testbed / host / file).read_text()
            return int(dict(line.split() for line in text.splitlines())[key] if key else text)

        ticks_per_s = 1e9 if self._roots["cpuacct"].version == 1 else 1e6
        return Usage(
            cpu_s=read("cpuacct", "cpuacct.usage", "cpu.stat usage_usec") / ticks_per_s,
            memory_bytes=read("memory", "memory.usage_in_bytes", "memory.current"),
            peak_memory_bytes=read("memory", "memory.max_usage_in_bytes", "memory.peak"),
        )

    def hosts(self) -> list[str]:
        """The hosts that have groups; a group may be partly created or partly removed."""
        folders = {root.folder / self.testbed for root in self._roots.values()}
        return sorted({child.name for top in folders if top.is_dir() for child in top.iterdir() if child.is_dir()})

    def processes(self, host: str) -> set[int]:
        pids: set[int] = set()
        for file in self.procs_files(host):
            with suppress(OSError):
                pids |= set(map(int, Path(file).read_text().split()))
        return pids

    def send_signal(self, host: str, number: int) -> None:
        """Signal every process of a host."""
        for pid in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def remove(self, deadline_s: float = 10.0) -> list[int]:
        """Kill all processes in the groups and remove the groups. Returns the pids that could not be killed."""
        end_s = time.monotonic() + deadline_s
        while alive := {host: pids for host in self.hosts() if (pids := self.processes(host))}:
            if time.monotonic() > end_s:
                return sorted(set().union(*alive.values()))
            for host in alive:
                self.send_signal(host, signal.SIGKILL)
            time.sleep(0.002)  # the kernel has no event for the exit of another process's child
        for host in self.hosts():
            for folder in self._folders(host):
                _remove(folder, end_s)
        for folder in {root.folder / self.testbed for root in self._roots.values()}:
            _remove(folder, end_s)
        return []


def _remove(folder: Path, end_s: float) -> None:
    """Retry until `end_s`: a group that has just become empty may stay busy for a moment."""
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.002)
        else:
            return
