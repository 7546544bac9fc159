"""Loss scaling for float16, in each stage by itself.

float16 has no numbers below 6e-8, so gradients are computed at a larger scale. The gradients that a stage receives are
float32 and unscaled. The stage multiplies them by a scale of its own, computes in float16, and divides the results:

    s = 2^floor(log2(target / largest received gradient))       powers of two: multiplying and dividing is exact
    g = gradient(s * received) / s                              of parameters and of inputs

So no stage needs the scale of another, and stages in float16, bfloat16 and float32 can be neighbours. A gradient with
a value that is not finite counts as zero for its microbatch, and the target falls to a quarter; otherwise it rises
slowly. All of it is computed on the device: nothing is copied to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["LossScaler"]

_OF_LOSS, _OF_GRADIENTS = 2.0**16, 1.0  # the largest scaled gradient at first: of the loss, and of a stage's outputs
_LEAST, _MOST = 2.0**-10, 2.0**24
_FALL, _RISE = 0.25, 1.0005  # doubled after 1,400 microbatches without an overflow
_TINY = 1e-30


class LossScaler:
    """The scale of one stage; `watch` the parameters of each microbatch before its backward pass."""

    def __init__(self, device: torch.device, *, is_last_stage: bool) -> None:
        self.target = torch.tensor(_OF_LOSS if is_last_stage else _OF_GRADIENTS, device=device)
        self._scale = torch.ones((), device=device)
        self._is_finite = torch.ones((), dtype=torch.bool, device=device)

    def watch(self, leaves: Mapping[str, Tensor]) -> None:
        """Divide the gradients of these tensors before they are added up."""
        for leaf in leaves.values():
            if leaf.requires_grad and not getattr(leaf, "is_scaled", False):
                leaf.register_hook(self._unscaled)  # type: ignore[no-untyped-call]
                leaf.is_scaled = True  # type: ignore[attr-defined]

    def scale(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Multiply the gradients that the stage received; they are scaled until `unscale`."""
        largest = torch.stack([g.abs().amax().float() for g in gradients if g is not None and g.numel()]).amax()
        self._scale = torch.exp2(torch.floor(torch.log2(self.target / largest.clamp(min=_TINY))))
        self._is_finite = torch.ones_like(self._is_finite)
        return [None if g is None else g.float() * self._scale for g in gradients]

    def unscale(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Divide the gradients of the stage's inputs, and adapt the scale."""
        result = [None if g is None else self._unscaled(g) for g in gradients]
        changed = torch.where(self._is_finite, self.target * _RISE, self.target * _FALL)
        self.target = changed.clamp(_LEAST, _MOST)
        return result

    def _unscaled(self, gradient: Tensor) -> Tensor:
        is_finite = gradient.isfinite().all()
        self._is_finite = self._is_finite & is_finite
        return torch.where(is_finite, gradient.float() / self._scale, 0.0).to(gradient.dtype)
