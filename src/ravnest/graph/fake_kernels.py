"""Shapes of operations for which torch needs values: an upper bound is enough where the result is not kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls

__all__ = ["bounded_shapes"]


def _ctc_loss(fake: Any, func: Any, log_probabilities: Tensor, targets: Tensor, *rest: Any, **options: Any) -> Any:
    """The losses, and the table for the backward pass at the size of the longest possible target."""
    longest = targets.shape[-1] if targets.dim() == 2 else targets.shape[0]
    losses = log_probabilities.new_empty(log_probabilities.shape[1:-1])
    return losses, log_probabilities.new_empty(
        (*log_probabilities.shape[1:-1], log_probabilities.shape[0], 2 * longest + 1)
    )


def _sample_dirichlet(fake: Any, func: Any, concentration: Tensor, *rest: Any, **options: Any) -> Any:
    """A sample has the shape of its concentration."""
    return torch.empty_like(concentration)


_KERNELS: dict[Any, Any] = {
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._sample_dirichlet.default: _sample_dirichlet,
}


@contextmanager
def bounded_shapes() -> Iterator[None]:
    """Give torch.export shapes of operations for which it has none, or whose internal results depend on values."""
    known: dict[Any, Any] = fake_impls.op_implementations_dict
    before = {op: known.get(op) for op in _KERNELS}
    known.update(_KERNELS)
    try:
        yield
    finally:
        for op, kernel in before.items():
            if kernel is None:
                del known[op]
            else:
                known[op] = kernel
