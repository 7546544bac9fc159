"""`metrics.jsonl`: a line of JSON per update and per evaluation. A run that goes on from a checkpoint goes on with it.

A line is written whole or not at all, and a disk that is full stops nobody: what could not be written is missing.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

__all__ = ["MetricsFile"]


class MetricsFile:
    """`after` is the step to go on after: lines of later ones, which are trained again, go. `seconds` were before."""

    def __init__(self, path: Path, *, after: int = 0) -> None:
        kept = [line for line in _lines(path) if _step(line) <= after] if after else []
        self.seconds = max((float(line.get("seconds", 0.0)) for line in kept), default=0.0)
        draft = path.with_name(f".{path.name}")
        draft.write_text("".join(json.dumps(line) + "\n" for line in kept))
        draft.replace(path)
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        """Raises `OSError` if there is no room for the line; then nothing of it is there."""
        text, before = json.dumps(line).encode() + b"\n", self._file.tell()
        try:
            if self._file.write(text) != len(text):
                raise OSError("the disk is full")
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
                self._file.seek(before)
            raise


def _lines(path: Path) -> list[dict[str, Any]]:
    """Those that are whole: a run that was killed may have left half of one."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(text))
    return [line for line in found if isinstance(line, dict)]


def _step(line: dict[str, Any]) -> int:
    return int(line.get("step", line.get("evaluation", 0)))
