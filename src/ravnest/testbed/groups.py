"""Control groups of a bed: for each host a share of the processor, a limit of memory, and the list of its processes.

Version 1 has a hierarchy for each controller and ours go below the group that we are in ourselves; version 2 has one
hierarchy and ours go below its top, as a group with processes may not hand out controllers. A machine may have both.

A bed's group is named for its owner, `ravnest-bed-<pid>-<when that process started>-<number>`, so that anybody can
see whether the owner is still there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .topology import HostSpec

__all__ = ["PREFIX", "Groups", "Root", "Usage", "roots", "started_at"]

PREFIX = "ravnest-bed-"
_PERIOD_US = 20_000  # short, so that half a processor feels slow rather than stuttering
_CONTROLLERS = ("cpu", "cpuacct", "memory")


@dataclass(frozen=True)
class Usage:
    """What a host has used: processor seconds and memory, and bytes on the wire."""

    cpu_s: float
    memory_bytes: int
    peak_memory_bytes: int
    sent_bytes: int = 0
    received_bytes: int = 0
    lost_bytes: int = 0


class Root(NamedTuple):
    """Where groups of one controller are made."""

    version: int
    folder: Path


def roots() -> dict[str, Root]:
    """Per controller. Version 2 counts processor time in `cpu`, version 1 in `cpuacct`."""
    found: dict[str, Root] = {}
    mine = _paths_of_this_process()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup":
            for controller in set(options.split(",")) & set(_CONTROLLERS):
                folder = Path(point) / mine.get(controller, "/").lstrip("/")
                found[controller] = Root(1, folder if folder.is_dir() else Path(point))  # in a container: its top
        elif kind == "cgroup2":
            for controller in (Path(point) / "cgroup.controllers").read_text().split():
                found.setdefault(controller, Root(2, Path(point)))
    if "cpu" in found and found["cpu"].version == 2:
        found.setdefault("cpuacct", found["cpu"])
    return {controller: found[controller] for controller in _CONTROLLERS if controller in found}


def _paths_of_this_process() -> dict[str, str]:
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update((controller, path) for controller in controllers.split(","))
    return paths


def started_at(pid: int) -> int | None:
    """When a process started, in the kernel's ticks: with its number, a name that no other process ever has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


class Groups:
    """The control groups of one bed."""

    def __init__(self, bed: str, where: dict[str, Root] | None = None) -> None:
        self.bed = bed
        self._roots = roots() if where is None else where

    @classmethod
    def name_for(cls, number: int) -> str:
        """The name of a bed of this process."""
        return f"{PREFIX}{os.getpid()}-{started_at(os.getpid())}-{number}"

    def make(self, spec: HostSpec) -> None:
        """Make the group of a host and set its limits."""
        for root in self._roots.values():
            if root.version == 2:
                (root.folder / self.bed).mkdir(exist_ok=True)
                for folder in (root.folder, root.folder / self.bed):
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
            (root.folder / self.bed / host / file).write_text(value)

    def _folders(self, host: str) -> list[Path]:
        return sorted({root.folder / self.bed / host for root in self._roots.values()})

    def joining(self, host: str) -> list[str]:
        """The files to which a process writes 0 to become one of the host's."""
        return [str(folder / "cgroup.procs") for folder in self._folders(host)]

    def usage(self, host: str) -> Usage:
        """Of all processes that the host has and had."""

        def read(controller: str, *names: str) -> int:
            root = self._roots[controller]
            file, _, key = names[root.version - 1].partition(" ")
            text = (root.folder / self.bed / host / file).read_text()
            return int(dict(line.split() for line in text.splitlines())[key] if key else text)

        ticks_per_s = 1e9 if self._roots["cpuacct"].version == 1 else 1e6
        return Usage(
            cpu_s=read("cpuacct", "cpuacct.usage", "cpu.stat usage_usec") / ticks_per_s,
            memory_bytes=read("memory", "memory.usage_in_bytes", "memory.current"),
            peak_memory_bytes=read("memory", "memory.max_usage_in_bytes", "memory.peak"),
        )

    def hosts(self) -> list[str]:
        """The hosts that have groups; a group may be half made or half removed."""
        beds = {root.folder / self.bed for root in self._roots.values()}
        return sorted({child.name for bed in beds if bed.is_dir() for child in bed.iterdir() if child.is_dir()})

    def processes(self, host: str) -> set[int]:
        return set(self._processes(host))

    def _processes(self, host: str) -> Iterator[int]:
        for folder in self._folders(host):
            with suppress(OSError):
                yield from map(int, (folder / "cgroup.procs").read_text().split())

    def send_signal(self, host: str, number: int) -> None:
        """Signal every process of a host."""
        for pid in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def remove(self, deadline_s: float = 10.0) -> list[int]:
        """Kill what runs in the groups and remove them. Returns the processes that would not die, if any."""
        end_s = time.monotonic() + deadline_s
        while alive := {host: pids for host in self.hosts() if (pids := self.processes(host))}:
            if time.monotonic() > end_s:
                return sorted(set().union(*alive.values()))
            for host in alive:
                self.send_signal(host, signal.SIGKILL)
            time.sleep(0.002)  # the kernel has no event for the death of somebody else's child
        for host in self.hosts():
            for folder in self._folders(host):
                _remove(folder, end_s)
        for bed in {root.folder / self.bed for root in self._roots.values()}:
            _remove(bed, end_s)
        return []


def _remove(folder: Path, end_s: float) -> None:
    """A group that has just become empty may stay busy for a moment."""
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
