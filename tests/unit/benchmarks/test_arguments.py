"""Benchmarks read only arguments that they declare."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "benchmarks"
MAINS = sorted(path for path in ROOT.rglob("*.py") if "arguments(__doc__)" in path.read_text())
_COMMON = {"json", "quick"}  # of `benchmarks.report.arguments`


@pytest.mark.parametrize("path", MAINS, ids=lambda path: str(path.relative_to(ROOT)))
def test_arguments_that_are_read_are_declared(path: Path) -> None:
    tree = ast.parse(path.read_text())
    declared, read = set(_COMMON), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
            declared.add(node.value[2:].replace("-", "_"))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "options":
            read.add(node.attr)
    assert read <= declared
