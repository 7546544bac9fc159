"""What a machine's speed is measured on: a job's own program, or a mix of what models are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..graph import Program, trace

__all__ = ["Workload", "reference_mix"]


@dataclass(frozen=True)
class Workload:
    """A program at a microbatch size."""

    program: Program
    batch: int


def reference_mix() -> list[Workload]:
    """A block of a transformer and one of convolutions, both with the sizes of a small model."""
    mix = [(_transformer, (4, 128, 512)), (_convolutions, (4, 64, 28, 28))]
    return [Workload(trace(build, None, torch.zeros(shape)), batch=shape[0]) for build, shape in mix]


class _Objective(nn.Module):
    """Something with a loss to go back from."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(x).square().mean()
        return loss


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    return _Objective(layer)


def _convolutions() -> nn.Module:
    convolution = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
    layers = [convolution(64, 64), nn.BatchNorm2d(64), nn.ReLU(), convolution(64, 128), nn.BatchNorm2d(128), nn.ReLU()]
    return _Objective(nn.Sequential(*layers))
