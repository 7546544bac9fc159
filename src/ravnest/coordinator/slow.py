"""Whose stage shows that it is slower, or faster, than the plan took it to be: a pure judgement.

    share_i = planned seconds of a microbatch / measured seconds          speed_i <- speed_i * share_i / median(share)

All shares are taken relative to the median, for what slows everybody changes no plan. A node is spoken of only if it
is off by more than half, in two periods after one another: a PC that is busy for a moment is no reason to move. A stage
that is small next to others shows what a message costs, not how fast its node is, and is passed over.

However it looks, a node is taken to be at most `FASTEST` and at least `SLOWEST` times as fast as it measured itself:
with a share of a processor it looks fast while it has little to do, and a plan that believed it would overload it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log
from statistics import median

from ..core.metrics import StageMetrics

__all__ = ["FASTEST", "SLOWEST", "Pace", "Slowness", "Watch", "judge"]

SLOWEST, FASTEST = 0.25, 1.5

_PERIOD_S = 20.0
_LEAST_MICROBATCHES = 16
_OFF = log(1.5)
_SMALL = 0.5  # of the median stage
_LEAST, _MOST = 0.02, 50.0


@dataclass(frozen=True)
class Pace:
    """A node's seconds for a microbatch, as planned and as measured."""

    planned_s: float
    measured_s: float


@dataclass(frozen=True)
class Slowness:
    """A node's speed is this share of what was planned with."""

    name: str
    share: float


def judge(paces: Mapping[str, Pace]) -> list[Slowness]:
    """Who is off by more than half, relative to all."""
    if not paces:
        return []
    least_s = _SMALL * median(pace.planned_s for pace in paces.values())
    telling = {name: pace for name, pace in paces.items() if pace.measured_s > 0 and pace.planned_s >= least_s}
    shares = {name: pace.planned_s / pace.measured_s for name, pace in telling.items()}
    if len(shares) < 2:
        return []
    middle = median(shares.values())
    relative = {name: min(max(share / middle, _LEAST), _MOST) for name, share in shares.items()}
    return [Slowness(name, share) for name, share in relative.items() if abs(log(share)) > _OFF]


class Watch:
    """Of all clusters: tell it what stages report; ask it at the end of a period."""

    def __init__(self) -> None:
        self._began: dict[str, tuple[float, StageMetrics]] = {}
        self._latest: dict[str, tuple[float, StageMetrics, float]] = {}
        self._before: set[tuple[str, bool]] = set()  # who was off in the last period, and which way

    def heard(self, name: str, metrics: StageMetrics, planned_s: float, now_s: float) -> None:
        began = self._began.get(name)
        if began is None or began[1].microbatches > metrics.microbatches:  # it is another part now
            self._began[name] = now_s, metrics
        self._latest[name] = now_s, metrics, planned_s

    def look(self, here: Iterable[str], now_s: float) -> list[Slowness]:
        """Who was off in this period and in the one before, when a period is over."""
        present = set(here)
        for gone in self._began.keys() - present:
            self._began.pop(gone)
            self._latest.pop(gone, None)
        paces: dict[str, Pace] = {}
        for name, (began_s, before) in self._began.items():
            _, after, planned_s = self._latest[name]
            count = after.microbatches - before.microbatches
            if now_s < began_s + _PERIOD_S or count < _LEAST_MICROBATCHES:
                return []  # everybody's period ends with the slowest's
            busy_s = (after.busy_s - after.step_s) - (before.busy_s - before.step_s)
            paces[name] = Pace(planned_s, busy_s / count)
        if not paces:
            return []
        self._began = {name: (now_s, self._latest[name][1]) for name in self._began}
        off = {(found.name, found.share < 1): found for found in judge(paces)}
        again = [found for key, found in off.items() if key in self._before]
        self._before = set(off) - {(found.name, found.share < 1) for found in again}
        return again
