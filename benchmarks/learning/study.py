"""Measures rows of experiments: each at the best learning rate of its own, with seeds that all rows share.

The rate is found with a seed that is used for nothing else, in the same way and with as many trainings for every row:
three rates a factor of two apart, further ones while the lowest loss is at an end, up to `TRIALS`; then the vertex of
the parabola through the best and its neighbours, in the logarithm of the rate.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import msgspec
import torch

from benchmarks.learning.copies import train
from benchmarks.learning.experiment import Experiment, key_of
from benchmarks.learning.record import Record, Result
from ravnest.core.config import config

__all__ = ["Measured", "Row", "Study", "best_rate", "measure_rows"]

TUNING_SEED = 100
TRIALS = 6
FIRST_RATES = {"AdamW": 8e-3, "NAdam 0.99": 2e-3, "Muon": 16e-3, "SOAP": 8e-3, "LAMB": 16e-3, "SGD": 0.1}


@config
class Row:
    """One row of a table. With a learning rate of 0 it is measured at its own best."""

    name: str
    experiment: Experiment
    first_rate: float = 0.0


@dataclass(frozen=True)
class Measured:
    """A row with its learning rate, and its results by seed."""

    row: Row
    lr: float
    results: dict[int, Result]

    @property
    def losses(self) -> list[float]:
        return [result.loss for _, result in sorted(self.results.items())]

    def number(self, name: str) -> list[float]:
        return [result.numbers[name] for _, result in sorted(self.results.items())]


class Study:
    """Trains what is not in the record. Without `trains`, what is missing there stays missing."""

    def __init__(self, record: Record, *, trains: bool = True) -> None:
        self._record, self._trains = record, trains

    def result(self, experiment: Experiment, seed: int) -> Result | None:
        self._record.refresh()
        known = self._record.find(experiment, seed)
        if known is None and self._trains:
            start_s = time.process_time()
            known = train(experiment, seed)
            self._record.add(experiment, seed, known, time.process_time() - start_s)
            sys.stderr.write(f"{key_of(experiment)} seed {seed}: {known.loss:.4f}\n")
        return known

    def measure(self, row: Row, seeds: Iterable[int]) -> Measured | None:
        """None if nothing of the row is known."""
        lr = row.experiment.lr or self._tuned(row)
        if lr is None:
            return None
        experiment = msgspec.structs.replace(row.experiment, lr=lr)
        found = {seed: self.result(experiment, seed) for seed in seeds}
        results = {seed: result for seed, result in found.items() if result is not None}
        return Measured(row, lr, results) if results else None

    def _tuned(self, row: Row) -> float | None:
        def loss(lr: float) -> float | None:
            result = self.result(msgspec.structs.replace(row.experiment, lr=lr), TUNING_SEED)
            return None if result is None else (result.loss if math.isfinite(result.loss) else math.inf)

        first = row.first_rate or FIRST_RATES[row.experiment.optimizer]
        losses: dict[float, float] = {}
        rates = [first / 2, first, first * 2]
        while rates:
            lr = _rounded(rates.pop(0))
            known = loss(lr)
            if known is None:
                return None
            losses[lr] = known
            if not rates and len(losses) < TRIALS:
                best = min(losses, key=lambda rate: losses[rate])
                rates = [best * 2] if best == max(losses) else [best / 2] if best == min(losses) else []
        return best_rate(losses)


def best_rate(losses: dict[float, float]) -> float:
    """The vertex of the parabola through the lowest of these losses by rate and its neighbours, if it has both."""
    rates = sorted(losses)
    index = min(range(len(rates)), key=lambda i: losses[rates[i]])
    around = [losses[rate] for rate in rates[max(0, index - 1) : index + 2]]
    if index == 0 or len(around) < 3 or not all(map(math.isfinite, around)):
        return rates[index]
    left, middle, right = around
    bend = left - 2 * middle + right
    shift = 0.5 * (left - right) / bend if bend > 0 else 0.0
    return _rounded(rates[index] * 2.0**shift)


def _rounded(rate: float) -> float:
    """Two significant digits."""
    return float(f"{rate:.1e}")


def measure_rows(
    rows: Sequence[Row], seeds: Sequence[int], path: Path | None, *, processes: int, trains: bool = True
) -> dict[str, Measured]:
    """Measure rows in processes with one thread each; they share the record at `path`."""
    tasks = [(row, tuple(seeds), path, trains) for row in rows]
    if processes <= 1 or path is None or not trains:
        study = Study(Record(path), trains=trains)
        found = [study.measure(row, row_seeds) for row, row_seeds, _, _ in tasks]
    else:
        with ProcessPoolExecutor(processes, get_context("spawn"), _one_thread) as pool:
            found = list(pool.map(_measure, tasks))
    return {measured.row.name: measured for measured in found if measured is not None}


def _one_thread() -> None:
    torch.set_num_threads(1)


def _measure(task: tuple[Row, tuple[int, ...], Path, bool]) -> Measured | None:
    row, seeds, path, trains = task
    return Study(Record(path), trains=trains).measure(row, seeds)
