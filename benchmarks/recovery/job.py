"""The job of the recovery benchmark: a small GPT on real text, until a file ends the data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ravnest
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text

__all__ = ["BATCH", "END_FILE", "Task", "make_job"]

BATCH = 16
END_FILE = "enough"  # its presence in the folder ends the data


@dataclass(frozen=True)
class Task:
    """The model and its data; `every_s` is the time per batch, which leaves CPU time for other processes."""

    width: int = 64
    layers: int = 3
    context: int = 32
    every_s: float = 0.0
    seed: int = 0
    batches: int | None = None

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(
            vocab=256, context=self.context, layers=self.layers, width=self.width, heads=2, dropout=0.0
        )  # fmt: skip


def make_job(task: Task, folder: Path) -> ravnest.Job:
    return ravnest.Job(
        lambda: GPT(task.config), next_token_loss, _data(task, folder), optimizer=ravnest.AdamW(3e-3)
    )  # fmt: skip


def _data(task: Task, folder: Path) -> Iterator[Any]:
    """Batches at a limited rate until the end file exists; their number is written to the file `batches`."""
    for number, batch in enumerate(batches(library_text(), BATCH, task.context, seed=task.seed)):
        if number == task.batches or (folder / END_FILE).exists():
            break
        time.sleep(task.every_s)
        yield batch
        (folder / "batches").write_text(str(number + 1))
