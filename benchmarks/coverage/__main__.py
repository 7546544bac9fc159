"""Which models train as they are: `python -m benchmarks.coverage`.

Every layer and loss of torch.nn, operations that users' models call, and the causal language models of transformers
with their default configurations (made small), each as an instance and as a builder: traced, cut in three, passed
through the wire form, and compared with plain PyTorch.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import torch

from benchmarks.coverage.case import Case, Outcome, examine
from benchmarks.coverage.huggingface import causal_cases
from benchmarks.coverage.layers import layer_cases, loss_cases, operation_cases
from benchmarks.report import Report, arguments

FORMS = ("instance", "builder")
TIMEOUT_S = 120
GROUPS: dict[str, Callable[[], Iterable[Case]]] = {
    "layer": layer_cases, "loss": loss_cases, "operation": operation_cases, "causal": causal_cases,
}  # fmt: skip
TARGETS = {"layer": ">= 0.98", "loss": ">= 0.98", "causal": ">= 0.95"}
QUICK_EVERY = 8  # of all cases


class _TooLong(Exception):
    pass


def _alarm(number: int, frame: FrameType | None) -> None:
    raise _TooLong


def outcomes(cases: Iterable[Case]) -> Iterator[Outcome]:
    signal.signal(signal.SIGALRM, _alarm)
    for case in cases:
        for form in FORMS:
            signal.alarm(TIMEOUT_S)
            try:
                yield examine(case, form)
            except _TooLong:
                yield Outcome(case.name, case.group, form, "refused", f"took longer than {TIMEOUT_S} s")
            finally:
                signal.alarm(0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--names", nargs="*", help="cases whose name contains one of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("coverage")
    for group in options.only:
        cases = [c for c in GROUPS[group]() if not options.names or any(n in c.name for n in options.names)]
        if options.quick:
            cases = cases[::QUICK_EVERY]
        found: list[Outcome] = []
        for outcome in outcomes(cases):
            found.append(outcome)
            if outcome.kind not in ("exact", "close"):
                print(f"{outcome.group} {outcome.name} ({outcome.form}): {outcome.kind}: {outcome.reason}", flush=True)
        counts = Counter(outcome.kind for outcome in found)
        tried = sum(n for kind, n in counts.items() if kind != "broken")
        good = counts["exact"] + counts["close"]
        report.rows.append({"group": group, "tried": tried, "share": good / max(tried, 1), **{
            kind: counts[kind] for kind in ("exact", "close", "refused", "differs", "crashed", "broken")}})  # fmt: skip
        if group in TARGETS and not options.names:
            report.check(f"exact, {group}", good / max(tried, 1), TARGETS[group])
    report.finish(options.json)


if __name__ == "__main__":
    main()
