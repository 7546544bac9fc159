"""Train a CNN with batch norm on scikit-learn's handwritten digits: over 95 % accuracy on held-out ones.

ravnest train digits_cnn.py --local 2 --steps 200
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ravnest

BATCH = 64


class DigitsCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Dropout(0.2),
        )  # fmt: skip
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits


def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.cross_entropy(logits, targets), {"accuracy": (logits.argmax(1) == targets).float().mean()}


class Digits:
    """Batches in an order shuffled by a seed."""

    def __init__(self, images: Tensor, targets: Tensor, seed: int) -> None:
        self.images, self.targets, self.seed = images, targets, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.seed))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            indices = order[start : start + BATCH]
            yield self.images[indices], self.targets[indices]


_data = load_digits()
_images = torch.tensor(_data.images, dtype=torch.float32)[:, None] / 16
_targets = torch.tensor(_data.target)
_split = 1437  # the last fifth is held out

job = ravnest.Job(
    model=DigitsCNN,
    loss=loss,
    optimizer=ravnest.AdamW(2e-3),
    data=Digits(_images[:_split], _targets[:_split], seed=0),
    validation=Digits(_images[_split:], _targets[_split:], seed=0),
    name="digits_cnn",
    config=ravnest.TrainingConfig(steps=200, on="local:2"),
)


def after(run: ravnest.Run) -> str:
    return f"held-out accuracy {run.evaluations[-1]['accuracy']:.1%}" if run.evaluations else "not evaluated"
