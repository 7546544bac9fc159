"""Counts how late the gradients of real local runs are, by the stages' own counters, against the bound of the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ravnest.examples.digits_cnn
from benchmarks.learning.record import Record
from benchmarks.report import Report

__all__ = ["RUNS", "report_histograms"]

RUNS: Mapping[str, tuple[str, ...]] = {
    "double-buffered, 4 nodes": ("--local", "4"),
    "an update per microbatch, 4 nodes": ("--local", "4", "--microbatches-per-step", "1"),
    "an update per two microbatches, 4 nodes": ("--local", "4", "--microbatches-per-step", "2"),
    "at most one late, 4 nodes": ("--local", "4", "--microbatches-per-step", "1", "--max-staleness", "1"),
    "two clusters of two nodes": ("--local", "4", "--clusters", "2", "--microbatches-per-step", "1"),
}
_STEPS, _TIMEOUT_S = 40, 1800


def report_histograms(report: Report, record: Record, *, quick: bool, trains: bool) -> None:
    """Train what is not in the record, add a row for each stage, and check the bound."""
    excess = []
    names = list(RUNS)[: 1 if quick else None]
    for name in names:
        if name not in record.runs and trains:
            record.add_run(name, list(_histograms(RUNS[name])))
        for cluster, stage, bound, counts in record.runs.get(name, ()):
            number_of = {int(late): count for late, count in counts.items()}
            total = sum(number_of.values())
            shares = {f"{late} late": number_of.get(late, 0) / total for late in range(5)}
            report.rows.append({"run": name, "cluster": cluster, "stage": stage, "bound": bound, **shares})
            excess.append(max(number_of) - bound)
    check = "most updates by which a gradient was later than its bound"
    if all(name in record.runs for name in names):
        report.check(check, max(excess), "<= 0")
    else:
        report.rows.append({"not measured": check, "target": "<= 0"})


def _histograms(flags: tuple[str, ...]) -> Iterator[tuple[str, int, int, dict[str, int]]]:
    """Cluster, stage, the plan's delay, and the number of updates by their lateness."""
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder:
        run = Path(folder) / "run"
        job = str(Path(ravnest.examples.digits_cnn.__file__))
        command = [sys.executable, "-m", "ravnest", "train", job, *flags, "--threads", "1", "--steps", str(_STEPS)]
        subprocess.run(
            [*command, "--run-dir", str(run), "--dashboard-port", "0"], check=True, timeout=_TIMEOUT_S,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ), cwd=folder,
        )  # fmt: skip
        plans = json.loads((run / "plan.json").read_text())["clusters"]
        last: dict[str, list[dict[str, Any]]] = {}
        for line in (run / "metrics.jsonl").read_text().splitlines():
            entry = json.loads(line)
            if "stages" in entry:
                last[entry["cluster"]] = entry["stages"]
        for cluster, stages in sorted(last.items()):
            for stage in sorted(stages, key=lambda item: int(item["stage"])):
                bound = plans[cluster]["stages"][stage["stage"]]["delay"]
                yield cluster, stage["stage"], bound, stage["staleness"]
