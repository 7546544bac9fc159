"""How fast nodes show themselves to be, against what they measured when they came: a pure judgement.

    share_i = seconds of a microbatch at the speed that node i measured / seconds that its stage took
    pace    = median(share)                                              speed_i = share_i / pace

The pace is everybody's: a job may be harder or easier on them than what they measured themselves with. A speed is a
node's own. Either is spoken of only if it is off from what is known by more than a factor of two, in two periods after
one another: a PC that is busy for a moment is no reason to move. A stage that is small next to others shows what a
message costs, not how fast its node is, and is passed over.

However it looks, a node is taken to be at least `_SLOWEST` and at most `_FASTEST` times as fast as the others make
expect; and not faster than those at all, unless it hardly ever waits. One that has but a share of a processor, or gets
hot, looks fast while it has little to do, and a plan that believed it would overload it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from statistics import median

from ..core.metrics import StageMetrics, bubble

__all__ = ["FLEET", "Shown", "StageTime", "Watch", "judge"]

FLEET = ""  # whose speed is the pace

_SLOWEST, _FASTEST = 0.25, 1.5
_PERIOD_S = 20.0
_LEAST_MICROBATCHES = 16
_OFF = log(2)  # what messages cost may well look like half as much
_SMALL = 0.5  # of the median stage
_HARDLY_WAITS = 0.2  # of the time
_LEAST, _MOST = 0.01, 100.0


@dataclass(frozen=True)
class StageTime:
    """Seconds for a microbatch: at the speed that the node measured, and as its stage took them."""

    expected_s: float
    taken_s: float
    waited: float = 0.0  # of the time


@dataclass(frozen=True)
class Shown:
    """The speed of a node, or of `FLEET`."""

    name: str
    speed: float


def judge(times: Mapping[str, StageTime], known: Mapping[str, float]) -> list[Shown]:
    """Whose speed is off by more than a factor of two from what is `known` of `FLEET` and of all these nodes."""
    if not times:
        return []
    least_s = _SMALL * median(time.expected_s for time in times.values())
    telling = {name: time for name, time in times.items() if time.taken_s > 0 and time.expected_s >= least_s}
    shares = {name: min(max(time.expected_s / time.taken_s, _LEAST), _MOST) for name, time in telling.items()}
    if len(shares) < 2:
        return []
    pace = median(shares.values())
    speeds = {FLEET: pace} | {name: share / pace for name, share in shares.items()}
    off = {name: speed for name, speed in speeds.items() if abs(log(speed / known[name])) > _OFF}
    shown = [Shown(name, speed if name == FLEET else _bounded(speed, times[name])) for name, speed in off.items()]
    return [one for one in shown if one.speed != known[one.name]]


def _bounded(speed: float, time: StageTime) -> float:
    return min(max(speed, _SLOWEST), _FASTEST if time.waited <= _HARDLY_WAITS else 1.0)


class Watch:
    """Of all clusters: tell it what stages report; ask it at the end of a period."""

    def __init__(self) -> None:
        self._began: dict[str, tuple[float, StageMetrics]] = {}
        self._latest: dict[str, tuple[StageMetrics, float]] = {}
        self._before: set[tuple[str, bool]] = set()  # who was off in the last period, and which way

    def heard(self, name: str, metrics: StageMetrics, expected_s: float, now_s: float) -> None:
        began = self._began.get(name)
        if began is None or began[1].microbatches > metrics.microbatches:  # it is another part now
            self._began[name] = now_s, metrics
        self._latest[name] = metrics, expected_s

    def look(self, known: Mapping[str, float], now_s: float) -> list[Shown]:
        """Who was off in this period and in the one before, when a period is over; `known` as for `judge`."""
        for gone in self._began.keys() - known.keys():
            self._began.pop(gone)
            self._latest.pop(gone, None)
        times: dict[str, StageTime] = {}
        for name, (began_s, before) in self._began.items():
            after, expected_s = self._latest[name]
            count = after.microbatches - before.microbatches
            if now_s < began_s + _PERIOD_S or count < _LEAST_MICROBATCHES:
                return []  # everybody's period ends with the slowest's
            busy_s = (after.busy_s - after.step_s) - (before.busy_s - before.step_s)
            times[name] = StageTime(expected_s, busy_s / count, bubble(before, after))
        if not times:
            return []
        self._began = {name: (now_s, self._latest[name][0]) for name in self._began}
        off = {(found.name, found.speed < known[found.name]): found for found in judge(times, known)}
        again = {key: found for key, found in off.items() if key in self._before}
        self._before = off.keys() - again.keys()
        return list(again.values())
