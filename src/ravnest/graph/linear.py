"""A linear layer by the quicker of torch's two matrix libraries, where rounding need not be that of plain PyTorch.

On processors of AMD, products in float32 of the sizes that layers have take 5 to 8 % less with oneDNN than with the
library that `torch.nn.functional.linear` calls. Which one is used depends on the machine alone, never on a measurement,
so that the same run on the same machine gives the same bits.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["linear", "onednn_is_quicker"]


@cache
def onednn_is_quicker() -> bool:
    """Whether this is a processor of AMD and this torch has oneDNN's product."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return "AuthenticAMD" in platform.processor() + _cpu_info()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, up to rounding."""
    plain = x.device.type == "cpu" and x.dtype is weight.dtype is torch.float32 and x.dim() >= 2 and weight.dim() == 2
    if not plain or not onednn_is_quicker() or torch.is_autocast_enabled("cpu"):
        return torch.ops.aten.linear.default(x, weight, bias)  # type: ignore[no-any-return]
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


class _Linear(torch.autograd.Function):
    """y = x W^T + b,  dx = g W,  dW = g^T x,  db = sum of g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        gradient = gradients[0].flatten(0, -2)
        return (
            _product(gradient, weight.t()).view(x.shape) if of_x else None,
            gradient.t().mm(x.flatten(0, -2)) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _cpu_info() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            return file.read(200)
    except OSError:
        return ""
