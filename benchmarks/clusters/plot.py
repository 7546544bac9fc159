"""Draws the results of `benchmarks.clusters` as SVG: by samples and by the clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.clusters.wall_clock import WallClockResult

__all__ = ["draw"]

WIDTH, HEIGHT = 980, 400
SMOOTH_S = 6.0  # seconds of training averaged into one point
COLOURS = {1: 0, 2: 1, 4: 2}

Gaps = Mapping[int, Mapping[str, Mapping[int, float]]]

_STYLE = """
    .page  { fill: #ffffff; stroke: #d0d7de; }
    .text  { fill: #1f2328; font: 13px "DejaVu Sans", "Segoe UI", Helvetica, Arial, sans-serif; }
    .small { fill: #57606a; font: 11.5px "DejaVu Sans", "Segoe UI", Helvetica, Arial, sans-serif; }
    .head  { fill: #1f2328; font: bold 13px "DejaVu Sans", "Segoe UI", Helvetica, Arial, sans-serif; }
    .grid  { stroke: #d0d7de; stroke-width: 1; }
    .goal  { stroke: #57606a; stroke-width: 1.5; stroke-dasharray: 6 4; }
    .l0    { stroke: #218bff; stroke-width: 2; fill: none; }
    .l1    { stroke: #2da44e; stroke-width: 2; fill: none; }
    .l2    { stroke: #e16f24; stroke-width: 2; fill: none; }
    .dash  { stroke-dasharray: 3 4; }
    .d0    { fill: #218bff; }
    .d1    { fill: #2da44e; }
    .d2    { fill: #e16f24; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; stroke: #30363d; }
      .text, .head { fill: #e6edf3; }
      .small { fill: #9da7b3; }
      .grid { stroke: #30363d; }
      .goal { stroke: #9da7b3; }
      .l0 { stroke: #58a6ff; }
      .l1 { stroke: #3fb950; }
      .l2 { stroke: #f0883e; }
      .d0 { fill: #58a6ff; }
      .d1 { fill: #3fb950; }
      .d2 { fill: #f0883e; }
    }
"""


@dataclass(frozen=True)
class Axis:
    """Maps values to coordinates of the picture."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        fraction = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + fraction * (self.stop - self.start)


def draw(gaps: Gaps, runs: Sequence[WallClockResult]) -> str:
    """Draw both charts side by side, or the only one with results."""
    left, width = (0 if gaps else WIDTH // 2), (WIDTH if runs and gaps else WIDTH // 2)
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{left} 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" role="img" aria-labelledby="title desc">',
        '<title id="title">Training quality of clusters that average</title>',
        f'<desc id="desc">{_description(gaps, runs)}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" x="{left + 1}" y="1" width="{width - 2}" height="{HEIGHT - 2}" rx="10"/>',
        *_by_samples(gaps),
        *_by_clock(runs),
        "</svg>",
    ]
    return "\n".join(elements) + "\n"


def _description(gaps: Gaps, runs: Sequence[WallClockResult]) -> str:
    costs = [
        f"{copies} copies, {outer}: " + ", ".join(f"{gap:+.1%} at {every} updates" for every, gap in found.items())
        for copies, outers in gaps.items()
        for outer, found in outers.items()
    ]
    ends = [f"{run.clusters} clusters: held-out loss {run.loss:.3f}" for run in runs]
    return "; ".join([*costs, *ends])


def _by_samples(gaps: Gaps) -> Iterator[str]:
    if not gaps:
        return
    everys = sorted({every for outers in gaps.values() for found in outers.values() for every in found})
    highest = max(gap for outers in gaps.values() for found in outers.values() for gap in found.values())
    x = Axis(math.log2(everys[0]) - 0.5, math.log2(everys[-1]) + 0.5, 76, 440)
    y = Axis(-0.02, min(max(0.06, math.ceil(highest * 50) / 50), 0.2), 320, 64)
    yield _text("head", 24, 32, "By samples: loss relative to synchronous training")
    yield from _levels(x, y, 0.02, lambda value: f"{value:+.0%}")
    yield f'<line class="goal" x1="{x.start}" x2="{x.stop}" y1="{y(0.02):.1f}" y2="{y(0.02):.1f}"/>'
    for every in everys:
        yield _text("small", x(math.log2(every)), 340, str(every), "middle")
    yield _text("small", (x.start + x.stop) / 2, 362, "updates of a cluster between two averagings", "middle")
    legend = 0
    for copies, outers in gaps.items():
        for outer, found in outers.items():
            points = [(x(math.log2(every)), y(gap)) for every, gap in sorted(found.items())]
            kind = f"l{COLOURS[copies]}" + (" dash" if outer != "plain" else "")
            yield _path(kind, points)
            yield from (_dot(COLOURS[copies], *point) for point in points)
            yield _path(kind, [(92, 76 + 18 * legend), (122, 76 + 18 * legend)])
            yield _text("small", 130, 80 + 18 * legend, f"{copies} clusters, {outer}")
            legend += 1


def _by_clock(runs: Sequence[WallClockResult]) -> Iterator[str]:
    if not runs:
        return
    lines = {run.clusters: _smooth(run) for run in runs}
    values = [loss for line in lines.values() for _, loss in line] + [run.loss for run in runs]
    x = Axis(0, math.ceil(max(run.seconds for run in runs) / 10) * 10, 560, 900)
    y = Axis(math.floor(min(values) * 5) / 5, min(math.ceil(max(values) * 5) / 5, 3.4), 320, 64)
    yield _text("head", 508, 32, "By the clock: loss of one, two and four clusters of two PCs")
    yield from _levels(x, y, 0.2, lambda value: f"{value:.1f}")
    for second in range(0, int(x.high) + 1, 20):
        yield _text("small", x(second), 340, str(second), "middle")
    yield _text(
        "small", (x.start + x.stop) / 2, 362, "seconds of training; dots: held-out loss of the last average", "middle"
    )
    for run in runs:
        colour = COLOURS[run.clusters]
        yield _path(f"l{colour}", [(x(second), y(loss)) for second, loss in lines[run.clusters]])
        yield _dot(colour, x(run.seconds) + 8, y(run.loss))
        yield _text("small", x(run.seconds) + 16, y(run.loss) + 4, f"{run.clusters}: {run.loss:.3f}")


def _smooth(run: WallClockResult) -> list[tuple[float, float]]:
    """Mean losses of equal periods of time."""
    groups: dict[int, list[float]] = {}
    for second, loss in run.curve:
        groups.setdefault(int(second / SMOOTH_S), []).append(loss)
    return [((group + 0.5) * SMOOTH_S, statistics.fmean(losses)) for group, losses in sorted(groups.items())]


def _levels(x: Axis, y: Axis, step: float, write: Callable[[float], str]) -> Iterator[str]:
    for number in range(round((y.high - y.low) / step) + 1):
        value = y.low + number * step
        yield f'<line class="grid" x1="{x.start}" x2="{x.stop}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        yield _text("small", x.start - 8, y(value) + 4, write(value), "end")


def _path(kind: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _dot(colour: int, x: float, y: float) -> str:
    return f'<circle class="d{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
