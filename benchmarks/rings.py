"""Averaging: (a) members of one host against gloo, and against hivemind if a Python is given that has it.

(b) clusters that cut the model differently, over home lines, and (c) what training loses meanwhile: `rings_wan` and
`rings_slowdown`, which can be run alone.

python -m benchmarks.rings --json FILE
"""

from __future__ import annotations

from benchmarks.report import Report, arguments
from benchmarks.rings_hivemind import add_hivemind
from benchmarks.rings_host import add_host
from benchmarks.rings_slowdown import add_slowdown
from benchmarks.rings_wan import add_wan


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--piece-elements", type=int, default=2**21, help="float32 numbers in a piece, on one host")
    parser.add_argument("--hivemind", metavar="PYTHON", help="a Python that has hivemind")
    options = parser.parse_args()
    report = Report("rings: averaging, algorithm bandwidth (bytes of the vector over seconds)")
    add_host(report, quick=options.quick, piece_elements=options.piece_elements)
    if options.hivemind:
        add_hivemind(report, options.hivemind, quick=options.quick)
    if not options.quick:  # these two have quick runs of their own
        add_wan(report, quick=False)
        add_slowdown(report, quick=False)
    report.finish(options.json)


if __name__ == "__main__":
    main()
