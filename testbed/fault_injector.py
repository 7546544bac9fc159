"""Carries out a fault plan on a testbed: starts each fault at its trigger and ends it after its duration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ravnest.core.config import require
from ravnest.core.units import format_bytes
from testbed.fault_plan import PlannedFault, Progress

__all__ = ["FaultInjector", "FaultTarget"]

_FILL_FILE = ".fill"
_MAX_DISK_BYTES = 1 << 30
_POLL_S = 0.02


class FaultTarget(Protocol):
    """The methods of `Testbed` that inject and undo faults."""

    def kill(self, target: str, /) -> None: ...

    def stop(self, target: str, /) -> None: ...

    def resume(self, target: str, /) -> None: ...

    def cut(self, a: str, b: str | None = None) -> None: ...

    def restore(self, a: str, b: str | None = None) -> None: ...

    def corrupt(self, host: str) -> None: ...


class FaultInjector:
    """Call `poll` often. `disks` are folders on small disks of their own, by host, which may be filled."""

    def __init__(
        self,
        target: FaultTarget,
        plan: Sequence[PlannedFault],
        read_progress: Callable[[], Progress],
        *,
        disks: Mapping[str, Path] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target, self._read_progress, self._disks, self._clock = target, read_progress, disks or {}, clock
        self._waiting = list(plan)
        self._active: list[tuple[float, PlannedFault]] = []  # with the time of their end
        self.started: list[tuple[float, PlannedFault]] = []  # with the time of their start
        for fault in plan:
            if fault.action == "fill":
                self._check_disk(fault.hosts[0])

    @property
    def is_done(self) -> bool:
        """Whether all faults have started and those with a duration have ended."""
        return not self._waiting and not self._active

    def poll(self) -> None:
        """Start and end the faults that are due."""
        now_s, progress = self._clock(), self._read_progress()
        for active in [active for active in self._active if active[0] <= now_s]:
            self._active.remove(active)
            self._end(active[1])
        for fault in [fault for fault in self._waiting if fault.trigger.is_reached(progress, fault.hosts[0])]:
            self._waiting.remove(fault)
            self._start(fault)
            self.started.append((now_s, fault))
            if fault.duration_s is not None:
                self._active.append((now_s + fault.duration_s, fault))

    def run(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Poll until `predicate` holds; False if it did not within `timeout_s`."""
        end_s = self._clock() + timeout_s
        while not predicate():
            if self._clock() > end_s:
                return False
            self.poll()
            time.sleep(_POLL_S)
        return True

    def _start(self, fault: PlannedFault) -> None:
        match fault.action:
            case "kill":
                self._target.kill(fault.hosts[0])
            case "stop":
                self._target.stop(fault.hosts[0])
            case "cut":
                self._target.cut(*fault.hosts)
            case "corrupt":
                self._target.corrupt(fault.hosts[0])
            case "fill":
                _fill(self._disks[fault.hosts[0]] / _FILL_FILE)

    def _end(self, fault: PlannedFault) -> None:
        match fault.action:
            case "stop":
                self._target.resume(fault.hosts[0])
            case "cut":
                self._target.restore(*fault.hosts)
            case "fill":
                (self._disks[fault.hosts[0]] / _FILL_FILE).unlink(missing_ok=True)

    def _check_disk(self, host: str) -> None:
        """Reject a fault that would fill a disk which others use too."""
        require(host in self._disks, f"{host} has no small disk of its own to fill")
        disk = os.statvfs(self._disks[host])
        num_bytes = disk.f_frsize * disk.f_blocks
        require(
            num_bytes <= _MAX_DISK_BYTES,
            f"a disk to fill has at most {format_bytes(_MAX_DISK_BYTES)}, got {format_bytes(num_bytes)} on {host}",
        )


def _fill(path: Path) -> None:
    """Write until the disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    with suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(b"\0"):
            pass
