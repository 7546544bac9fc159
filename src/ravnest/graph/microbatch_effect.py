"""Whether splitting a batch into microbatches changes what is trained.

The loss of two microbatches together must be the mean of their losses, and their gradient the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ravnest.graph.interpreter import Interpreter
from ravnest.graph.ops import eval_arguments, is_random
from ravnest.graph.program import Program, Stage

__all__ = ["SplitBatch"]


@dataclass(frozen=True)
class SplitBatch:
    """Two microbatches of a program that is cut into stages; `shares` are their weights in the mean of the losses."""

    program: Program
    stages: Sequence[Stage]
    state: Mapping[str, Tensor]
    first: Sequence[Tensor]
    second: Sequence[Tensor]
    shares: tuple[float, float]

    def loss_effect(self) -> float:
        """Compare the loss of both together with the mean of their losses, as in evaluation; relative."""
        with torch.no_grad():
            losses = [float(self._loss(leaves)) for leaves in (self.first, self.second, self._both())]
        mean = losses[0] * self.shares[0] + losses[1] * self.shares[1]
        return abs(losses[2] - mean) / max(abs(mean), abs(losses[2]), 1e-30)

    def gradient_effect(self) -> float:
        """Compare the gradients of both together with the sum of theirs, as in evaluation; relative.

        They differ if a backward pass of the model's own is not linear, such as a hook that clips a parameter's
        gradient. 0 if there is no such backward pass.
        """
        if all(op.backward is None for op in self.program.ops) or self._draws_in_evaluation():
            return 0.0
        whole = self._gradients(self._both(), 1.0)
        parts = [self._gradients(self.first, self.shares[0]), self._gradients(self.second, self.shares[1])]
        effects = [
            float((gradient - sum(part[name] for part in parts)).abs().max()) / max(float(gradient.abs().max()), 1e-30)
            for name, gradient in whole.items()
            if gradient.numel() and all(name in part for part in parts)
        ]
        return max(effects, default=0.0)

    def _draws_in_evaluation(self) -> bool:
        return any(is_random(op.op) and not eval_arguments(op.op) for stage in self.stages for op in stage.ops)

    def _both(self) -> list[Tensor]:
        """The two microbatches as one."""
        is_batched = [bool(v.shape) and isinstance(v.shape[0], tuple) for v in self.program.inputs]
        pairs = zip(self.first, self.second, is_batched, strict=True)
        return [torch.cat([a, b]) if split else a for a, b, split in pairs]

    def _loss(self, leaves: Sequence[Tensor]) -> Tensor:
        """The loss in evaluation."""
        values: dict[str, Any] = {v.name: leaf for v, leaf in zip(self.program.inputs, leaves, strict=True)}
        for stage in self.stages:
            outputs = Interpreter(stage)(self.state, [values[v.name] for v in stage.inputs], training=False)
            values |= {v.name: output for v, output in zip(stage.outputs, outputs, strict=True)}
        loss: Tensor = outputs[0]
        return loss

    def _gradients(self, leaves: Sequence[Tensor], share: float) -> dict[str, Tensor]:
        """Gradients of the loss in evaluation, times `share`."""
        parameters = {name: tensor for name, tensor in self.state.items() if tensor.requires_grad}
        with torch.enable_grad():
            loss = self._loss(leaves)
            if not loss.requires_grad:
                return {}
            given = torch.full_like(loss, share)
            found = torch.autograd.grad(loss, list(parameters.values()), given, allow_unused=True)
        return {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}
