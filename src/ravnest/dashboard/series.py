"""Series of numbers over a run, bounded: a full series is thinned to half its points, each the mean of two.

A point is `(step, seconds, samples, *values)`. It covers `stride` steps: its position is that of the last of them, its
values are their means. A value that is not finite is left out of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["NodeSeries", "Point", "Series"]

Point = list[float | None]

_POSITIONS = 3  # step, seconds, samples


class Series:
    """Appended to, and thinned when it holds `limit` points; `thinned` counts how often that happened."""

    def __init__(self, limit: int = 2048, positions: int = _POSITIONS) -> None:
        assert limit >= 2, "limit must be >= 2"
        self.points: list[Point] = []
        self.stride, self.thinned = 1, 0
        self._limit, self._positions = limit, positions
        self._waiting: list[Point] = []

    def add(self, point: Sequence[float | None]) -> None:
        self._waiting.append([_finite(value) for value in point])
        if len(self._waiting) < self.stride:
            return
        self.points.append(self._merged(self._waiting))
        self._waiting = []
        if len(self.points) >= self._limit:
            pairs = [self.points[i : i + 2] for i in range(0, len(self.points), 2)]
            self.points = [self._merged(pair) for pair in pairs]
            self.stride *= 2
            self.thinned += 1

    def _merged(self, points: list[Point]) -> Point:
        if len(points) == 1:
            return points[0]
        width = min(map(len, points))
        return [
            points[-1][k] if k < self._positions else _mean([point[k] for point in points]) for k in range(width)
        ]  # fmt: skip


class NodeSeries(Series):
    """History of one node: unix seconds, and cumulative counters, of which the last one of each point is kept."""

    COLUMNS = ("seconds", "microbatches", "busy_s", "idle_s", "memory_bytes", "sent_bytes", "received_bytes")

    def __init__(self, limit: int = 240) -> None:
        super().__init__(limit, positions=len(self.COLUMNS))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
