"""Measures the training quality of clusters that average: by samples, and by the clock.

By samples: copies of a small GPT in one process, against one copy trained synchronously with batches as many times
larger (`benchmarks.clusters.learning`; `python -m benchmarks.clusters.parts` measures the causes of the gap). By the
clock: several clusters against one on the testbed (`benchmarks.clusters.wall_clock`).

`--keep FOLDER` stores every result there and does not measure stored ones again: parts can be measured one at a time
(`--only learning`, `--only clock --clusters 2`), and a last call makes the report and the picture of all.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.clusters import job, wall_clock
from benchmarks.clusters.learning import BEST_EVERY, BEST_OUTER, COPIES, EVERY, UPDATES, Gaps, Learning, report_learning
from benchmarks.clusters.plot import draw
from benchmarks.clusters.replicas import OUTERS
from benchmarks.clusters.results_file import ResultsFile
from benchmarks.report import Report, arguments
from testbed import TestbedUnavailable, missing

CLUSTERS = (1, 2, 4)
SECONDS = 90.0
CLOCK_EVERY = 16  # updates: on PCs this slow a round takes as long as two updates


def measure_clock(results: ResultsFile, num_clusters: int, seconds: float) -> wall_clock.WallClockResult:
    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder:
            options = ("--average-every", str(CLOCK_EVERY * job.BATCH), "--outer", BEST_OUTER)
            return asdict(wall_clock.train(Path(folder), num_clusters, seconds, options))

    return wall_clock.WallClockResult(**results.get(f"clusters={num_clusters} seconds={seconds:g}", measure))


def report_clock(report: Report, runs: Iterable[wall_clock.WallClockResult]) -> None:
    by_count = {run.clusters: run for run in runs}
    for run in by_count.values():
        report.rows.append({
            "clusters": run.clusters, "seconds": run.seconds, "updates of each": " ".join(map(str, run.updates)),
            "samples/s": run.samples_per_s, "rounds": len(run.round_s),
            "a round, s": statistics.fmean(run.round_s) if run.round_s else None, "held-out loss": round(run.loss, 4),
        })  # fmt: skip
    if 1 in by_count:
        for count in [c for c in by_count if c > 1]:
            name = f"{count} clusters / one, held-out loss after the same seconds"
            report.check(name, by_count[count].loss / by_count[1].loss, "< 1")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("learning", "clock"), help="only one part")
    parser.add_argument("--copies", type=int, nargs="+", default=list(COPIES), help="numbers of copies, by samples")
    parser.add_argument("--outers", choices=OUTERS, nargs="+", default=[BEST_OUTER], help="outer steps, by samples")
    parser.add_argument("--every", type=int, nargs="+", default=list(EVERY), help="updates per average, by samples")
    parser.add_argument("--updates", type=int, default=UPDATES, help="updates of every copy, by samples")
    parser.add_argument("--clusters", type=int, nargs="+", default=list(CLUSTERS), help="numbers, by the clock")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="store and reuse results")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the results as SVG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report, results = Report("clusters that average"), ResultsFile(options.keep)
    gaps: Gaps = {}
    runs: list[wall_clock.WallClockResult] = []
    if options.only != "clock":
        learning = Learning(results, updates=options.updates, quick=options.quick)
        everys = [BEST_EVERY] if options.quick else options.every
        gaps = report_learning(report, learning, options.copies, options.outers, everys)
    if options.only != "learning" and not options.quick:
        if lacking := missing():
            sys.stderr.write(f"not measured by the clock: {TestbedUnavailable(lacking)}\n")
        else:
            runs = [measure_clock(results, count, SECONDS) for count in options.clusters]
            report_clock(report, runs)
    report.finish(options.json)
    if options.svg is not None:
        options.svg.write_text(draw(gaps, runs))


if __name__ == "__main__":
    main()
