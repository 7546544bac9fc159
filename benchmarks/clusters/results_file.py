"""Stores results by name in one file and does not measure them again, so that parts can be measured one at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["ResultsFile"]


class ResultsFile:
    """Results by name; without a folder they are kept in memory only."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / "figures.json" if folder is not None else None
        self._results: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            self._results = json.loads(self._path.read_text())

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The stored result, or that of `measure`, which is then stored."""
        if name not in self._results:
            self._results[name] = measure()
            sys.stderr.write(f"{name}: {str(self._results[name])[:80]}\n")
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps(self._results, indent=0) + "\n")
        return self._results[name]
