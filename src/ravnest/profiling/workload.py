"""Workloads to measure a machine's speed on: a job's own program, or a reference mix of common layers.

The mix runs in plain torch without tracing, so that a PC that joins is measured within seconds; its FLOPs are counted
by hand. A product of an m x k by a k x n matrix is 2 m k n; backward takes twice as much as forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ravnest.graph import Program

__all__ = ["WorkloadBlock", "Workload", "reference_mix", "forward_backward"]

_BATCH, _LENGTH, _WIDTH, _HEADS = 4, 128, 512, 8
_CHANNELS, _SIDE = 64, 28


@dataclass(frozen=True)
class Workload:
    """A program at a microbatch size."""

    program: Program
    batch: int


@dataclass(frozen=True)
class WorkloadBlock:
    """Layers, the shape of their input, and the FLOPs of a forward and a backward pass."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    flops: int


def reference_mix() -> list[WorkloadBlock]:
    """A transformer block and a convolution block, both with the sizes of a small model."""
    tokens = _BATCH * _LENGTH
    linear = 2 * tokens * 12 * _WIDTH**2  # query, key, value and out: 4 width^2; two of the fourfold width: 8
    attention = 2 * (2 * tokens * _LENGTH * _WIDTH)
    pixels = _BATCH * _SIDE**2
    convolved = 2 * pixels * 9 * (_CHANNELS * _CHANNELS + _CHANNELS * 2 * _CHANNELS)
    return [
        WorkloadBlock("a transformer block", _Transformer, (_BATCH, _LENGTH, _WIDTH), 3 * (linear + attention)),
        WorkloadBlock("a convolution block", _convolutions, (_BATCH, _CHANNELS, _SIDE, _SIDE), 3 * convolved),
    ]


def forward_backward(block: nn.Module, x: Tensor) -> None:
    """A forward and a backward pass."""
    loss: Tensor = block(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]


class _Transformer(nn.Module):
    """Written out as models do, so that a pass is the same operations on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.wide, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.before(x)).view(batch, length, 3, _HEADS, width // _HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        widened: Tensor = nn.functional.gelu(self.wide(self.between(x)))
        return x + torch.as_tensor(self.narrow(widened))


def _convolutions() -> nn.Module:
    convolution = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
    wide = 2 * _CHANNELS
    return nn.Sequential(
        convolution(_CHANNELS, _CHANNELS), nn.BatchNorm2d(_CHANNELS), nn.ReLU(),
        convolution(_CHANNELS, wide), nn.BatchNorm2d(wide), nn.ReLU(),
    )  # fmt: skip
