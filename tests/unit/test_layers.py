"""Imports go downward only: each package may use those listed for it and nothing else of ours."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ravnest

ROOT = Path(ravnest.__file__).parent
TREES = [Path(__file__).parents[2] / name for name in ("tests", "benchmarks", "testbed", "docs")]
OUTSIDE = {
    "errors": set[str](),
    "core": {"msgspec"},
    "protocol": {"msgspec"},
    "transport": {"msgspec", "cryptography"},
    "planner": {"msgspec"},
    "simulator": {"msgspec"},
}
FOUNDATION = {"errors", "core", "protocol"}
DATA_PLANE = {"transport", "graph", "planner", "averaging", "pipeline", "profiling"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "core": {"errors"},
    "protocol": {"errors", "core"},
    "transport": FOUNDATION,
    "graph": FOUNDATION,
    "planner": FOUNDATION,
    "averaging": FOUNDATION | {"transport"},
    "pipeline": FOUNDATION | {"graph"},
    "profiling": FOUNDATION | {"transport", "graph", "planner", "pipeline"},
    "simulator": FOUNDATION | {"planner"},
    "coordinator": FOUNDATION | {"transport", "planner", "profiling"},
    "dashboard": FOUNDATION | {"coordinator"},
    "worker": FOUNDATION | DATA_PLANE,
    "node": FOUNDATION | DATA_PLANE | {"worker"},
    "events": {"core"},
    "trackers": {"core", "events"},
    "config": FOUNDATION | DATA_PLANE | {"trackers"},
    "run": FOUNDATION
    | DATA_PLANE
    | {"config", "events", "trackers", "simulator", "coordinator", "dashboard", "worker", "node"},
    "api": FOUNDATION | DATA_PLANE | {"config", "run"},
    "examples": {"api", "run"},
    "cli": FOUNDATION | DATA_PLANE | {"config", "simulator", "coordinator", "dashboard", "node", "run", "api"},
    "lr": {"pipeline"},
    "staleness": {"pipeline"},
    "__init__": FOUNDATION | {"config", "api", "events", "trackers", "pipeline", "lr", "staleness"},
    "__main__": {"cli"},
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Absolute names of all imports of a module, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: imports are absolute"
            assert node.module is not None
            yield from (
                f"{node.module}.{alias.name}" if node.module == "ravnest" else node.module for alias in node.names
            )


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    room = room_of(path)
    assert room in LAYERS, f"{room} has no place among the layers"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "ravnest" and parts[1:] not in ([], ["__version__"]):
            assert parts[1] in LAYERS[room] | {room}, f"{room} must not import {name}"
        assert parts[0] not in ("testbed", "tests", "benchmarks"), f"{room} must not import {name}"


@pytest.mark.parametrize("room", OUTSIDE)
def test_lower_rooms_import_little_of_others(room: str) -> None:
    allowed = OUTSIDE[room] | {"ravnest", "_typeshed"}
    for path in modules():
        if room_of(path) == room:
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


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("ravnest.node.agent", ["torch"]), ("ravnest.worker.process", ["cryptography", "aiohttp", "sympy"])],
)
def test_processes_import_only_what_they_need(module: str, heavy: list[str]) -> None:
    """An agent of 60 MB never loads torch; a worker of a local run loads no certificates."""
    code = f"import sys, {module}; sys.exit(', '.join(name for name in {heavy} if name in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_public_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_exported_names_are_used_outside_their_module() -> None:
    """A name in `__all__` that no other file imports is private, or dead."""
    files = {path: path.read_text() for folder in (ROOT, *TREES) for path in folder.rglob("*.py")}
    imported = {alias.name for text in files.values() for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom) for alias in node.names}  # fmt: skip
    for path in modules():
        for name in exported(ast.parse(files[path])):
            assert name in imported or path.name == "__init__.py", f"{path}: {name} is imported nowhere"


def exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []
