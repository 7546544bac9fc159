"""Averaging: (a) members of one host against gloo.

python -m benchmarks.rings --json FILE
"""

from __future__ import annotations

from benchmarks.report import Report, arguments
from benchmarks.rings_hivemind import add_hivemind
from benchmarks.rings_host import add_host


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--piece-elements", type=int, default=2**18, help="float32 numbers in a piece, for tuning")
    parser.add_argument("--hivemind", metavar="PYTHON", help="a Python that has hivemind")
    options = parser.parse_args()
    report = Report("rings: averaging, algorithm bandwidth (bytes of the vector over seconds)")
    add_host(report, quick=options.quick, piece_elements=options.piece_elements)
    if options.hivemind:
        add_hivemind(report, options.hivemind, quick=options.quick)
    report.finish(options.json)


if __name__ == "__main__":
    main()
