"""Learning-rate schedules as plain data: `lr(step) = lr * ratio(step)`, a pure function."""

from __future__ import annotations

import math
from typing import Literal

from ravnest.core.config import Record, require

__all__ = ["CONSTANT", "LRSchedule", "constant", "cosine", "linear"]


class LRSchedule(Record, frozen=True, kw_only=True):
    """The learning rate over steps: a linear warm-up, then `kind` down to `final_ratio` at `total_steps`."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    final_ratio: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.kind in ("constant", "linear", "cosine"), f"kind must be constant, linear or cosine, got {self.kind!r}"
        )
        require(self.warmup_steps >= 0, f"warmup_steps must be >= 0, got {self.warmup_steps}")
        require(0 <= self.final_ratio <= 1, f"final_ratio must be between 0 and 1, got {self.final_ratio}")
        if self.kind == "constant":
            require(self.total_steps == 0, f"a constant schedule has no total_steps, got {self.total_steps}")
        else:
            require(
                self.total_steps > self.warmup_steps,
                f"total_steps must be > warmup_steps ({self.warmup_steps}), got {self.total_steps}",
            )

    def ratio(self, step: int) -> float:
        """The factor on the learning rate of update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        decay = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_ratio + (1.0 - self.final_ratio) * decay


CONSTANT = LRSchedule()


def constant(*, warmup_steps: int = 0) -> LRSchedule:
    """A constant learning rate after a linear warm-up.

    Args:
        warmup_steps: Optimizer steps over which the rate rises to `lr`. Default 0.

    Returns:
        The schedule, for the `schedule` argument of an optimizer.

    Raises:
        ValueError: `warmup_steps` is negative.
    """
    return LRSchedule(warmup_steps=warmup_steps)


def linear(total_steps: int, *, warmup_steps: int = 0, final_ratio: float = 0.0) -> LRSchedule:
    """A linear warm-up, then a linear decay.

    Args:
        total_steps: Optimizer step at which the decay ends, counted from the start of training.
        warmup_steps: Optimizer steps over which the rate rises to `lr`. Default 0.
        final_ratio: Learning rate from `total_steps` on, as a fraction of `lr` (0 to 1). Default 0.

    Returns:
        The schedule, for the `schedule` argument of an optimizer.

    Raises:
        ValueError: A number is out of range, or `total_steps` is not greater than `warmup_steps`.
    """
    return LRSchedule(kind="linear", warmup_steps=warmup_steps, total_steps=total_steps, final_ratio=final_ratio)


def cosine(total_steps: int, *, warmup_steps: int = 0, final_ratio: float = 0.0) -> LRSchedule:
    """A linear warm-up, then a decay along half a cosine.

    Args:
        total_steps: Optimizer step at which the decay ends, counted from the start of training.
        warmup_steps: Optimizer steps over which the rate rises to `lr`. Default 0.
        final_ratio: Learning rate from `total_steps` on, as a fraction of `lr` (0 to 1). Default 0.

    Returns:
        The schedule, for the `schedule` argument of an optimizer.

    Raises:
        ValueError: A number is out of range, or `total_steps` is not greater than `warmup_steps`.
    """
    return LRSchedule(kind="cosine", warmup_steps=warmup_steps, total_steps=total_steps, final_ratio=final_ratio)
