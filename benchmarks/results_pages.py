"""Writes the tables of a results page from the JSON file of its benchmark.

python -m benchmarks.NAME --json docs/results/data/NAME.json
python -m benchmarks.results_pages

Each `docs/results/data/NAME.json` becomes the part of `docs/results/NAME.md` after the line `MARKER`; the text before
it is written by hand and kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["MARKER", "RESULTS", "page_text"]

Row = Mapping[str, Any]

RESULTS = Path(__file__).parents[1] / "docs" / "results"
MARKER = "<!-- what follows is written by benchmarks.results_pages -->"


def page_text(name: str, page: str, content: Mapping[str, Any]) -> str:
    """The page with its hand-written part kept and the rest from the benchmark's JSON."""
    introduction = page.partition(MARKER)[0].rstrip() or f"# {content['title']}"
    return f"{introduction}\n\n{MARKER}\n\n{_render(name, content)}"


def _render(name: str, content: Mapping[str, Any]) -> str:
    """Command, checks, and one table for each group of rows with the same columns."""
    lines = ["```", f"python -m benchmarks.{name} --json FILE", "```"]
    if machine := content.get("machine"):
        lines += ["", "Measured with " + ", ".join(f"{key} {value}" for key, value in machine.items()) + "."]
    checks = content["checks"]
    if checks:
        num_met = sum(bool(check["ok"]) for check in checks)
        lines += ["", "## Checks", "", f"{num_met} of {len(checks)} targets are met.", ""]
        lines += _table([{**check, "ok": "yes" if check["ok"] else "**no**"} for check in checks])
    if content["rows"]:
        lines += ["", "## Results"]
    for _, rows in itertools.groupby(content["rows"], key=tuple):
        lines += ["", *_table(list(rows))]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    names = list(rows[0])
    is_number = [all(isinstance(row[name], (int, float, type(None))) for row in rows) for name in names]
    yield _line(names)
    yield "|" + "|".join("--:" if number else "---" for number in is_number) + "|"
    for row in rows:
        yield _line([_cell(row[name]) for name in names])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for path in sorted((RESULTS / "data").glob("*.json")):
        page = RESULTS / f"{path.stem}.md"
        text = page.read_text() if page.exists() else ""
        page.write_text(page_text(path.stem, text, json.loads(path.read_text())))


if __name__ == "__main__":
    main()
