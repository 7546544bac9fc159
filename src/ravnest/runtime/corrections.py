"""Corrections for gradients that come late: small functions, any optimizer, O(parameters) work.

A gradient of delay t is computed on the weights C and applied to weights that are t updates younger:

    W_{u+1} = W_u + d_u,   d_u = optimizer(g(C_{u-t}))         without correction C_u = W_u

    look-ahead a     C_u = W_u + a*t*d                         run on where the weights will be, d = W_u - W_{u-1}
    bend b           ... + b*(d - d_before)                    as the last step differed from the one before it; t = 1
    lr discount p    lr / (1 + t)^p                            smaller steps where the delay is longer
    compensation l   g + l * g*g*(W_u - C_{u-t})               first-order Taylor term, g*g for the curvature (DC-ASGD)

Error feedback is the look-ahead seen from the other side: to correct each step by the last step's error,
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
    """Which corrections, as numbers; 0 is off, and they combine. Plain data that travels with the job."""

    look_ahead: float = 0.0
    bend: float = 0.0
    lr_discount: float = 0.0
    compensation: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"{name} must be a finite number of 0 or more, not {value}")

    @property
    def name(self) -> str:
        """For people: `none`, `look-ahead 1.5`, `look-ahead 1 + lr discount 0.5`."""
        parts = {
            "look-ahead": self.look_ahead,
            "bend": self.bend,
            "lr discount": self.lr_discount,
            "compensation": self.compensation,
        }
        return " + ".join(f"{name} {value:g}" for name, value in parts.items() if value) or "none"


def none() -> Correction:
    """Use late gradients as they are."""
    return Correction()


def look_ahead(a: float = 1.0, bend: float = 0.0) -> Correction:
    """Run on the weights that the gradient will meet: `W + a*d` for each update of delay, d the last update.

    `bend` adds how d differed from the update before it, for a delay of one: with a = bend = 1 the next update is
    taken to change as the last one did.
    """
    return Correction(look_ahead=a, bend=bend)


def lr_discount(power: float = 0.5) -> Correction:
    """Take smaller steps where gradients are older: `lr / (1 + delay)^power`."""
    return Correction(lr_discount=power)


def delay_compensation(strength: float) -> Correction:
    """Move the gradient to the present weights by a Taylor term, `g + strength * g*g*(W_now - W_then)`."""
    return Correction(compensation=strength)


DEFAULT = look_ahead(1.0, bend=1.0)


class Corrector:
    """A correction at work in one stage, whose gradients are `delay` updates old."""

    def __init__(self, correction: Correction, delay: int = 1) -> None:
        assert delay >= 0
        self.correction = correction
        self.delay = delay
        self._ahead = correction.look_ahead * delay
        self._bend = correction.bend if delay == 1 else 0.0
        self.last_steps: dict[str, Tensor] = {}  # the last update of each parameter, to see how the next one bends

    def begin(self, last_steps: Mapping[str, Tensor]) -> None:
        """Go on after these updates; they are the corrector's from now on."""
        self.last_steps = dict(last_steps) if self._bend else {}

    @property
    def needs_buffer(self) -> bool:
        """Whether compute weights differ from the master weights, and so need memory of their own."""
        return self._ahead > 0 or self._bend > 0

    @property
    def extra_copies(self) -> int:
        """Sets of weights kept besides the versions: the master, and the last update where it may bend."""
        return (1 if self.needs_buffer else 0) + (1 if self._bend else 0)

    @property
    def needs_gradient_adjustment(self) -> bool:
        """Whether `adjust_gradient` does anything, and so the compute weights must be there at the update."""
        return self.correction.compensation > 0 and self.delay > 0

    @property
    def lr_factor(self) -> float:
        return float((1 + self.delay) ** -self.correction.lr_discount)

    def compute_weights(self, new_master: Mapping[str, Tensor], old_master: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the next window runs on, in the memory of `old_master` or in memory that it is exchanged for."""
        with torch.no_grad():
            if self._bend:
                return {name: self._bent(name, new.detach(), old_master[name]) for name, new in new_master.items()}
            ahead = 1.0 + self._ahead
            return {
                name: torch.lerp(old_master[name].detach(), new.detach(), ahead, out=old_master[name].detach())
                for name, new in new_master.items()
            }

    def _bent(self, name: str, new: Tensor, old: Tensor) -> Tensor:
        """`new + a*d + b*(d - d_before)`. The old weights' memory keeps d, and d_before's takes the result."""
        step = torch.sub(new, old.detach(), out=old.detach())
        before = self.last_steps.get(name)
        self.last_steps[name] = step
        if before is None:
            return new + step * self._ahead
        return torch.sub(new, before, alpha=self._bend, out=before).add_(step, alpha=self._ahead + self._bend)

    def adjust_gradient(
        self, gradients: Mapping[str, Tensor], master_now: Mapping[str, Tensor], compute_then: Mapping[str, Tensor]
    ) -> None:
        """Correct `gradients` in place; they were computed on `compute_then` and are about to change `master_now`."""
        if not self.needs_gradient_adjustment:
            return
        with torch.no_grad():
            for name, gradient in gradients.items():
                moved = master_now[name] - compute_then[name]
                gradient.addcmul_(gradient * gradient, moved, value=self.correction.compensation)
