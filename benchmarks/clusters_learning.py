"""Copies of a model that average, against synchronous training on as many samples: the loss they end with.

    gap = mean over seeds of the copies' held-out loss / mean over the same seeds of the rival's - 1

Every row has the best learning rate of its own, from the same few for both sides, chosen by the first seed: that of
copies depends on how many there are and how often they average. Only what is checked is worth all seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.clusters_copies import BATCH, Text, Way, learn
from benchmarks.clusters_kept import Kept
from benchmarks.report import Report

__all__ = ["BEST_EVERY", "BEST_OUTER", "COPIES", "EVERY", "UPDATES", "Gaps", "Learning", "gap", "report_learning"]

UPDATES, QUICK_UPDATES = 1536, 64
SEEDS, FEW_SEEDS = (0, 1, 2, 3), (0,)
RATES = (4e-3, 8e-3, 12e-3, 16e-3, 24e-3, 32e-3)
FIRST_RATE = RATES.index(16e-3)
COPIES = (1, 2, 4)
EVERY = (4,)
BEST_OUTER, BEST_EVERY = "plain", 4  # what these figures recommend
MOST_GAP = 0.02

Gaps = dict[int, dict[str, dict[int, float]]]  # by copies, outer step and updates between averagings


class Learning:
    """Held-out losses, each trained once."""

    def __init__(self, kept: Kept, *, updates: int = UPDATES, quick: bool = False) -> None:
        self._kept, self._text = kept, Text(1024 if quick else 4096)
        self.updates = QUICK_UPDATES if quick else updates
        self.seeds: tuple[int, ...] = FEW_SEEDS if quick else SEEDS

    def losses(self, way: Way, seeds: Iterable[int]) -> list[float]:
        return [self._loss(way, seed) for seed in seeds]

    def _loss(self, way: Way, seed: int) -> float:
        settings = {**asdict(way), "seed": seed, "updates": self.updates}
        name = " ".join(f"{key}={value}" for key, value in settings.items())
        return float(self._kept.get(name, lambda: learn(way, self._text, seed, self.updates)))

    def tuned(self, **how: Any) -> Way:
        """By the first seed, at its best rate: from a middle one up as long as that helps, or else down."""

        def loss(place: int) -> float:
            return self._loss(Way(lr=RATES[place], **how), self.seeds[0])

        best = FIRST_RATE
        for step in (1, -1):
            while 0 <= best + step < len(RATES) and loss(best + step) < loss(best):
                best += step
        return Way(lr=RATES[best], **how)


def report_learning(
    report: Report, learning: Learning, numbers: Iterable[int], outers: Sequence[str], everys: Sequence[int]
) -> Gaps:
    """Rows and checks."""
    gaps: Gaps = {}
    alone = statistics.fmean(learning.losses(learning.tuned(), learning.seeds))
    for copies in numbers:
        rival = learning.tuned(copies=copies, synchronous=True)
        against = learning.losses(rival, learning.seeds)
        report.rows.append(_row(rival, "synchronous", against, against))
        if copies == 1:
            way = learning.tuned()
            report.rows.append(_row(way, "alone", learning.losses(way, learning.seeds), against))
            continue
        for outer in outers:
            for every in everys:
                way = learning.tuned(copies=copies, every=every, outer=outer)
                is_best = (outer, every) == (BEST_OUTER, BEST_EVERY)
                losses = learning.losses(way, learning.seeds if is_best else FEW_SEEDS)
                report.rows.append(_row(way, outer, losses, against))
                gaps.setdefault(copies, {}).setdefault(outer, {})[every] = gap(losses, against)
                if is_best:
                    _check(report, learning, way, statistics.fmean(losses) / alone, gap(losses, against))
    return gaps


def gap(losses: Sequence[float], against: Sequence[float]) -> float:
    """By the seeds that both have."""
    return statistics.fmean(losses) / statistics.fmean(against[: len(losses)]) - 1


def _check(report: Report, learning: Learning, way: Way, to_one: float, to_rival: float) -> None:
    how = f"{way.outer}, every {way.every} updates"
    report.check(f"{way.copies} copies / one after as many updates, {how}", to_one, "< 1")
    if learning.updates > QUICK_UPDATES:  # so short a training says nothing of it
        report.check(f"{way.copies} copies against synchronous, {how}: gap", to_rival, f"<= {MOST_GAP}")


def _row(way: Way, how: str, losses: Sequence[float], against: Sequence[float]) -> dict[str, Any]:
    return {
        "copies": way.copies, "how": how, "updates between": way.every or None,
        "samples between": way.every * BATCH or None, "lr": way.lr, "loss": round(statistics.fmean(losses), 4),
        "gap": f"{gap(losses, against):+.2%}", "seeds": len(losses),
        "from": round(min(losses), 4), "to": round(max(losses), 4),
    }  # fmt: skip
