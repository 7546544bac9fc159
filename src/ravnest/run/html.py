"""A run as one piece of HTML, for notebooks: curves, plan and latest events, from the files of its folder.

It has no scripts and loads nothing. All texts are escaped: names of nodes and reasons come from other PCs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ravnest.core.units import format_bytes
from ravnest.dashboard.history import RunHistory, load_saved, read_lines
from ravnest.dashboard.series import Point

__all__ = ["folder_html"]

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 36
_COLOURS = ("#2f6fde", "#d9822b")  # training and held-out loss; both are readable on white and on black
_NUM_EVENTS = 8
_NUM_TICKS = 5


def folder_html(folder: Path | None, state: str) -> str:
    """Return the HTML of the run in a folder, which may be training; `state` says so in a word."""
    if folder is None:
        return f"<p>run: {escape(state)}</p>"
    history = RunHistory(load_saved(folder))
    for line in read_lines(folder / "metrics.jsonl"):
        history.add_line(line)
    parts = [f"<p><b>{escape(folder.name)}</b>: {escape(_summary(history, state))}</p>"]
    parts += _curves(history.steps.points, history.evaluations.points)
    parts += _plans(folder / "plan.json")
    events = [escape(row.text) for row in list(history.events)[-_NUM_EVENTS:]]
    if events:
        parts.append(f"<details><summary>latest events</summary><ul>{_tags('li', events)}</ul></details>")
    return f'<div class="ravnest-run">{"".join(parts)}</div>'


def _summary(history: RunHistory, state: str) -> str:
    steps, evaluations = history.steps.points, history.evaluations.points
    if not steps:
        return f"{state}, no step is done"
    step, seconds, samples, loss = steps[-1][:4]
    text = f"{state}, step {step or 0:,.0f}, loss {_number(loss)}"
    if evaluations:
        text += f", held-out loss {_number(evaluations[-1][3])}"
    return f"{text}, {(samples or 0) / max(seconds or 0, 1e-9):,.1f} samples/s"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _curves(steps: Sequence[Point], evaluations: Sequence[Point]) -> Iterator[str]:
    """Yield the picture of the losses by step, if there are two steps."""
    curves = [[(p[0] or 0.0, p[3]) for p in points if p[3] is not None] for points in (steps, evaluations)]
    known = [point for curve in curves for point in curve]
    if len(curves[0]) < 2:
        return
    x_range = min(x for x, _ in known), max(x for x, _ in known)
    y_range = min(y for _, y in known), max(y for _, y in known)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + _part(x, x_range) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - _part(y, y_range) * (_HEIGHT - _TOP - _BOTTOM),
        )

    yield (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" style="max-width:100%" role="img" '
        f'aria-label="loss by step" font-family="sans-serif" font-size="11" fill="currentColor">'
    )
    for value in _ticks(*y_range):
        _, y = place(x_range[0], value)
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" stroke-opacity="0.15"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    for value in _ticks(*x_range):
        x, _ = place(value, y_range[0])
        yield f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">step</text>'
    for i, (curve, name) in enumerate(zip(curves, ("loss", "held-out loss"), strict=True)):
        points = [place(x, y) for x, y in curve if y is not None]
        if not points:
            continue
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{line}" fill="none" stroke="{_COLOURS[i]}" stroke-width="1.5"/>'
        for x, y in points if i else ():
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_COLOURS[i]}"/>'
        yield f'<text x="{_LEFT + 8 + 60 * i}" y="{_HEIGHT - 4}" fill="{_COLOURS[i]}">{name}</text>'
    yield "</svg>"


def _part(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return (value - low) / (high - low) if high > low else 0.5


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers within the limits."""
    if high <= low:
        return [low]
    raw = (high - low) / _NUM_TICKS
    unit = 10.0 ** math.floor(math.log10(raw))
    every = next(unit * k for k in (1, 2, 5, 10) if unit * k >= raw)
    return [every * i for i in range(math.ceil(low / every), math.floor(high / every) + 1)]


def _plans(path: Path) -> Iterator[str]:
    """Yield a table per cluster in `plan.json`; a file that is missing or of another release gives none."""
    try:
        clusters = json.loads(path.read_text())["clusters"]
        tables = [_plan(str(name), content) for name, content in clusters.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    yield from tables


def _plan(name: str, content: dict[str, Any]) -> str:
    titles = ("node", "operations", "parameters", "memory", "ms a microbatch", "sends")
    rows = [
        (
            str(s["node"]), f"{s['first_op']}-{s['first_op'] + s['num_ops'] - 1}", format_bytes(s["parameter_bytes"]),
            format_bytes(s["memory_bytes"]), f"{s['seconds'] * 1000:.1f}", format_bytes(s["sends_bytes"]),
        )
        for s in content["stages"]
    ]  # fmt: skip
    body = "".join(f"<tr>{_tags('td', [escape(cell) for cell in row])}</tr>" for row in rows)
    rate = f"{content['samples_per_s']:,.3g} samples/s expected"
    return (
        f"<table><caption>cluster {escape(name)}: {escape(rate)}</caption>"
        f"<thead><tr>{_tags('th', titles)}</tr></thead><tbody>{body}</tbody></table>"
    )


def _tags(name: str, contents: Sequence[str]) -> str:
    return "".join(f"<{name}>{content}</{name}>" for content in contents)
