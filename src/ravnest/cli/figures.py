"""Figures of a run for a terminal: a small picture of the loss, the present speed and the time left. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["LossCurve", "Pace", "clock_time", "sparkline"]

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_MAX_POINTS = 512
_WINDOW_S = 30.0
_MAX_MARKS = 256


def sparkline(values: Sequence[float], width: int, *, is_ascii: bool = False) -> str:
    """Return a line of at most `width` characters whose heights are means of neighbouring values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    bounds = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    bars = _ASCII_BARS if is_ascii else _BARS
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


class LossCurve:
    """The losses of a run, as at most some hundred means of as many neighbouring steps each."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._stride, self._sum, self._count = 1, 0.0, 0

    def add(self, loss: float) -> None:
        if not math.isfinite(loss):
            return
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count == self._stride:
            self._means.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._means) == _MAX_POINTS:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._stride *= 2

    def draw(self, width: int, *, is_ascii: bool = False) -> str:
        return sparkline(self._means, width, is_ascii=is_ascii)


class Pace:
    """Speed over the last half a minute of training."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque()  # time, steps, samples

    def clear(self) -> None:
        """Forget the past: training pauses."""
        self._marks.clear()

    def add(self, now_s: float, steps: int, samples: int) -> None:
        if len(self._marks) > 1 and now_s - self._marks[-2][0] < _WINDOW_S / _MAX_MARKS:
            self._marks.pop()  # often enough
        self._marks.append((now_s, steps, samples))
        while len(self._marks) > 2 and now_s - self._marks[1][0] > _WINDOW_S:
            self._marks.popleft()

    def per_s(self, now_s: float) -> tuple[float, float] | None:
        """Return steps and samples per second; None if there are too few steps to tell."""
        if len(self._marks) < 2:
            return None
        (began_s, steps, samples), (_, steps_now, samples_now) = self._marks[0], self._marks[-1]
        passed_s = max(now_s - began_s, 1e-9)
        return (steps_now - steps) / passed_s, (samples_now - samples) / passed_s

    def left_s(self, now_s: float, steps_left: int) -> float | None:
        """Return the seconds that the steps left take at this speed; None if it is unknown."""
        speed = self.per_s(now_s)
        return steps_left / speed[0] if speed is not None and speed[0] > 0 else None


def clock_time(seconds: float) -> str:
    """62 -> `"1:02"`, 3723 -> `"1:02:03"`, 200000 -> `"2 d 7 h"`."""
    total = round(seconds)
    if total >= 2 * 86400:
        return f"{total // 86400} d {total % 86400 // 3600} h"
    hours, minutes = total // 3600, total % 3600 // 60
    return f"{hours}:{minutes:02}:{total % 60:02}" if hours else f"{minutes}:{total % 60:02}"
