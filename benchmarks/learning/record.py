"""Results by experiment and seed, appended as JSON lines, so that a stopped run continues and several share a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.learning.experiment import Experiment, changes, key_of

__all__ = ["Record", "Result"]


class Result(msgspec.Struct, frozen=True):
    """The end of one training: held-out loss, the curve of training losses, and further measured numbers."""

    loss: float
    curve: tuple[float, ...] = ()
    numbers: dict[str, float] = {}


class Record:
    """The results in a file; without a path they are kept in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._read_bytes = path, 0
        self._results: dict[tuple[str, int], Result] = {}
        self.runs: dict[str, Any] = {}  # what was measured in real runs, by name
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have appended; a line that is not complete is read next time."""
        if self._path is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            if "run" in entry:
                self.runs[entry["run"]] = entry["measured"]
                continue
            experiment = msgspec.convert(entry["experiment"], Experiment)
            self._results[key_of(experiment), entry["seed"]] = msgspec.convert(entry["result"], Result)

    def find(self, experiment: Experiment, seed: int) -> Result | None:
        return self._results.get((key_of(experiment), seed))

    def add(self, experiment: Experiment, seed: int, result: Result, seconds: float) -> None:
        """Store the result of a training."""
        self._results[key_of(experiment), seed] = result
        entry: dict[str, Any] = {
            "experiment": changes(experiment), "seed": seed, "seconds": round(seconds, 1),
            "result": msgspec.to_builtins(result),
        }  # fmt: skip
        self._append(entry)

    def add_run(self, name: str, measured: Any) -> None:
        """Store what was measured in a real run, as plain data."""
        self.runs[name] = measured
        self._append({"run": name, "measured": measured})

    def _append(self, entry: dict[str, Any]) -> None:
        """Append with one write, so that lines of several processes do not mix."""
        if self._path is None:
            return
        line = (json.dumps(entry) + "\n").encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
