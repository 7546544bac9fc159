"""Figures by name, in one file: what was measured is not measured again, so that parts can be done one at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Kept"]


class Kept:
    """Without a folder figures are only remembered."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / "figures.json" if folder is not None else None
        self._found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            self._found = json.loads(self._path.read_text())

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        if name not in self._found:
            self._found[name] = measure()
            sys.stderr.write(f"{name}: {str(self._found[name])[:80]}\n")
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps(self._found, indent=0) + "\n")
        return self._found[name]
