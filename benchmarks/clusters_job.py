"""The job of `benchmarks.clusters_clock`: model and text of char_gpt, in small batches so that slow PCs make many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

import ravnest
from ravnest.examples.char_gpt import CONFIG
from ravnest.examples.gpt import GPT, next_token_loss
from ravnest.examples.text import batches, library_text

BATCH, MICROBATCH = 8, 2
HELD_OUT = 32  # batches

_text = library_text()
_split = len(_text) * 9 // 10


class Windows:
    """Random windows of a text; each iteration begins with the same ones."""

    def __init__(self, text: Tensor, seed: int) -> None:
        self.text, self.seed = text, seed

    def __iter__(self) -> Iterator[Any]:
        return batches(self.text, BATCH, CONFIG.context, self.seed)


job = ravnest.Job(
    model=lambda: GPT(CONFIG),
    loss=next_token_loss,
    optimizer=ravnest.AdamW(4e-3, schedule=ravnest.constant(warmup_steps=20)),
    data=Windows(_text[:_split], seed=0),
    validation=Windows(_text[_split:], seed=1),
    name="clusters",
    training=ravnest.Training(microbatch=MICROBATCH, validation_batches=HELD_OUT),
)
