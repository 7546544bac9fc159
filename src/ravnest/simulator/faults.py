"""Fault traces: machines leave, come back and slow down at given times, or at times drawn from a seed.

`Machine.reliability` r is the chance that a machine is still present in an hour. With exponentially distributed
uptimes, the mean uptime is

    3600 s / -ln(r)

and after it the machine is away for a time drawn from an exponential distribution with a mean of `repair_s`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from math import inf, log
from typing import Literal

from ravnest.core.config import config, require
from ravnest.planner.fleet import Fleet, Machine

__all__ = ["Fault", "FaultTrace", "draw_faults"]

_HOUR_S = 3600.0


@config
class Fault:
    """At `time_s` a machine leaves, joins, or takes `factor` times as long as planned (1: as planned)."""

    time_s: float
    kind: Literal["leave", "join", "slow"]
    machine: str
    factor: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.time_s < inf, f"time_s must be >= 0, got {self.time_s}")
        require(self.kind in ("leave", "join", "slow"), f"kind must be leave, join or slow, got {self.kind!r}")
        require(bool(self.machine), "machine must not be empty")
        require(0 < self.factor < inf, f"factor must be > 0, got {self.factor}")
        require(self.kind == "slow" or self.factor == 1, f"only kind slow has a factor, got {self.kind}")


@config
class FaultTrace:
    """Faults in order of time."""

    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        require(all(a.time_s <= b.time_s for a, b in pairwise(self.faults)), "faults must be in order of time")

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __len__(self) -> int:
        return len(self.faults)


def draw_faults(fleet: Fleet, duration_s: float, *, seed: int = 0, repair_s: float = 900.0) -> FaultTrace:
    """Draw when each machine leaves and comes back, by its reliability.

    The times of a machine depend only on the seed and its name, not on the other machines.
    """
    require(0 <= duration_s < inf, f"duration_s must be >= 0, got {duration_s}")
    require(repair_s > 0, f"repair_s must be > 0, got {repair_s}")
    drawn = [fault for machine in fleet.machines for fault in _faults_of(machine, duration_s, seed, repair_s)]
    return FaultTrace(faults=tuple(sorted(drawn, key=lambda fault: (fault.time_s, fault.machine))))


def _faults_of(machine: Machine, duration_s: float, seed: int, repair_s: float) -> Iterator[Fault]:
    if machine.reliability == 1:
        return
    rng = random.Random(f"{seed}/{machine.name}")
    leaves_per_s = -log(machine.reliability) / _HOUR_S
    time_s = rng.expovariate(leaves_per_s)
    while time_s < duration_s:
        yield Fault(time_s=time_s, kind="leave", machine=machine.name)
        time_s += rng.expovariate(1 / repair_s)
        if time_s < duration_s:
            yield Fault(time_s=time_s, kind="join", machine=machine.name)
        time_s += rng.expovariate(leaves_per_s)
