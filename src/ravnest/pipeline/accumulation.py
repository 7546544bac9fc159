"""Gradients of steps that wait for contributions of other stages.

The gradient of a tied parameter is complete when every stage that borrowed it has returned its share. Clipping needs
the norm over all stages: squared norms are summed from the last stage to the first, and the total is sent back.
Neither stops the pipeline: gradients of the next step accumulate meanwhile.

    last stage  --partial sum-->  ...  --partial sum-->  first stage:  norm = sqrt(sum)   --total-->  ...  last stage
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ravnest.pipeline.gradient_buffers import add_into

__all__ = ["GradientAccumulator"]


@dataclass
class PendingStep:
    """The gradients and norms of one optimizer step that has not been applied yet."""

    own: dict[str, Tensor] | None = None
    returned: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)  # by the stage that borrowed
    later_squared_norm: float | None = None  # of all later stages
    total_squared_norm: float | None = None  # of the whole model
    is_norm_sent: bool = False


class GradientAccumulator:
    """Collects gradients and norms for each pending step of a stage.

    `borrowers` are the stages that return gradients to this one; with `clips`, steps need the norm of the whole model.
    """

    def __init__(
        self,
        *,
        is_first_stage: bool,
        is_last_stage: bool,
        clips: bool,
        borrowers: frozenset[int],
        squared_norm: Callable[[Mapping[str, Tensor]], float],
    ) -> None:
        self.is_first_stage, self.is_last_stage = is_first_stage, is_last_stage
        self.clips, self.borrowers = clips, borrowers
        self._squared_norm = squared_norm
        self._pending: dict[int, PendingStep] = {}

    @property
    def needs_permission(self) -> bool:
        """Whether a step must wait for messages of other stages."""
        return self.clips or bool(self.borrowers)

    def __getitem__(self, step: int) -> PendingStep:
        return self._pending.setdefault(step, PendingStep())

    def complete(self, step: int) -> bool:
        """Whether this stage's gradient is complete; adds the returned gradients in a fixed order of stages."""
        pending = self[step]
        if pending.own is None or pending.returned.keys() != self.borrowers:
            return False
        for borrower in sorted(pending.returned, reverse=True):
            for name, gradient in pending.returned[borrower].items():
                if name in pending.own:
                    add_into(pending.own[name], gradient)
                else:
                    pending.own[name] = gradient
        pending.returned = {borrower: {} for borrower in self.borrowers}
        return True

    def norm_to_send(self, step: int) -> float | None:
        """The squared norm of this stage and all later ones: once, as soon as all of them are known."""
        pending = self[step]
        if pending.is_norm_sent or not self.complete(step):
            return None
        later = 0.0 if self.is_last_stage else pending.later_squared_norm
        if later is None:
            return None
        pending.is_norm_sent = True
        assert pending.own is not None
        return later + self._squared_norm(pending.own)

    def take(self, step: int) -> tuple[dict[str, Tensor], float | None]:
        """Remove a step; returns its gradients and, when clipping, the squared norm of the whole model."""
        pending = self._pending.pop(step)
        assert pending.own is not None
        return pending.own, pending.total_squared_norm
