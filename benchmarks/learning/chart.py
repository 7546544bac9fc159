"""Draws line charts with logarithmic axes as SVG, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["WIDTH", "Chart", "draw"]

WIDTH, HEIGHT = 460, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 52, 56
_COLOURS = (("#0969da", "#58a6ff"), ("#1a7f37", "#3fb950"), ("#bc4c00", "#f0883e"), ("#8250df", "#a371f7"),
            ("#57606a", "#9da7b3"))  # fmt: skip
_FONT = '12px "DejaVu Sans", "Segoe UI", Helvetica, Arial, sans-serif'

Point = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """Lines by name over common axes; names in `dashed` are references, not measurements."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[Point]]
    dashed: frozenset[str] = frozenset()

    def bounds(self, axis: int) -> tuple[float, float]:
        values = [point[axis] for line in self.lines.values() for point in line]
        return min(values), max(values)


def draw(charts: Sequence[Chart], title: str) -> str:
    """The charts side by side in one picture."""
    charts = [chart for chart in charts if any(chart.lines.values())]
    width = max(1, len(charts)) * WIDTH
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        'role="img" aria-labelledby="title">',
        f'<title id="title">{title}</title>',
        f"<style>{_style()}</style>",
        f'<rect class="page" x="1" y="1" width="{width - 2}" height="{HEIGHT - 2}" rx="10"/>',
    ]
    for number, chart in enumerate(charts):
        elements.append(f'<g transform="translate({number * WIDTH} 0)">')
        elements += _elements(chart)
        elements.append("</g>")
    return "\n".join([*elements, "</svg>"]) + "\n"


def _style() -> str:
    lines = [
        f".page {{ fill: #ffffff; stroke: #d0d7de; }} text {{ fill: #1f2328; font: {_FONT}; }}",
        ".head { font-weight: bold; } .grid { stroke: #d0d7de; } path { fill: none; stroke-width: 2; }",
        ".dashed { stroke-dasharray: 5 4; }",
        *(f".s{i} {{ stroke: {light}; }} .f{i} {{ fill: {light}; }}" for i, (light, _) in enumerate(_COLOURS)),
        "@media (prefers-color-scheme: dark) { .page { fill: #0d1117; stroke: #30363d; } text { fill: #e6edf3; }",
        ".grid { stroke: #30363d; }",
        *(f".s{i} {{ stroke: {dark}; }} .f{i} {{ fill: {dark}; }}" for i, (_, dark) in enumerate(_COLOURS)),
        "}",
    ]
    return " ".join(lines)


def _elements(chart: Chart) -> Iterator[str]:
    (x_low, x_high), (y_low, y_high) = chart.bounds(0), chart.bounds(1)
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def x_of(value: float) -> float:
        return _LEFT + (right - _LEFT) * _share(value, x_low, x_high)

    def y_of(value: float) -> float:
        return bottom - (bottom - _TOP) * _share(value, y_low, y_high)

    yield f'<text class="head" x="{_LEFT}" y="24">{chart.title}</text>'
    for value in _ticks(x_low, x_high):
        yield f'<line class="grid" x1="{x_of(value):.1f}" x2="{x_of(value):.1f}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text x="{x_of(value):.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>'
    for value in _ticks(y_low, y_high):
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y_of(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 16}" text-anchor="middle">{chart.x}</text>'
    yield f'<text x="{_LEFT}" y="{_TOP - 10}">{chart.y}</text>'
    for number, (name, line) in enumerate(chart.lines.items()):
        colour, dashed = number % len(_COLOURS), " dashed" if name in chart.dashed else ""
        path = " L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in line)
        yield f'<path class="s{colour}{dashed}" d="M{path}"/>'
        if not dashed:
            yield from (f'<circle class="f{colour}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3"/>' for x, y in line)
        level = bottom - 12 - 16 * (len(chart.lines) - 1 - number)
        yield f'<path class="s{colour}{dashed}" d="M{_LEFT + 8} {level - 4} h20"/>'
        yield f'<text x="{_LEFT + 34}" y="{level}">{name}</text>'


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten in this range; of two if there are fewer than two of them."""
    for base in (10.0, 2.0):
        first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
        if last > first:
            return [base**power for power in range(first, last + 1)]
    return [low, high]
