"""The job that both trees train: a small GPT in plain PyTorch on random tokens, with dropout and tied embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import ravnest
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig(vocab=256, context=64, layers=4, width=128, heads=4, dropout=0.1, tied=True)


class Tokens:
    """The same endless batches each time."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(256, (24, 65), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]


job = ravnest.Job(
    model=lambda: GPT(CONFIG), loss=next_token_loss, optimizer=ravnest.AdamW(1e-3, clip_norm=1.0), data=Tokens()
)
