"""Measures the causes of the gap between averaging copies and synchronous training, one at a time.

Four copies differ from one with batches four times as large in three respects: each
copy's optimizer has noisier gradients,
copies diverge between averagings, and gradients are one update late. This benchmark trains with one of these, with two
and with all three; and with an outer step that goes beyond the average. Training is short, where the gap is wide, with
one learning rate: the best of a grid for synchronous training and for four copies.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from benchmarks.clusters.learning import Learning, gap
from benchmarks.clusters.replicas import TrainingMethod
from benchmarks.clusters.results_file import ResultsFile
from benchmarks.report import Report, arguments

UPDATES = 384
COPIES = 4
LR = 16e-3
NUM_SEEDS = 2


def methods() -> dict[str, TrainingMethod]:
    """Training methods by the causes that apply; the first is the baseline."""

    def copies(every: int, *, outer: str = "plain", is_late: bool = True) -> TrainingMethod:
        return TrainingMethod(copies=COPIES, lr=LR, every=every, outer=outer, is_late=is_late)

    def one(*, is_late: bool) -> TrainingMethod:
        return TrainingMethod(copies=COPIES, lr=LR, synchronous=True, is_late=is_late)

    return {
        "synchronous": one(is_late=False),
        "late": one(is_late=True),
        "noisy": copies(1, is_late=False),
        "noisy, diverging": copies(4, is_late=False),
        "noisy, late": copies(1),
        "noisy, diverging, late": copies(4),
        "noisy, diverging, late; stretched": copies(4, outer="stretched"),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="store and reuse results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report, learning = (
        Report("causes of the gap to synchronous training"),
        Learning(ResultsFile(options.keep), updates=UPDATES),
    )
    seeds = learning.seeds[: 1 if options.quick else NUM_SEEDS]
    baseline: list[float] = []
    for name, method in methods().items():
        losses = learning.losses(method, seeds)
        baseline = baseline or losses
        report.rows.append({
            "gradients and copies": name, "updates between averagings": method.every or None,
            "loss": round(statistics.fmean(losses), 4), "gap": f"{gap(losses, baseline):+.2%}",
            "from": round(min(losses), 4), "to": round(max(losses), 4),
        })  # fmt: skip
    report.finish(options.json)


if __name__ == "__main__":
    main()
