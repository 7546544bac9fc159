"""A run while it goes on: where it stands, and who wants to see that."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .core.metrics import StageMetrics
from .localplan import LocalPlan

__all__ = ["Progress", "Show"]


@dataclass
class Progress:
    """Where a run stands: what a display shows."""

    step: int = 0
    loss: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)  # what else the loss function reports
    validation: dict[str, float] = field(default_factory=dict)
    samples_per_s: float = 0.0
    stages: dict[int, StageMetrics] = field(default_factory=dict)
    clusters: dict[str, str] = field(default_factory=dict)  # how each does, in words, where there are several


class Show:
    """Follows a run for a person. This one shows nothing."""

    def planned(self, plan: LocalPlan, cluster: str = "") -> None:
        """This is how the model is split, in the only cluster or in one of several."""

    def invited(self, ticket: str) -> None:
        """Whoever has this ticket may join."""

    def told(self, sentence: str) -> None:
        """Something happened."""

    def update(self, progress: Progress) -> None:
        """An update was made, or an evaluation."""

    def close(self) -> None:
        """The run is over."""
