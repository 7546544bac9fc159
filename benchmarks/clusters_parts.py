"""What the gap between copies that average and synchronous training is made of: its causes, one at a time.

Four copies differ from one with batches four times as large in three things: each copy's optimizer sees noisier
gradients, copies are apart between averagings, and gradients are one update late. So this trains with one of them, with
two, and with all; and with an outer step that goes further than the average. A short training, where the gap is wide,
and one learning rate, that is the best of a grid for synchronous training and for four copies.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from benchmarks.clusters_copies import Way
from benchmarks.clusters_kept import Kept
from benchmarks.clusters_learning import Learning, gap
from benchmarks.report import Report, arguments

UPDATES = 384
COPIES = 4
LR = 16e-3
NUM_SEEDS = 2


def ways() -> dict[str, Way]:
    """By what they have of the three; the first is the rival."""

    def copies(every: int, *, outer: str = "plain", is_late: bool = True) -> Way:
        return Way(copies=COPIES, lr=LR, every=every, outer=outer, is_late=is_late)

    def one(*, is_late: bool) -> Way:
        return Way(copies=COPIES, lr=LR, synchronous=True, is_late=is_late)

    return {
        "synchronous": one(is_late=False),
        "late": one(is_late=True),
        "noisy": copies(1, is_late=False),
        "noisy, apart": copies(4, is_late=False),
        "noisy, late": copies(1),
        "noisy, apart, late": copies(4),
        "noisy, apart, late; stretched": copies(4, outer="stretched"),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep figures there, and use those that are there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report, learning = Report("what the gap is made of"), Learning(Kept(options.keep), updates=UPDATES)
    seeds = learning.seeds[: 1 if options.quick else NUM_SEEDS]
    against: list[float] = []
    for name, way in ways().items():
        losses = learning.losses(way, seeds)
        against = against or losses
        report.rows.append({
            "gradients and copies": name, "updates between": way.every or None,
            "loss": round(statistics.fmean(losses), 4), "gap": f"{gap(losses, against):+.2%}",
            "from": round(min(losses), 4), "to": round(max(losses), 4),
        })  # fmt: skip
    report.finish(options.json)


if __name__ == "__main__":
    main()
