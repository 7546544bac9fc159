"""Tables and checks of the groups. A check whose rows were not measured is absent, and the report says so."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from itertools import pairwise

from benchmarks.learning.chart import Chart
from benchmarks.learning.groups import (
    BASELINE,
    CLUSTER_VARIANTS,
    DELAYS,
    PIPELINES,
    PROGRESS,
    SPEEDUP_COPIES,
    STALENESS,
    STALENESS_UPDATES,
    pipeline_name,
)
from benchmarks.learning.statistic import Estimate, paired_gap, slope
from benchmarks.learning.study import Measured
from benchmarks.learning.tasks import BASIN
from benchmarks.report import Report

__all__ = ["charts", "report_group"]

_MEASURE = "mean measure"
_DEFAULT, _FEEDBACK = "look-ahead 1 + bend (default)", "error feedback (look-ahead 1)"
_SUFFERS = 1.1  # times the value without delay

Found = Mapping[str, Measured]


def report_group(report: Report, group: str, found: Found) -> None:
    """Add the rows of a group, its checks, and, after the tables, the names of checks whose rows are missing."""
    first = len(report.rows)
    _GROUPS[group](report, found)
    report.rows[first:] = sorted(report.rows[first:], key=lambda row: "not measured" in row)


def charts(group: str, found: Found) -> list[Chart]:
    """The charts of a group."""
    if group == "rate":
        lines = {name: _curve(found, f"{name} | ") for name in DELAYS}
        bound = "the bound without delays"
        lines[bound] = [(k, _bound(k)) for k in PROGRESS if found]
        title = "Mean squared gradient norm over updates"
        return [Chart(title, "updates K", "mean squared gradient norm", _known(lines), frozenset({bound}))]
    if group == "staleness":
        lines = {f"K = {k}": _curve(found, f"{k} | ", skip=0) for k in STALENESS_UPDATES}
        title = "Mean squared gradient norm over the delay"
        return [Chart(title, "delay, updates", "mean squared gradient norm", _known(lines))]
    if group == "speedup":
        points = [(float(copies), value) for copies, value in speedups(found).items()]
        linear = [(float(copies), float(copies)) for copies in SPEEDUP_COPIES if points]
        lines = {"measured": points, "linear": linear}
        return [Chart("Updates saved by C clusters", "clusters C", "speedup", _known(lines), frozenset({"linear"}))]
    return []


def _means(points: Mapping[float, Measured]) -> dict[float, float]:
    """The means of the measured number over the seeds that all points have, so that points can be compared."""
    seeds = set.intersection(*(set(m.results) for m in points.values())) if points else set[int]()
    return {x: statistics.fmean(m.results[seed].numbers[_MEASURE] for seed in sorted(seeds)) for x, m in points.items()}


def _known(lines: Mapping[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    return {name: line for name, line in lines.items() if line}


def _curve(found: Found, prefix: str, *, skip: float = -1) -> list[tuple[float, float]]:
    """The points of the rows `PREFIX NUMBER`; a logarithmic axis has no 0."""
    points = {float(name.removeprefix(prefix)): m for name, m in found.items() if name.startswith(prefix)}
    return [(x, mean) for x, mean in sorted(_means(points).items()) if x != skip]


def _bound(updates: int) -> float:
    """The theorem's bound for one cluster without delays."""
    return 2 * math.sqrt(2 * BASIN.height * BASIN.smoothness * BASIN.variance / updates)


def gap_between(measured: Measured, baseline: Measured) -> Estimate:
    """The paired relative difference, over the seeds that both have."""
    seeds = sorted(measured.results.keys() & baseline.results.keys())
    return paired_gap([measured.results[s].loss for s in seeds], [baseline.results[s].loss for s in seeds])


def _check_or_note(report: Report, name: str, value: float | None, target: str) -> None:
    if value is None:
        report.rows.append({"not measured": name, "target": target})
    else:
        report.check(name, value, target)


def _pipeline(report: Report, found: Found) -> None:
    closed: dict[tuple[str, str], list[float]] = {}
    gaps: list[float] = []
    for task, optimizer, batch in PIPELINES:
        prefix = pipeline_name(task, optimizer, batch, "")
        baseline = found.get(prefix + BASELINE)
        if baseline is None:
            continue
        rows = {name.removeprefix(prefix): m for name, m in found.items() if name.startswith(prefix)}
        estimates = {mode: gap_between(m, baseline) for mode, m in rows.items() if mode != BASELINE}
        for mode, measured in rows.items():
            estimate = estimates.get(mode)
            share = _closed(estimate, estimates.get("none")) if mode in (_DEFAULT, _FEEDBACK) else None
            report.rows.append({
                "model": task, "optimizer": optimizer, "batch": batch, "gradients late": mode, "lr": measured.lr,
                "loss": f"{statistics.fmean(measured.losses):.4f}", "gap": estimate.percent if estimate else "",
                "gap closed": share, "seeds": len(measured.losses),
            })  # fmt: skip
            if share is not None:
                closed.setdefault((mode, optimizer), []).append(share)
        if _DEFAULT in estimates:
            gaps.append(estimates[_DEFAULT].mean)
            name = f"{task}, {optimizer}, batch {batch}: gap of the default"
            report.check(name, round(estimates[_DEFAULT].mean, 5), "<= 0.005")
    of_default = [share for (mode, _), shares in closed.items() if mode == _DEFAULT for share in shares]
    of_feedback = [share for (mode, _), shares in closed.items() if mode == _FEEDBACK for share in shares]
    lowest = min(of_default, default=None)
    _check_or_note(report, "least share of the gap that the default closes", lowest, ">= 0.85")
    ratio = None
    if of_default and of_feedback:
        ratio = statistics.fmean(of_default) / statistics.fmean(of_feedback)
    _check_or_note(report, "mean share that the default closes / that error feedback closes", ratio, ">= 1.3")
    baseline = found.get(pipeline_name("small", "AdamW", 32, BASELINE))
    paper = [m for name, m in found.items() if "| the paper's" in name]
    best = min((gap_between(m, baseline).mean for m in paper), default=None) if baseline else None
    _check_or_note(report, "the paper's delays: gap of the best correction", best, "<= 0.05")


def _closed(estimate: Estimate | None, without: Estimate | None) -> float | None:
    """The share of the gap without correction that is closed; None where that gap is not above its own noise."""
    if estimate is None or without is None or without.mean <= min(without.half_width, without.mean):
        return None
    return round(1 - estimate.mean / without.mean, 3)


def _clusters(report: Report, found: Found) -> None:
    targets = {
        "4 clusters, H = 4": "<= 0.01", "8 clusters, H = 4": "<= 0.015", "4 clusters, H = 30": "<= 0.02",
        "4 clusters, H = 30, outer momentum 0.6": "<= 0.02",
    }  # fmt: skip
    for optimizer in ("AdamW", "Muon"):
        small = found.get(f"{optimizer} | {BASELINE}")
        large = found.get(f"{optimizer} | {BASELINE}, samples of 8 clusters")
        for name in [*CLUSTER_VARIANTS, f"{BASELINE}, samples of 8 clusters"]:
            measured = found.get(f"{optimizer} | {name}")
            baseline = large if name.startswith("8 ") else small
            is_baseline = name.startswith(BASELINE)
            gap = None if is_baseline or measured is None or baseline is None else gap_between(measured, baseline)
            if measured is not None:
                sent = measured.number("sent_bytes")[0] / 1e6 if "sent_bytes" in measured.results[0].numbers else None
                report.rows.append({
                    "optimizer": optimizer, "training": name, "lr": measured.lr,
                    "loss": f"{statistics.fmean(measured.losses):.4f}", "gap": gap.percent if gap else "",
                    "sent, MB": None if sent is None else round(sent, 1), "seeds": len(measured.losses),
                })  # fmt: skip
            if name in targets:
                value = None if gap is None else round(gap.mean, 5)
                _check_or_note(report, f"{optimizer}, {name}: gap", value, targets[name])


def _rate(report: Report, found: Found) -> None:
    for name in DELAYS:
        means = _means({k: m for k in PROGRESS if (m := found.get(f"{name} | {k}")) is not None})
        if means:
            row: dict[str, object] = {"gradients": name}
            row |= {f"K = {k}": means.get(k) for k in PROGRESS}
            row["slope"] = round(slope(list(means), list(means.values())), 3) if len(means) > 1 else None
            report.rows.append(row)
        value = None
        if len(means) == len(PROGRESS):
            value = abs(slope(list(means), list(means.values())) + 0.5)
        _check_or_note(report, f"{name}: distance of the slope from -0.5", value, "<= 0.05")
    if found:
        report.rows.append({
            "gradients": "the theorem's bound, without its term of delays", **{f"K = {k}": _bound(k) for k in PROGRESS},
            "slope": -0.5,
        })  # fmt: skip


def speedups(found: Found) -> dict[int, float]:
    """How many times fewer updates C clusters need for the mean squared gradient norm of one after the middle K."""
    lines: dict[int, list[tuple[float, float]]] = {}
    for copies in SPEEDUP_COPIES:
        prefix = f"{copies} | "
        points = [(m.row.experiment.updates, m.number(_MEASURE)) for n, m in found.items() if n.startswith(prefix)]
        lines[copies] = sorted((k, statistics.fmean(values)) for k, values in points)
    if len(lines[1]) < 3:
        return {}
    target_k, target = lines[1][1]
    result = {}
    for copies, line in lines.items():
        if len(line) == 3:
            logs = [(math.log(k), math.log(value)) for k, value in line]
            fit = statistics.linear_regression([v for _, v in logs], [k for k, _ in logs])
            result[copies] = target_k / math.exp(fit.slope * math.log(target) + fit.intercept)
    return result


def _speedup(report: Report, found: Found) -> None:
    measured = speedups(found)
    for copies, value in measured.items():
        report.rows.append({"clusters": copies, "speedup": round(value, 2), "of linear": round(value / copies, 3)})
    for copies in SPEEDUP_COPIES[1:]:
        share = measured[copies] / copies if copies in measured else None
        _check_or_note(report, f"{copies} clusters: speedup / C", share, ">= 0.9")


def _staleness(report: Report, found: Found) -> None:
    limits: dict[int, float] = {}
    for k in STALENESS_UPDATES:
        values = _means({delay: m for delay in STALENESS if (m := found.get(f"{k} | {delay}")) is not None})
        if 0 not in values:
            continue
        relative = {delay: value / values[0] for delay, value in values.items()}
        limit = _crossing(relative) if len(relative) == len(STALENESS) else None
        limits |= {} if limit is None else {k: limit}
        row: dict[str, object] = {"K": k, **{f"delay {delay}": relative.get(delay) for delay in STALENESS}}
        report.rows.append({**row, "suffers from": None if limit is None else round(limit, 1)})
    exponent = slope(list(limits), list(limits.values())) if len(limits) == len(STALENESS_UPDATES) else None
    _check_or_note(report, "exponent of K in the delay from which the rate suffers", exponent, ">= 0.25")


def _crossing(relative: Mapping[float, float]) -> float | None:
    """The delay at which the value is `_SUFFERS` times that without delay, between two measured delays."""
    points = sorted(relative.items())
    for (low, before), (high, after) in pairwise(points):
        if before < _SUFFERS <= after:
            return low + (high - low) * (_SUFFERS - before) / (after - before)
    return None


def _blocks(report: Report, found: Found) -> None:
    for name, measured in found.items():
        values = Estimate.of(measured.number(_MEASURE))
        report.rows.append({
            "two clusters": name, "mean squared gradient norm": values.mean, "±": values.half_width,
            "seeds": values.count,
        })  # fmt: skip
    value = None
    if len(found) == 2:
        same, different = (Estimate.of(found[name].number(_MEASURE)) for name in ("same cuts", "different cuts"))
        value = abs(different.mean - same.mean) / same.half_width
    name = "different cuts against the same: difference of the means / half the confidence interval of one"
    _check_or_note(report, name, value, "<= 1")


_GROUPS: Mapping[str, Callable[[Report, Found], None]] = {
    "rate": _rate, "staleness": _staleness, "speedup": _speedup, "blocks": _blocks, "pipeline": _pipeline,
    "clusters": _clusters,
}  # fmt: skip
