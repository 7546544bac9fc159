"""Imports go downward only: each package may use those below it and nothing else of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ravnest

ROOT = Path(ravnest.__file__).parent
OUTSIDE = {"core": {"msgspec"}, "net": {"msgspec", "cryptography"}, "plan": {"msgspec"}}
LAYERS: dict[str, set[str]] = {
    "core": set(),
    "net": {"core"},
    "graph": {"core"},
    "plan": {"core"},
    "runtime": {"core", "graph"},
    "rings": {"core", "net"},
    "profile": {"core", "net", "graph"},
    "coordinator": {"core", "net", "plan"},
    "node": {"core", "net", "graph", "plan", "runtime", "rings", "profile"},
    "dashboard": {"core", "coordinator"},
    "testbed": {"core"},
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Absolute names of all that a module imports, wherever the statement stands."""
    package = ["ravnest", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, node.module] if node.module else base)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    if package not in LAYERS:
        assert "." in package or package == "examples", f"package {package} has no place among the layers"
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "ravnest" and len(parts) > 1:
            assert parts[1] in LAYERS[package] | {package}, f"{package} must not import {name}"


@pytest.mark.parametrize("package", OUTSIDE)
def test_lower_packages_import_little_of_others(package: str) -> None:
    import sys

    allowed = OUTSIDE[package] | {"ravnest", "_typeshed"}
    for path in (ROOT / package).rglob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top in allowed, f"{path.name} imports {name}"


def test_nothing_unpickles_or_evaluates() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in modules():
        tree = ast.parse(path.read_text())
        assert not forbidden & {name.split(".")[0] for name in imports(path)}, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "torch.load", "torch.export.load", "__import__"), path
