"""Local response normalisation over channels: `torch.nn.CrossMapLRN2d` in operations that a stage may use.

torch's own autograd function resizes tensors and loops over the samples of a batch. This one makes the same sums in the
same order for all samples at once, so that both give the same bits:

    scale = k + alpha / size * (moving sum of x^2 over channels),    y = x * scale^-beta
    dx = g * scale^-beta - 2 alpha beta / size * x * (moving sum of g y / scale over channels)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LocalResponseNorm"]


class LocalResponseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1) -> Tensor:
        if x.dim() != 4:
            raise ValueError(f"CrossMapLRN2d takes a tensor with 4 dimensions, got {x.dim()}")
        channels, before = x.shape[1], int((size - 1) / 2 + 1)
        square = x.pow(2).unbind(1)
        total = torch.zeros_like(square[0])
        for c in range(min(before, channels)):
            total = total + square[c]
        sums = [total]
        for c in range(1, channels):
            if c < channels - before + 1:
                total = total + square[c + before - 1]
            if c > before:
                total = total - square[c - before]
            sums.append(total)
        scale = torch.stack(sums, 1) * (alpha / size) + k
        y = scale.pow(-beta) * x
        ctx.size, ctx.alpha, ctx.beta = size, alpha, beta
        ctx.save_for_backward(x, y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, (x, y, scale) = gradients[0], ctx.saved_tensors
        size, channels = ctx.size, x.shape[1]
        factor, first = 2 * ctx.alpha * ctx.beta / size, int(size - (size - 1) / 2)
        ratio = gradient * y / scale
        padded = torch.nn.functional.pad(ratio, (0, 0, 0, 0, first, size - 1 - first)).unbind(1)
        total = torch.stack(padded[: size - 1]).sum(0) if size > 1 else torch.zeros_like(padded[0])
        sums = []
        for c in range(channels):
            total = total + padded[c + size - 1]
            sums.append(total)
            total = total - padded[c]
        own = scale.pow(-ctx.beta) * gradient
        return torch.addcmul(own, x, torch.stack(sums, 1), value=-factor), None, None, None, None
