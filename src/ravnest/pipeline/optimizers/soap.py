"""SOAP (Vyas et al., arXiv 2409.11321): Adam in the eigenbasis of the covariances of a matrix's gradients.

    L <- b2 L + (1 - b2) G G^T,   R <- b2 R + (1 - b2) G^T G,   with eigenvectors U of L and V of R
    m <- b1 m + (1 - b1) G,       v <- b2 v + (1 - b2) (U^T G V)^2
    W <- W - lr * U (U^T m V / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)) V^T

The bases are computed exactly for the first gradient, which changes nothing else: in its own eigenbasis it is
diagonal, and the other elements of its second moment would be rounding errors. Every `basis_every` steps they follow
the covariances by one step of orthogonal iteration, with the largest eigenvalues first; the rows and columns of v move
with them. The first moment is kept in the parameter's own coordinates, in which averages of several copies make sense.

A side that is longer than `max_dim`, or than `_MAX_RATIO` times the other, is not rotated: its basis is the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MAX_DIM", "RotatedAdam", "rotated_sides"]

MAX_DIM = 2048
_MAX_RATIO = 4
_SIDES = ("left", "right")
_BASIS = "_basis"


def rotated_sides(shape: Sequence[int], max_dim: int) -> dict[str, int]:
    """The sides of a matrix that are rotated, with their lengths."""
    m, n = shape
    others = ((m, n), (n, m))
    return {
        side: length
        for side, (length, other) in zip(_SIDES, others, strict=True)
        if length <= min(max_dim, _MAX_RATIO * other)
    }


class RotatedAdam(torch.optim.Optimizer):
    """The arithmetic of SOAP for matrices."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, *, betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8, weight_decay: float = 0.01, basis_every: int = 10, max_dim: int = MAX_DIM,
    ) -> None:  # fmt: skip
        settings = {"basis_every": basis_every, "max_dim": max_dim}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **settings})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient; the first time, only compute their bases."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if state:
                    _update(parameter, parameter.grad, state, group)
                else:
                    state.update(_initial_state(parameter.grad, group))


def _initial_state(gradient: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}
    for side in rotated_sides(gradient.shape, group["max_dim"]):
        state[side] = _covariance(gradient, side) * (1 - group["betas"][1])
        state[side + _BASIS] = torch.linalg.eigh(torch.nan_to_num(state[side])).eigenvectors.flip(1).contiguous()
    return state


def _update(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    state["step"] += 1
    count = int(state["step"])
    rotated = _rotate(gradient, state)
    first = state["exp_avg"].lerp_(gradient, 1 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
    update = _rotate(first, state).div_((second / (1 - beta2**count)).sqrt_().add_(group["eps"]))
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_(_rotate_back(update, state), alpha=group["lr"] / (1 - beta1**count))
    for side in _SIDES:
        if side in state:
            state[side].lerp_(_covariance(gradient, side), 1 - beta2)
            if count % group["basis_every"] == 0:
                _follow(state, side)


def _covariance(gradient: Tensor, side: str) -> Tensor:
    return gradient @ gradient.T if side == "left" else gradient.T @ gradient


def _rotate(matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
    """A copy of a matrix in the present bases."""
    left, right = state.get("left" + _BASIS), state.get("right" + _BASIS)
    matrix = matrix.clone() if left is None else left.T @ matrix
    return matrix if right is None else matrix @ right


def _rotate_back(matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
    left, right = state.get("left" + _BASIS), state.get("right" + _BASIS)
    matrix = matrix if left is None else left @ matrix
    return matrix if right is None else matrix @ right.T


def _follow(state: dict[str, Tensor], side: str) -> None:
    """Improve a basis by one orthogonal iteration, the largest eigenvalue first."""
    covariance, basis = state[side], state[side + _BASIS]
    product = covariance @ basis
    order = (basis * product).sum(0).argsort(descending=True, stable=True)
    state[side + _BASIS].copy_(torch.linalg.qr(product[:, order]).Q)
    dim = 0 if side == "left" else 1
    state["exp_avg_sq"].copy_(state["exp_avg_sq"].index_select(dim, order))
