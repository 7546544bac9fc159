"""Train a small GPT to sort: it reads six digits and outputs them in order.

ravnest train sorter.py --local 2 --steps 600
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import ravnest
from ravnest.examples.gpt import GPT, GPTConfig

LENGTH, DIGITS, BATCH = 6, 10, 64
CONFIG = GPTConfig(vocab=DIGITS, context=2 * LENGTH - 1, layers=3, width=48, heads=3, dropout=0.0)


class Lists:
    """Endless lists of digits, each followed by its sorted form; only the sorted form counts in the loss."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            numbers = torch.randint(0, DIGITS, (BATCH, LENGTH), generator=generator)
            sequence = torch.cat([numbers, numbers.sort(1).values], 1)
            targets = sequence[:, 1:].clone()
            targets[:, : LENGTH - 1] = -100
            yield sequence[:, :-1], targets


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def sort(weights: Mapping[str, Tensor], numbers: list[int]) -> list[int]:
    """Sort `numbers` with the trained model."""
    model = GPT(CONFIG).eval()
    model.load_state_dict(dict(weights))
    ids = torch.tensor([numbers])
    with torch.no_grad():
        for _ in range(LENGTH):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids[0, LENGTH:].tolist()


job = ravnest.Job(
    model=lambda: GPT(CONFIG),
    loss=loss,
    optimizer=ravnest.AdamW(2e-3, schedule=ravnest.lr.constant(warmup_steps=20)),
    data=Lists(seed=0),
    validation=Lists(seed=1),
    name="sorter",
    config=ravnest.TrainingConfig(steps=600, on="local:2"),
)


def after(run: ravnest.Run) -> str:
    numbers = [7, 2, 9, 0, 2, 5]
    return f"{numbers} sorted by the model: {sort(run.state_dict(), numbers)}"
