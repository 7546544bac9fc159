"""Carries a fault plan out on a testbed: each fault begins when its moment has come, and ends when its time is over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..core.config import format_bytes, require
from .faultplan import PlannedFault, Progress

__all__ = ["Bed", "Injector"]

_BALLAST = ".ballast"
_MOST_DISK_BYTES = 1 << 30
_LOOK_S = 0.02


class Bed(Protocol):
    """What of a testbed is needed here."""

    def kill(self, what: str, /) -> None: ...

    def stop(self, what: str, /) -> None: ...

    def cont(self, what: str, /) -> None: ...

    def cut(self, a: str, b: str | None = None) -> None: ...

    def restore(self, a: str, b: str | None = None) -> None: ...

    def corrupt(self, host: str) -> None: ...


class Injector:
    """`look` often. `disks` are folders on small disks of their own, by host: those may be filled."""

    def __init__(
        self,
        bed: Bed,
        plan: Sequence[PlannedFault],
        watch: Callable[[], Progress],
        *,
        disks: Mapping[str, Path] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bed, self._watch, self._disks, self._clock = bed, watch, disks or {}, clock
        self._plan = list(plan)
        self._ending: list[tuple[float, PlannedFault]] = []
        self.begun: list[tuple[float, PlannedFault]] = []  # with when, by the clock
        for fault in plan:
            if fault.act == "fill":
                self._check_disk(fault.hosts[0])

    @property
    def is_over(self) -> bool:
        """All has happened, and what was to end has ended."""
        return not self._plan and not self._ending

    def look(self) -> None:
        now_s, progress = self._clock(), self._watch()
        for end in [end for end in self._ending if end[0] <= now_s]:
            self._ending.remove(end)
            self._end(end[1])
        for fault in [fault for fault in self._plan if fault.when.is_now(progress, fault.hosts[0])]:
            self._plan.remove(fault)
            self._begin(fault)
            self.begun.append((now_s, fault))
            if fault.for_s is not None:
                self._ending.append((now_s + fault.for_s, fault))

    def run(self, is_over: Callable[[], bool], within_s: float) -> bool:
        """Look again and again until it is over; whether it was in time."""
        end_s = self._clock() + within_s
        while not is_over():
            if self._clock() > end_s:
                return False
            self.look()
            time.sleep(_LOOK_S)
        return True

    def _begin(self, fault: PlannedFault) -> None:
        match fault.act:
            case "kill":
                self._bed.kill(fault.hosts[0])
            case "stop":
                self._bed.stop(fault.hosts[0])
            case "cut":
                self._bed.cut(*fault.hosts)
            case "corrupt":
                self._bed.corrupt(fault.hosts[0])
            case "fill":
                _fill(self._disks[fault.hosts[0]] / _BALLAST)

    def _end(self, fault: PlannedFault) -> None:
        match fault.act:
            case "stop":
                self._bed.cont(fault.hosts[0])
            case "cut":
                self._bed.restore(*fault.hosts)
            case "fill":
                (self._disks[fault.hosts[0]] / _BALLAST).unlink(missing_ok=True)

    def _check_disk(self, host: str) -> None:
        """A disk that others use too is never filled."""
        require(host in self._disks, f"{host} has no small disk of its own that could be filled")
        found = os.statvfs(self._disks[host])
        num_bytes = found.f_frsize * found.f_blocks
        require(
            num_bytes <= _MOST_DISK_BYTES,
            f"the disk of {host} has {format_bytes(num_bytes)}: only up to {format_bytes(_MOST_DISK_BYTES)} are filled",
        )


def _fill(path: Path) -> None:
    """Until nothing more can be written."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    with suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(b"\0"):
            pass
