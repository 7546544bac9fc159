"""Collects the results of a benchmark, checks them against targets, prints tables and writes JSON."""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq,
}  # fmt: skip


@dataclass(frozen=True)
class Check:
    """A measured value against a target such as `<= 1.03`."""

    name: str
    value: float
    target: str
    ok: bool


@dataclass
class Report:
    """Rows of tables and checks; where the columns change, a new table starts."""

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def check(self, name: str, value: float, target: str) -> None:
        """Add a check; `target` is a relation and a number, such as `<= 1.03`."""
        relation, number = target.split()
        self.checks.append(Check(name, value, target, bool(_RELATIONS[relation](value, float(number)))))

    def finish(self, path: Path | None) -> None:
        """Print all tables, and write the JSON file if there is a path."""
        console = Console(width=160)
        for table in (*_tables(self.title, self.rows), *_tables("checks", [asdict(c) for c in self.checks])):
            console.print(table)
        if path is not None:
            machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}
            content = {
                "title": self.title,
                "machine": machine,
                "rows": self.rows,
                "checks": [asdict(c) for c in self.checks],
            }
            path.write_text(json.dumps(content, indent=1) + "\n")


def _tables(title: str, rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """A table for each group of rows with the same columns; the first has the title."""
    for names, group in itertools.groupby(rows, key=tuple):
        yield _table(title, names, list(group))
        title = ""


def _table(title: str, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_text(row[name]) for name in names))
    return table


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and models, about a minute")
    return parser
