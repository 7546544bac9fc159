"""Directories of runs."""

from __future__ import annotations

import time
from pathlib import Path

from ravnest.run.checkpoint.format import Checkpoint

__all__ = ["new_folder", "resumed_folder"]


def new_folder(folder: Path | str | None, name: str) -> Path:
    """Return the directory of a new run: the given one, or a new one under `runs/`."""
    if folder is not None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if (path / "model.safetensors").exists():
            raise ValueError(f"{path} holds a finished run: choose another directory or remove it")
        return path.resolve()
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):
        path = base if not attempt else base.with_name(f"{base.name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path.resolve()
    raise ValueError(f"{base} and {base.name}-1 to {base.name}-999 exist: choose another directory")


def resumed_folder(folder: Path | str | None, start: Checkpoint) -> Path:
    """Return the directory of a run that is resumed: its own, or another that was given."""
    if folder is None or Path(folder).resolve() == start.run:
        return start.run
    return new_folder(folder, "")
