"""Do clusters that average learn well? By samples against synchronous training, by the clock against one cluster.

By samples: copies of a small GPT in one process, against one copy trained synchronously with batches as many times
larger (`clusters_learning`; `clusters_parts` asks what the rest of the gap is made of). By the clock: `clusters_clock`,
on the testbed.

`--keep FOLDER` keeps every figure there, and what is there already is not measured again: parts can be measured one at
a time (`--only learning`, `--only clock --clusters 2`), and a last call makes the report and the picture of all.
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

from benchmarks import clusters_clock, clusters_job
from benchmarks.clusters_copies import OUTERS
from benchmarks.clusters_kept import Kept
from benchmarks.clusters_learning import (
    BEST_EVERY,
    BEST_OUTER,
    COPIES,
    EVERY,
    UPDATES,
    Gaps,
    Learning,
    report_learning,
)
from benchmarks.clusters_plot import draw
from benchmarks.report import Report, arguments
from ravnest.testbed import missing

CLUSTERS = (1, 2, 4)
SECONDS = 90.0
CLOCK_EVERY = 16  # updates: on PCs this slow a round takes as long as two


def clocked(kept: Kept, num_clusters: int, seconds: float) -> clusters_clock.Clocked:
    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder:
            options = ("--average-every", str(CLOCK_EVERY * clusters_job.BATCH), "--outer", BEST_OUTER)
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
    parser.add_argument("--outers", choices=OUTERS, nargs="+", default=[BEST_OUTER], help="outer steps, by samples")
    parser.add_argument("--every", type=int, nargs="+", default=list(EVERY), help="updates between, by samples")
    parser.add_argument("--updates", type=int, default=UPDATES, help="of every copy, by samples")
    parser.add_argument("--clusters", type=int, nargs="+", default=list(CLUSTERS), help="how many, by the clock")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep figures there, and use those that are there")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report, kept = Report("clusters that average"), Kept(options.keep)
    gaps: Gaps = {}
    runs: list[clusters_clock.Clocked] = []
    if options.only != "clock":
        learning = Learning(kept, updates=options.updates, quick=options.quick)
        everys = [BEST_EVERY] if options.quick else options.every
        gaps = report_learning(report, learning, options.copies, options.outers, everys)
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
