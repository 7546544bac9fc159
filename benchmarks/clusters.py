"""Do clusters that average learn well? By samples against synchronous training, by the clock against one cluster.

By samples: copies of a small GPT in one process (`clusters_copies`), held-out loss after as many updates, mean of the
seeds, against one copy trained synchronously with batches as many times larger. Learning rates are chosen for both
sides from the same few, at 16 updates between averagings. By the clock: `clusters_clock`, on the testbed.

`--keep FOLDER` keeps every figure there, and what is there already is not measured again: parts can be measured one at
a time (`--only learning`, `--only clock --clusters 2`), and a last call makes the report and the picture of all.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import clusters_clock, clusters_job
from benchmarks.clusters_copies import BATCH, Text, Way, learn
from benchmarks.clusters_plot import draw
from benchmarks.report import Report, arguments
from ravnest.testbed import missing

UPDATES, QUICK_UPDATES = 384, 64
SEEDS, QUICK_SEEDS = (0, 1), (0,)
RATES = (4e-3, 8e-3, 16e-3, 32e-3)
COPIES = (1, 2, 4)
EVERY = (1, 4, 16, 64)
TUNED_AT = 16
OUTERS = ("plain", "nesterov")
CLUSTERS = (1, 2, 4)
SECONDS = 45.0
BEST_OUTER, BEST_EVERY = "plain", 4  # what these figures recommend


class Kept:
    """Figures by name, in one file; without a folder they are only remembered."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / "figures.json" if folder is not None else None
        self._found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            self._found = json.loads(self._path.read_text())

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        if name not in self._found:
            self._found[name] = measure()
            sys.stderr.write(f"{name}: {str(self._found[name])[:80]}\n")
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps(self._found, indent=0) + "\n")
        return self._found[name]


class Learning:
    """Held-out losses, each trained once."""

    def __init__(self, kept: Kept, *, quick: bool) -> None:
        self._kept, self._text = kept, Text(1024 if quick else 4096)
        self.updates = QUICK_UPDATES if quick else UPDATES
        self.seeds: tuple[int, ...] = QUICK_SEEDS if quick else SEEDS

    def losses(self, way: Way, seeds: Iterable[int]) -> list[float]:
        return [self._loss(way, seed) for seed in seeds]

    def _loss(self, way: Way, seed: int) -> float:
        settings = {**asdict(way), "seed": seed, "updates": self.updates}
        name = " ".join(f"{key}={value}" for key, value in settings.items())
        return float(self._kept.get(name, lambda: learn(way, self._text, seed, self.updates)))

    def best_rate(self, copies: int, **how: Any) -> float:
        """By the first seed: from the middle one up as long as that helps, or else down."""

        def loss(place: int) -> float:
            return self.losses(Way(copies=copies, lr=RATES[place], **how), self.seeds[:1])[0]

        best = len(RATES) // 2
        for step in (1, -1):
            while 0 <= best + step < len(RATES) and loss(best + step) < loss(best):
                best += step
        return RATES[best]


def report_learning(
    report: Report, learning: Learning, numbers: Iterable[int], outers: Iterable[str], *, quick: bool
) -> dict[int, dict[str, dict[int, float]]]:
    """Rows and checks; the gaps by copies, outer step and updates between averagings."""
    gaps: dict[int, dict[str, dict[int, float]]] = {}
    alone = statistics.fmean(learning.losses(Way(lr=learning.best_rate(1)), learning.seeds))
    for copies in numbers:
        lr = learning.best_rate(copies, synchronous=True)
        losses = learning.losses(Way(copies=copies, lr=lr, synchronous=True), learning.seeds)
        against = statistics.fmean(losses)
        report.rows.append(_row(copies, "synchronous", None, lr, losses, against))
        if copies == 1:
            lr = learning.best_rate(1)
            report.rows.append(_row(1, "alone", None, lr, learning.losses(Way(lr=lr), learning.seeds), against))
            continue
        for outer in outers:
            lr = learning.best_rate(copies, every=TUNED_AT, outer=outer)
            for every in (BEST_EVERY,) if quick else EVERY:
                way = Way(copies=copies, lr=lr, every=every, outer=outer)
                losses = learning.losses(way, learning.seeds)
                report.rows.append(_row(copies, outer, every, lr, losses, against))
                gaps.setdefault(copies, {}).setdefault(outer, {})[every] = statistics.fmean(losses) / against - 1
                if (outer, every) == (BEST_OUTER, BEST_EVERY):
                    _check(report, copies, statistics.fmean(losses), alone, against, quick=quick)
    return gaps


def _check(report: Report, copies: int, loss: float, alone: float, against: float, *, quick: bool) -> None:
    how = f"{BEST_OUTER}, every {BEST_EVERY} updates"
    report.check(f"{copies} copies / one after as many updates, {how}", loss / alone, "< 1")
    if not quick:  # so short a training says nothing of it
        report.check(f"{copies} copies against synchronous, {how}: gap", loss / against - 1, "<= 0.02")


def _row(copies: int, how: str, every: int | None, lr: float, losses: list[float], against: float) -> dict[str, Any]:
    mean = statistics.fmean(losses)
    return {
        "copies": copies, "how": how, "updates between": every, "samples between": every and every * BATCH, "lr": lr,
        "loss": round(mean, 4), "gap": f"{mean / against - 1:+.2%}", "seeds": f"{min(losses):.3f} to {max(losses):.3f}",
    }  # fmt: skip


def clocked(kept: Kept, num_clusters: int, seconds: float) -> clusters_clock.Clocked:
    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder:
            options = ("--average-every", str(BEST_EVERY * clusters_job.BATCH), "--outer", BEST_OUTER)
            return asdict(clusters_clock.train(Path(folder), num_clusters, seconds, options))

    return clusters_clock.Clocked(**kept.get(f"clusters={num_clusters} seconds={seconds:g}", measure))


def report_clock(report: Report, runs: Iterable[clusters_clock.Clocked]) -> None:
    by_count = {run.clusters: run for run in runs}
    for run in by_count.values():
        report.rows.append({
            "clusters": run.clusters, "seconds": run.seconds, "updates of each": " ".join(map(str, run.updates)),
            "samples/s": run.samples_per_s, "rounds": len(run.round_s),
            "a round, s": statistics.fmean(run.round_s) if run.round_s else None, "held-out loss": round(run.loss, 4),
        })  # fmt: skip
    if 1 in by_count:
        for count in [c for c in by_count if c > 1]:
            name = f"{count} clusters / one, held-out loss after as many seconds"
            report.check(name, by_count[count].loss / by_count[1].loss, "< 1")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("learning", "clock"), help="one half")
    parser.add_argument("--copies", type=int, nargs="+", default=list(COPIES), help="how many, by samples")
    parser.add_argument("--outers", choices=OUTERS, nargs="+", default=list(OUTERS), help="outer steps, by samples")
    parser.add_argument("--clusters", type=int, nargs="+", default=list(CLUSTERS), help="how many, by the clock")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep figures there, and use those that are there")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report, kept = Report("clusters that average"), Kept(options.keep)
    gaps, runs = {}, []
    if options.only != "clock":
        learning, outers = Learning(kept, quick=options.quick), [BEST_OUTER] if options.quick else options.outers
        gaps = report_learning(report, learning, options.copies, outers, quick=options.quick)
    if options.only != "learning" and not options.quick:
        if lacking := missing():
            sys.stderr.write(f"by the clock: this machine cannot have a testbed, it lacks {'; '.join(lacking)}\n")
        else:
            runs = [clocked(kept, count, SECONDS) for count in options.clusters]
            report_clock(report, runs)
    report.finish(options.json)
    if options.svg is not None:
        options.svg.write_text(draw(gaps, runs))


if __name__ == "__main__":
    main()
