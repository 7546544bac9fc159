"""Which models train as they are: `python -m benchmarks.coverage`.

Every layer and loss of torch.nn, operations that users' models call, the architectures of transformers' auto classes
with their default configurations (made small), a model of every family of timm, and the models of torchvision: as an
instance and as a builder, with labels and with a loss function, traced, cut in three, passed through the wire form, and
compared with plain PyTorch. The whole survey takes hours; `--record FILE` lets it be interrupted and continued.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.coverage.case import Outcome
from benchmarks.coverage.heads import TASKS
from benchmarks.coverage.survey import GROUPS, subjects, survey
from benchmarks.report import Report, arguments

CHECKS = {  # name -> groups, least share that trains exactly
    "layers and losses of torch.nn": (("layer", "loss"), ">= 0.98"),
    "causal language models of transformers": (("causal",), ">= 0.95"),
    "all architectures of transformers": (tuple(TASKS), ">= 0.9"),
    "families of timm": (("timm",), ">= 0.95"),
    "models of torchvision": (("torchvision",), ">= 0.95"),
}
QUICK_EVERY = 25  # of all models
KINDS = ("exact", "close", "refused", "wrong", "crashed", "not tried")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--names", nargs="*", help="models whose name contains one of these")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", type=Path, help="append outcomes to this file, and do not repeat those in it")
    parser.add_argument(
        "--report", action="store_true", help="report the outcomes in the record, and try no other models"
    )
    options = parser.parse_args()
    keys = [(s.group, s.name) for s in subjects(options.only)]
    if options.names:
        keys = [key for key in keys if any(part in key[1] for part in options.names)]
    if options.quick:
        keys = keys[::QUICK_EVERY]
    random.Random(0).shuffle(keys)  # so that an interrupted survey is a sample of all groups
    if options.report:
        known = list(survey(keys, 0, options.record))
        report = report_of(known)
        reached = len({(outcome.group, outcome.name) for outcome in known})
        report.rows.insert(0, {"models and layers tried": reached, "of": len(keys)})
        report.finish(options.json)
        return
    found: list[Outcome] = []
    for outcome in survey(keys, options.processes, options.record):
        found.append(outcome)
        if outcome.kind not in ("exact", "close"):
            print(f"{outcome.group} {outcome.name} ({outcome.form}): {outcome.kind}: {outcome.reason}", flush=True)
    report_of(found).finish(options.json)


def report_of(found: Sequence[Outcome]) -> Report:
    """A row per group, the checks, and a row for every model that is not trained exactly."""
    report = Report("coverage")
    groups = dict.fromkeys(outcome.group for outcome in found)
    for group in groups:
        counts = Counter(outcome.kind for outcome in found if outcome.group == group)
        kinds = {kind: counts[kind] for kind in KINDS}
        report.rows.append({"group": group, "tried": _tried(counts), "share": _share(counts), **kinds})
    for name, (members, target) in CHECKS.items():
        counts = Counter(outcome.kind for outcome in found if outcome.group in members)
        if _tried(counts):
            report.check(f"exact or within rounding, {name}", _share(counts), target)
    total = Counter(outcome.kind for outcome in found)
    report.check("wrong", total["wrong"], "== 0")
    report.check("crashed", total["crashed"], "== 0")
    for kind in ("wrong", "crashed", "refused", "not tried"):
        report.rows += _reasons([outcome for outcome in found if outcome.kind == kind])
    return report


def _tried(counts: Counter[str]) -> int:
    return sum(n for kind, n in counts.items() if kind != "not tried")


def _share(counts: Counter[str]) -> float:
    return (counts["exact"] + counts["close"]) / max(_tried(counts), 1)


def _reasons(found: Sequence[Outcome]) -> list[dict[str, str]]:
    """A row per model with its forms and the first line of the reason."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for outcome in found:
        row = rows.setdefault(
            (outcome.group, outcome.name),
            {"group": outcome.group, "model": outcome.name, "outcome": outcome.kind, "forms": "", "reason": ""},
        )
        row["forms"] = "; ".join(filter(None, (row["forms"], outcome.form)))
        row["reason"] = row["reason"] or _PATH.sub("", outcome.reason.partition("\n")[0])[:200]
    return list(rows.values())


_PATH = re.compile(r"/\S*/(?=\w+\.py)")  # of a file, which depends on the machine


if __name__ == "__main__":
    main()
