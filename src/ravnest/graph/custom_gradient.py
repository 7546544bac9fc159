"""Runs a backward pass of the model's own: that of a custom autograd function, or a hook on gradients.

The forward pass of such a function is part of the program, as ops without gradients. `ravnest.with_gradient` follows
them: it returns their outputs, connects them with the inputs in the autograd graph, and keeps the saved values until
its backward pass, which is data too (`ravnest.graph.program.BackwardPass`).

    gradients of the inputs = run(gradients of the outputs, saved values)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["with_gradient"]

Run = Callable[[Sequence[Any]], Sequence[Any]]


def with_gradient(
    run: Run, results: Sequence[str]
) -> Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Any]], tuple[Tensor, ...]]:
    """The function `(outputs, inputs, saved) -> outputs` whose backward pass is `run`.

    `run` returns the gradients of those inputs whose name in `results` is not empty.
    """

    def backward(values: Sequence[Any]) -> list[Any]:
        gradients = iter(run(values))
        return [next(gradients) if name else None for name in results]

    def call(outputs: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Any]) -> tuple[Tensor, ...]:
        return _CustomGradient.apply(backward, outputs, saved, *inputs)  # type: ignore[no-any-return,no-untyped-call]

    return call


class _CustomGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, outputs: Sequence[Tensor], saved: Sequence[Any], *inputs: Tensor) -> Any:
        ctx.run = run
        device = outputs[0].device.type
        if device != "meta":  # a dry run has no backward pass
            ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.numbers = [None if isinstance(value, Tensor) else value for value in saved]
        ctx.save_for_backward(*(value for value in saved if isinstance(value, Tensor)))
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if number is None else number for number in ctx.numbers]
        device, dtype, is_enabled = ctx.autocast
        with torch.autocast(device, dtype, enabled=is_enabled):  # as in the forward pass
            return (None, None, None, *ctx.run([*gradients, *saved]))
