"""What is trained while things break: a small GPT on real text, as long as nobody says that it is enough."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ravnest
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text

__all__ = ["BATCH", "ENOUGH", "Task", "make_job"]

BATCH = 16
ENOUGH = "enough"  # a file that ends the data


@dataclass(frozen=True)
class Task:
    """`every_s` is how long the data take for a batch, so that those who wait for a processor find one."""

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
    """Batches no faster than from a slow disk, until it is enough; how many there were is written down."""
    for number, batch in enumerate(batches(library_text(), BATCH, task.context, seed=task.seed)):
        if number == task.batches or (folder / ENOUGH).exists():
            break
        time.sleep(task.every_s)
        yield batch
        (folder / "batches").write_text(str(number + 1))
