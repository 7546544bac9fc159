"""Sums of gradients in memory that is allocated once.

Autograd makes the gradient of a parameter as a new tensor. It is added to the parameter's buffer at once and dropped,
so that only one of them exists at a time besides the sums, and the heap is not fragmented by large tensors of different
lifetimes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ravnest.pipeline.packing import chunks

__all__ = ["GradientBuffers", "add_into", "as_bfloat16", "squared_norm"]


class GradientBuffers:
    """The gradients of one step of these parameters, as sums of type `dtype`."""

    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._sums = {name: torch.empty_like(t, dtype=dtype) for name, t in parameters.items()}
        self._leaves: Mapping[str, Tensor] = {}  # that report to this object
        self._added: set[str] = set()

    def collect_from(self, leaves: Mapping[str, Tensor]) -> None:
        """Collect the gradients of these leaf tensors from now on."""
        if self._leaves is not leaves:
            self._leaves = leaves
            for name, leaf in leaves.items():
                leaf.register_post_accumulate_grad_hook(partial(self._add, name))  # type: ignore[no-untyped-call]

    def take(self) -> dict[str, Tensor]:
        """The sums of the parameters that have a gradient, valid until the next gradient arrives."""
        added, self._added = self._added, set()
        return {name: tensor for name, tensor in self._sums.items() if name in added}

    def _add(self, name: str, leaf: Tensor) -> None:
        assert leaf.grad is not None
        if name in self._added:
            add_into(self._sums[name], leaf.grad)
        else:
            self._sums[name].copy_(leaf.grad)
            self._added.add(name)
        leaf.grad = None


def add_into(target: Tensor, source: Tensor) -> None:
    """Add in place. Of different types, torch would first make a whole copy in the wider one."""
    if target.dtype == source.dtype:
        target.add_(source)
        return
    to, by = target.view(-1), source.reshape(-1)
    for lo, hi in chunks(to.numel()):
        to[lo:hi].add_(by[lo:hi])


def as_bfloat16(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the gradients in bfloat16."""
    return {name: gradient.bfloat16() for name, gradient in gradients.items()}


def squared_norm(gradients: Mapping[str, Tensor]) -> float:
    """The squared norm of all gradients together."""
    squares = [_squares(gradient) for gradient in gradients.values()]
    sums = [part for parts in squares for part in parts]
    if sums and sums[0].device.type != "cpu":  # one copy for all of them
        parts = iter(torch.stack(sums).tolist())
        return sum(sum(next(parts) for _ in each) for each in squares)
    return sum(sum(map(float, each)) for each in squares)


def _squares(gradient: Tensor) -> list[Tensor]:
    """The sum of the squares of a gradient; of a bfloat16 one, the sum of each chunk."""
    if gradient.dtype != torch.bfloat16:
        return [gradient.float().square().sum()]
    flat = gradient.reshape(-1)
    return [flat[lo:hi].float().square().sum() for lo, hi in chunks(flat.numel())]
