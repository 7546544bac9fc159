"""Writes one Markdown page of results for each JSON file of a benchmark.

python -m benchmarks.results_pages --json-dir DIR --out docs/results

A file `DIR/NAME.json`, written by `python -m benchmarks.NAME --json DIR/NAME.json`, becomes the page `NAME.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["render_page"]

Row = Mapping[str, Any]


def render_page(name: str, content: Mapping[str, Any]) -> str:
    """The page of a benchmark: title, command, checks, and one table for each group of rows with the same columns."""
    lines = [f"# {content['title']}", "", "```", f"python -m benchmarks.{name} --json FILE", "```"]
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
    parser.add_argument("--json-dir", type=Path, required=True, metavar="DIR", help="folder with the JSON files")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write the pages to")
    options = parser.parse_args()
    paths = sorted(options.json_dir.glob("*.json"))
    if not paths:
        parser.error(f"{options.json_dir} contains no JSON file")
    options.out.mkdir(parents=True, exist_ok=True)
    for path in paths:
        (options.out / f"{path.stem}.md").write_text(render_page(path.stem, json.loads(path.read_text())))


if __name__ == "__main__":
    main()
