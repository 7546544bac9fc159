"""The job that `benchmarks.wan` gives to `ravnest train`: the rivals' model, batch and microbatches."""

from __future__ import annotations

import ravnest
from benchmarks.wan_task import CONFIG, LR, MICROBATCHES, make_batch
from ravnest.examples.gpt import GPT, next_token_loss

job = ravnest.Job(
    model=lambda: GPT(CONFIG),
    loss=next_token_loss,
    optimizer=ravnest.AdamW(LR),
    data=[make_batch(seed=seed) for seed in range(4)],
    name="wan",
    training=ravnest.Training(accumulate=MICROBATCHES),
)
