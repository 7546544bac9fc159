"""Compares the final loss of averaging copies of a model with synchronous training on the same number of samples.

    gap = mean over seeds of the copies' held-out loss / mean over the same seeds of the baseline's - 1

Every row has its own best learning rate, from the same grid for both sides, chosen by the first seed: that of copies
depends on their number and on how often they average. Only rows that are checked use all seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.clusters.replicas import BATCH, Text, TrainingMethod, train
from benchmarks.clusters.results_file import ResultsFile
from benchmarks.report import Report

__all__ = ["BEST_EVERY", "BEST_OUTER", "COPIES", "EVERY", "UPDATES", "Gaps", "Learning", "gap", "report_learning"]

UPDATES, QUICK_UPDATES = 1536, 64
SEEDS, FEW_SEEDS = (0, 1, 2, 3), (0,)
RATES = (4e-3, 8e-3, 12e-3, 16e-3, 24e-3, 32e-3)
FIRST_RATE = RATES.index(16e-3)
COPIES = (1, 2, 4)
EVERY = (4,)
BEST_OUTER, BEST_EVERY = "plain", 4  # recommended by these results
MAX_GAP = 0.02

Gaps = dict[int, dict[str, dict[int, float]]]  # by copies, outer step and updates between averagings


class Learning:
    """Held-out losses, each trained once."""

    def __init__(self, results: ResultsFile, *, updates: int = UPDATES, quick: bool = False) -> None:
        self._results, self._text = results, Text(1024 if quick else 4096)
        self.updates = QUICK_UPDATES if quick else updates
        self.seeds: tuple[int, ...] = FEW_SEEDS if quick else SEEDS

    def losses(self, method: TrainingMethod, seeds: Iterable[int]) -> list[float]:
        return [self._loss(method, seed) for seed in seeds]

    def _loss(self, method: TrainingMethod, seed: int) -> float:
        settings = {**asdict(method), "seed": seed, "updates": self.updates}
        name = " ".join(f"{key}={value}" for key, value in settings.items())
        return float(self._results.get(name, lambda: train(method, self._text, seed, self.updates)))

    def tuned(self, **settings: Any) -> TrainingMethod:
        """The method at its best learning rate by the first seed: a hill climb from a middle rate, first upwards."""

        def loss(index: int) -> float:
            return self._loss(TrainingMethod(lr=RATES[index], **settings), self.seeds[0])

        best = FIRST_RATE
        for step in (1, -1):
            while 0 <= best + step < len(RATES) and loss(best + step) < loss(best):
                best += step
        return TrainingMethod(lr=RATES[best], **settings)


def report_learning(
    report: Report, learning: Learning, numbers: Iterable[int], outers: Sequence[str], everys: Sequence[int]
) -> Gaps:
    """Add rows and checks; returns the gaps."""
    gaps: Gaps = {}
    single = statistics.fmean(learning.losses(learning.tuned(), learning.seeds))
    for copies in numbers:
        baseline = learning.tuned(copies=copies, synchronous=True)
        baseline_losses = learning.losses(baseline, learning.seeds)
        report.rows.append(_row(baseline, "synchronous", baseline_losses, baseline_losses))
        if copies == 1:
            method = learning.tuned()
            report.rows.append(_row(method, "one copy", learning.losses(method, learning.seeds), baseline_losses))
            continue
        for outer in outers:
            for every in everys:
                method = learning.tuned(copies=copies, every=every, outer=outer)
                is_best = (outer, every) == (BEST_OUTER, BEST_EVERY)
                losses = learning.losses(method, learning.seeds if is_best else FEW_SEEDS)
                report.rows.append(_row(method, outer, losses, baseline_losses))
                gaps.setdefault(copies, {}).setdefault(outer, {})[every] = gap(losses, baseline_losses)
                if is_best:
                    _check(report, learning, method, statistics.fmean(losses) / single, gap(losses, baseline_losses))
    return gaps


def gap(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """The relative gap of mean losses, over the seeds that both have."""
    return statistics.fmean(losses) / statistics.fmean(baseline[: len(losses)]) - 1


def _check(report: Report, learning: Learning, method: TrainingMethod, to_single: float, to_baseline: float) -> None:
    label = f"{method.outer}, every {method.every} updates"
    report.check(f"{method.copies} copies / one after the same number of updates, {label}", to_single, "< 1")
    if learning.updates > QUICK_UPDATES:  # a shorter training says nothing about it
        report.check(f"{method.copies} copies against synchronous, {label}: gap", to_baseline, f"<= {MAX_GAP}")


def _row(method: TrainingMethod, label: str, losses: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    return {
        "copies": method.copies, "method": label, "updates between": method.every or None,
        "samples between": method.every * BATCH or None, "lr": method.lr, "loss": round(statistics.fmean(losses), 4),
        "gap": f"{gap(losses, baseline):+.2%}", "seeds": len(losses),
        "from": round(min(losses), 4), "to": round(max(losses), 4),
    }  # fmt: skip
