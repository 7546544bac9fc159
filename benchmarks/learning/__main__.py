"""Measures how well late gradients and clusters that average learn, and shows the statements of the theory in numbers.

Everything runs in one process with the runtime's own trainers, corrections, averaging arithmetic and codecs
(`benchmarks.learning.copies`). Every row has the learning rate that is best for it, found in the same way for all rows
(`benchmarks.learning.study`); rows of a table have the same seeds, and gaps are means of paired differences with 95 %
confidence intervals. `--record FILE` lets the measurement be stopped and continued; `--report` reports what is there.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.learning.chart import Chart, draw
from benchmarks.learning.groups import GROUPS, rows_of
from benchmarks.learning.histogram import report_histograms
from benchmarks.learning.record import Record
from benchmarks.learning.study import measure_rows
from benchmarks.learning.table import charts, report_group
from benchmarks.report import Report, arguments

SEEDS, QUICK_SEEDS = 5, 2
HISTOGRAMS = "histograms"  # of real runs


def main() -> None:
    parser, names = arguments(__doc__), [HISTOGRAMS, *GROUPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="GROUP")
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only rows whose name contains one of these")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"seeds of every row; default {SEEDS}")
    parser.add_argument("--processes", type=int, default=2, help="with a record: trainings at a time; default 2")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="append results here, and do not repeat those in it"
    )
    parser.add_argument("--report", action="store_true", help="report the results in the record, and train nothing")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves of the theory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report, pictures = Report("learning"), list[Chart]()
    for group in options.only:
        if group == HISTOGRAMS:
            report_histograms(report, Record(options.record), quick=options.quick, trains=not options.report)
            continue
        rows = rows_of(group, quick=options.quick)
        if options.rows:
            rows = [row for row in rows if any(part in row.name for part in options.rows)]
        seeds = range(QUICK_SEEDS if options.quick else options.seeds)
        found = measure_rows(rows, seeds, options.record, processes=options.processes, trains=not options.report)
        report_group(report, group, found)
        pictures += charts(group, found)
    report.finish(options.json)
    if options.svg is not None:
        options.svg.write_text(draw(pictures, "The statements of the theory, measured"))


if __name__ == "__main__":
    main()
