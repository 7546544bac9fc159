"""Means of paired differences with confidence intervals, and slopes on logarithmic axes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Estimate", "paired_gap", "slope"]

# 97.5 % quantiles of Student's t by degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
      2.110, 2.101, 2.093, 2.086)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean, and half the width of its 95 % confidence interval: infinite for one value."""

    mean: float
    half_width: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        count = len(values)
        if count < 2:
            return Estimate(statistics.fmean(values), math.inf, count)
        t = _T[min(count - 2, len(_T) - 1)]
        return Estimate(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(count), count)

    @property
    def percent(self) -> str:
        """`+0.31 ± 0.12 %`, without the interval for one value."""
        interval = f" ± {100 * self.half_width:.2f}" if math.isfinite(self.half_width) else ""
        return f"{100 * self.mean:+.2f}{interval} %"


def paired_gap(losses: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """The relative difference from a baseline with the same seeds: the mean over seeds of loss / baseline - 1."""
    return Estimate.of([loss / base - 1 for loss, base in zip(losses, baseline, strict=True)])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of the least-squares fit y = a x^p."""
    logs_x, logs_y = [math.log(v) for v in x], [math.log(v) for v in y]
    return statistics.linear_regression(logs_x, logs_y).slope
