"""Measures averaging in three parts.

(a) Members of one host over shared memory against gloo, and against hivemind if --hivemind names a Python that has it;
(b) clusters with different cuts over home lines (also alone: `python -m benchmarks.rings.wan`);
(c) the slowdown of training during averaging (also alone: `python -m benchmarks.rings.slowdown`).
--quick runs (a) only.
"""

from __future__ import annotations

from benchmarks.report import Report, arguments
from benchmarks.rings.hivemind import add_hivemind
from benchmarks.rings.host import add_host
from benchmarks.rings.slowdown import add_slowdown
from benchmarks.rings.wan import add_wan


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--piece-elements", type=int, default=2**21, help="float32 numbers in a chunk, on one host")
    parser.add_argument("--hivemind", metavar="PYTHON", help="a Python that has hivemind")
    options = parser.parse_args()
    report = Report("rings: averaging, algorithm bandwidth (bytes of the vector over seconds)")
    add_host(report, quick=options.quick, piece_elements=options.piece_elements)
    if options.hivemind:
        add_hivemind(report, options.hivemind, quick=options.quick)
    if not options.quick:  # parts (b) and (c) have quick runs of their own
        add_wan(report, quick=False)
        add_slowdown(report, quick=False)
    report.finish(options.json)


if __name__ == "__main__":
    main()
