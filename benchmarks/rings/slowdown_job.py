"""The job of `benchmarks.rings.slowdown`: a GPT of 39 MB on random tokens."""

from __future__ import annotations

import torch

import ravnest
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig(vocab=256, context=64, layers=3, width=512, heads=8, dropout=0.0)
SEQUENCES = 8  # of a batch, which is an update


def make_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, CONFIG.vocab, (SEQUENCES, CONFIG.context), generator=torch.Generator().manual_seed(seed))
    return ids, ids.roll(-1, 1)


job = ravnest.Job(
    model=lambda: GPT(CONFIG),
    loss=next_token_loss,
    optimizer=ravnest.AdamW(1e-3),
    data=[make_batch(seed) for seed in range(8)] * 1000,
    name="slowdown",
    config=ravnest.TrainingConfig(microbatches_per_step=2),
)
