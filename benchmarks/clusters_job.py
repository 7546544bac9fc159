"""The job of `benchmarks.clusters_clock`: model and text of char_gpt, in small batches so that slow PCs make many."""

from __future__ import annotations

import ravnest
from ravnest.examples.char_gpt import CONFIG, HELD_OUT_TEXT, TEXT, Windows
from ravnest.examples.gpt import GPT, next_token_loss

BATCH, MICROBATCH = 8, 2
HELD_OUT = 32  # batches

job = ravnest.Job(
    model=lambda: GPT(CONFIG),
    loss=next_token_loss,
    optimizer=ravnest.AdamW(4e-3, schedule=ravnest.constant(warmup_steps=20)),
    data=Windows(TEXT, seed=0, size=BATCH),
    validation=Windows(HELD_OUT_TEXT, seed=1, size=BATCH),
    name="clusters",
    training=ravnest.Training(microbatch=MICROBATCH, validation_batches=HELD_OUT),
)
