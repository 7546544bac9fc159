"""The job of `benchmarks.clusters.wall_clock`: char_gpt with small batches, so that slow PCs make many updates."""

from __future__ import annotations

import ravnest
from ravnest.examples.char_gpt import CONFIG, HELD_OUT_TEXT, TEXT, TextWindows
from ravnest.examples.gpt import GPT, next_token_loss

BATCH, MICROBATCH = 8, 2
HELD_OUT = 32  # batches

job = ravnest.Job(
    model=lambda: GPT(CONFIG),
    loss=next_token_loss,
    optimizer=ravnest.AdamW(4e-3, schedule=ravnest.lr.constant(warmup_steps=20)),
    data=TextWindows(TEXT, seed=0, size=BATCH),
    validation=TextWindows(HELD_OUT_TEXT, seed=1, size=BATCH),
    name="clusters",
    config=ravnest.TrainingConfig(microbatch=MICROBATCH, validation_batches=HELD_OUT),
)
