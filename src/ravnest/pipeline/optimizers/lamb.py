"""LAMB (You et al., arXiv 1904.00962): Adam with a step length of its own for each parameter.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    r  = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * W
    W <- W - lr * (|W| / |r|) * r

The ratio of norms is 1 where either is 0, and for parameters of less than two dimensions, which have no weight decay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LayerwiseAdam"]


class LayerwiseAdam(torch.optim.Optimizer):
    """The arithmetic of LAMB for whole parameters."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, *, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6, weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)


def _update(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
    beta1, beta2 = group["betas"]
    state["step"] += 1
    count = float(state["step"])
    first = state["exp_avg"].lerp_(gradient, 1 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    update = first / (1 - beta1**count) / (second / (1 - beta2**count)).sqrt_().add_(group["eps"])
    length: Tensor | float = 1.0
    if weight.ndim >= 2:
        update.add_(weight, alpha=group["weight_decay"])
        norms = weight.norm(), update.norm()
        length = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
    weight.sub_(update.mul_(length), alpha=group["lr"])
