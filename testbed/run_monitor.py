"""Reads the progress of a training run from its folder: `metrics.jsonl`, `plan.json` and the checkpoints."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from testbed.fault_plan import Progress

__all__ = ["RunFolderMonitor"]

_CHECKPOINT = re.compile(r"\.?step-(\d+)")  # with a leading dot while it is being written


class RunFolderMonitor:
    """Reads what has been added since the last poll. A run without a folder has not started yet."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._offset, self._rest = folder, 0, b""
        self._members: dict[str, list[str]] = {}  # of clusters, first stage first
        self._microbatches: dict[str, int] = {}
        self._updates: dict[str, int] = {}
        self._checkpoints: set[str] = set()
        self._steps = self._rounds = self._inode = 0
        self.lines: list[dict[str, Any]] = []

    def poll(self) -> Progress:
        for line in self._new_lines():
            self.lines.append(line)
            self._rounds = max(self._rounds, line.get("round", 0))
            if "step" in line:
                self._steps += 1
                self._count(line)
        with suppress(FileNotFoundError):
            names = (path.name for path in (self._folder / "checkpoints").iterdir())
            self._checkpoints |= {match[1] for name in names if (match := _CHECKPOINT.match(name)) is not None}
        return Progress(self._microbatches, self._updates, self._steps, self._rounds, len(self._checkpoints))

    def _count(self, line: dict[str, Any]) -> None:
        cluster = line.get("cluster", "")
        if cluster not in self._members:
            self._read_plan()
        names = self._members.get(cluster, [])
        for stage in line.get("stages", ()):
            if stage["stage"] < len(names):
                name = names[stage["stage"]]
                self._microbatches[name] = stage["microbatches"]
                self._updates[name] = stage["updates"]

    def _read_plan(self) -> None:
        with suppress(FileNotFoundError, ValueError):  # it is being written
            content = json.loads((self._folder / "plan.json").read_text())
            for cluster, plan in content.get("clusters", {}).items():
                self._members[cluster] = [stage["node"] for stage in plan["stages"]]

    def _restart_if_replaced(self, inode: int) -> None:
        """A run that resumes from a checkpoint has a new file, without the steps that are repeated."""
        if inode != self._inode:
            self._inode, self._offset, self._rest, self._steps, self.lines = inode, 0, b"", 0, []

    def _new_lines(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError), (self._folder / "metrics.jsonl").open("rb") as file:
            self._restart_if_replaced(os.fstat(file.fileno()).st_ino)
            file.seek(self._offset)
            added = file.read()
            self._offset += len(added)
            *lines, self._rest = (self._rest + added).split(b"\n")
            return [json.loads(line) for line in lines]
        return []
