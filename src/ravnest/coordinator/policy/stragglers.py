"""Estimates the real speed of nodes, relative to the speed that they measured when they joined. Pure.

    share_i = seconds per microbatch at the speed that node i measured / seconds that its stage took
    fleet   = median(share)                                              speed_i = share_i / fleet

The fleet factor is common to all nodes: a job may be harder or easier than the benchmark. The speed factor belongs to
one node. Either is reported only if it differs from the known value by more than a factor of two in two consecutive
periods: a PC that is busy for a moment is no reason to replan. Stages much smaller than the median measure the cost of
a message rather than the speed of their node, and are skipped.

A speed factor is limited to `_MIN_SPEED` .. `_MAX_SPEED`, and to 1 for a node that is often idle: a node with a share
of a processor, or one that overheats, looks fast while it has little to do, and a plan based on that would overload it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from statistics import median

from ravnest.core.metrics import StageMetrics, bubble

__all__ = ["FLEET", "StageTime", "StragglerDetector", "estimate_speeds"]

FLEET = ""  # the name under which the factor of the whole fleet is reported

_MIN_SPEED, _MAX_SPEED = 0.25, 1.5
_PERIOD_S = 20.0
_MIN_MICROBATCHES = 16
_TOLERANCE = log(2)  # the cost of messages can look like a factor of almost two
_SMALL_STAGE = 0.5  # of the median stage
_MAX_IDLE_SHARE = 0.2
_MIN_SHARE, _MAX_SHARE = 0.01, 100.0


@dataclass(frozen=True)
class StageTime:
    """Seconds per microbatch: expected from the measured speed, and taken by the stage."""

    expected_s: float
    taken_s: float
    idle_share: float = 0.0


@dataclass(frozen=True)
class SpeedEstimate:
    """The speed factor of a node, or of `FLEET`."""

    name: str
    speed: float


def estimate_speeds(times: Mapping[str, StageTime], known: Mapping[str, float]) -> list[SpeedEstimate]:
    """Speed factors that differ by more than a factor of two from the `known` ones of `FLEET` and of these nodes."""
    if not times:
        return []
    min_s = _SMALL_STAGE * median(time.expected_s for time in times.values())
    significant = {name: time for name, time in times.items() if time.taken_s > 0 and time.expected_s >= min_s}
    shares = {
        name: min(max(time.expected_s / time.taken_s, _MIN_SHARE), _MAX_SHARE) for name, time in significant.items()
    }
    if len(shares) < 2:
        return []
    fleet = median(shares.values())
    speeds = {FLEET: fleet} | {name: share / fleet for name, share in shares.items()}
    off = {name: speed for name, speed in speeds.items() if abs(log(speed / known[name])) > _TOLERANCE}
    estimates = [
        SpeedEstimate(name, speed if name == FLEET else _bounded(speed, times[name])) for name, speed in off.items()
    ]
    return [one for one in estimates if one.speed != known[one.name]]


def _bounded(speed: float, time: StageTime) -> float:
    return min(max(speed, _MIN_SPEED), _MAX_SPEED if time.idle_share <= _MAX_IDLE_SHARE else 1.0)


class StragglerDetector:
    """Collects stage metrics of all clusters, and estimates speeds at the end of each period."""

    def __init__(self) -> None:
        self._start: dict[str, tuple[float, StageMetrics]] = {}
        self._latest: dict[str, tuple[StageMetrics, float]] = {}
        self._off_before: set[tuple[str, bool]] = set()  # nodes off in the last period, and whether slower

    def add_report(self, name: str, metrics: StageMetrics, expected_s: float, now_s: float) -> None:
        start = self._start.get(name)
        if start is None or start[1].microbatches > metrics.microbatches:  # the node runs another stage now
            self._start[name] = now_s, metrics
        self._latest[name] = metrics, expected_s

    def poll(self, known: Mapping[str, float], now_s: float) -> list[SpeedEstimate]:
        """Estimates that were off in this period and the one before; empty before the end of a period."""
        for gone in self._start.keys() - known.keys():
            self._start.pop(gone)
            self._latest.pop(gone, None)
        times: dict[str, StageTime] = {}
        for name, (start_s, before) in self._start.items():
            after, expected_s = self._latest[name]
            count = after.microbatches - before.microbatches
            if now_s < start_s + _PERIOD_S or count < _MIN_MICROBATCHES:
                return []  # a period ends when the slowest node has enough microbatches
            busy_s = (after.busy_s - after.step_s) - (before.busy_s - before.step_s)
            times[name] = StageTime(expected_s, busy_s / count, bubble(before, after))
        if not times:
            return []
        self._start = {name: (now_s, self._latest[name][0]) for name in self._start}
        off = {(one.name, one.speed < known[one.name]): one for one in estimate_speeds(times, known)}
        again = {key: one for key, one in off.items() if key in self._off_before}
        self._off_before = off.keys() - again.keys()
        return list(again.values())
