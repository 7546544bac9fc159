"""Corrections for late gradients: O(parameters) work each, independent of the optimizer.

A gradient of delay t is computed on the weights C and applied to weights that are t updates newer:

    W_{u+1} = W_u + d_u,   d_u = optimizer(g(C_{u-t}))         without correction C_u = W_u

    look-ahead a     C_u = W_u + a*t*d                         extrapolate the weights, d = W_u - W_{u-1}
    curvature c      ... + c*(d - d_before)                    second-order extrapolation, for t = 1
    lr discount p    lr / (1 + t)^p                            smaller steps where the delay is longer
    compensation l   g + l * g*g*(W_u - C_{u-t})               first-order Taylor term, g*g for the Hessian (DC-ASGD)

Error feedback is equivalent to look-ahead: to correct each step by the last step's error,
W'_{u+1} = W'_u + d_u + a*(d_u - d_{u-1}), is to run on W' = W + a*(W - W_before), with d the plain optimizer's steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from ravnest.core.config import require

__all__ = ["Correction", "Corrector", "DEFAULT", "none", "look_ahead", "lr_discount", "delay_compensation"]


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The corrections for late gradients, as plain data that is sent with the job. They combine; 0 is off.

    Args:
        look_ahead: First-order extrapolation of the weights, in updates per update of delay. Default 0.
        curvature: Second-order extrapolation, used where the delay is one update. Default 0.
        lr_discount: Exponent p of the factor `(1 + delay)**-p` on the learning rate. Default 0.
        compensation: Factor of the Taylor term of DC-ASGD. Default 0.

    Raises:
        ValueError: A number is negative or not finite.
    """

    look_ahead: float = 0.0
    curvature: float = 0.0
    lr_discount: float = 0.0
    compensation: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"{name} must be a finite number >= 0, got {value}")

    @property
    def name(self) -> str:
        """For display: `none`, `look-ahead 1.5`, `look-ahead 1 + lr discount 0.5`."""
        parts = {
            "look-ahead": self.look_ahead,
            "curvature": self.curvature,
            "lr discount": self.lr_discount,
            "compensation": self.compensation,
        }
        return " + ".join(f"{name} {value:g}" for name, value in parts.items() if value) or "none"


def none() -> Correction:
    """Apply late gradients uncorrected.

    Saves the memory of two sets of weights against the default correction.

    Returns:
        The correction, for `TrainingConfig(correction=...)`.
    """
    return Correction()


def look_ahead(strength: float = 1.0, curvature: float = 0.0) -> Correction:
    """Compute gradients on extrapolated weights: an estimate of those that the gradient will be applied to.

    The weights are `W + strength * delay * d`, where d is the last update. The default correction is
    `look_ahead(1.0, curvature=1.0)`.

    Args:
        strength: How far to extrapolate, in updates per update of delay. Default 1.
        curvature: Weight of the second-order extrapolation: adds `curvature * (d - d_before)`, the change from the
            update before to the last one. Used where the delay is one update. Default 0, off.

    Returns:
        The correction, for `TrainingConfig(correction=...)`.

    Raises:
        ValueError: A number is negative or not finite.
    """
    return Correction(look_ahead=strength, curvature=curvature)


def lr_discount(power: float = 0.5) -> Correction:
    """Take smaller steps where gradients are older: `lr / (1 + delay)**power`.

    Args:
        power: The exponent; 0 is off. Default 0.5.

    Returns:
        The correction, for `TrainingConfig(correction=...)`.

    Raises:
        ValueError: `power` is negative or not finite.
    """
    return Correction(lr_discount=power)


def delay_compensation(strength: float) -> Correction:
    """Move the gradient to the present weights by a Taylor term (DC-ASGD): `g + strength * g*g*(W_now - W_then)`.

    Args:
        strength: Factor of the term; 0 is off.

    Returns:
        The correction, for `TrainingConfig(correction=...)`.

    Raises:
        ValueError: `strength` is negative or not finite.
    """
    return Correction(compensation=strength)


DEFAULT = look_ahead(1.0, curvature=1.0)


class Corrector:
    """Applies a correction in one stage whose gradients are `delay` updates old.

    The compute weights are `W + ahead * d + curvature * (d - d_before)`.
    """

    def __init__(self, correction: Correction, delay: int = 1) -> None:
        assert delay >= 0
        self.correction = correction
        self.delay = delay
        self.ahead = correction.look_ahead * delay
        self.curvature = correction.curvature if delay == 1 else 0.0
        self.last_steps: dict[str, Tensor] = {}  # the last update of each parameter, for the second-order term

    def restore(self, last_steps: Mapping[str, Tensor]) -> None:
        """Continue after these updates; the corrector owns the tensors from now on."""
        self.last_steps = dict(last_steps) if self.curvature else {}

    @property
    def needs_buffer(self) -> bool:
        """Whether compute weights differ from the master weights, and so need memory of their own."""
        return self.ahead > 0 or self.curvature > 0

    @property
    def extra_copies(self) -> int:
        """Sets of weights kept besides the versions: the master, and the last update for the second-order term."""
        return (1 if self.needs_buffer else 0) + (1 if self.curvature else 0)

    @property
    def needs_gradient_adjustment(self) -> bool:
        """Whether `adjust_gradient` does anything, and so the compute weights must exist at the update."""
        return self.correction.compensation > 0 and self.delay > 0

    @property
    def lr_factor(self) -> float:
        return float((1 + self.delay) ** -self.correction.lr_discount)

    def compute_weights(self, new_master: Mapping[str, Tensor], old_master: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the next step, in the memory of `old_master` or in memory that it is exchanged for."""
        with torch.no_grad():
            if self.curvature:
                return {
                    name: self._second_order(name, new.detach(), old_master[name]) for name, new in new_master.items()
                }
            ahead = 1.0 + self.ahead
            return {
                name: torch.lerp(old_master[name].detach(), new.detach(), ahead, out=old_master[name].detach())
                for name, new in new_master.items()
            }

    def _second_order(self, name: str, new: Tensor, old: Tensor) -> Tensor:
        """`new + a*d + c*(d - d_before)`. The memory of the old weights then holds d, that of d_before the result."""
        step = torch.sub(new, old.detach(), out=old.detach())
        before = self.last_steps.get(name)
        self.last_steps[name] = step
        if before is None:
            return new + step * self.ahead
        return torch.sub(new, before, alpha=self.curvature, out=before).add_(step, alpha=self.ahead + self.curvature)

    def adjust_gradient(
        self, gradients: Mapping[str, Tensor], master_now: Mapping[str, Tensor], compute_then: Mapping[str, Tensor]
    ) -> None:
        """Correct `gradients` in place; they were computed on `compute_then` and will be applied to `master_now`."""
        if not self.needs_gradient_adjustment:
            return
        with torch.no_grad():
            for name, gradient in gradients.items():
                moved = master_now[name] - compute_then[name]
                gradient.addcmul_(gradient * gradient, moved, value=self.correction.compensation)
