"""A cluster while it trains, as the requester sees it: what it was fed, how it does, and what it is worth."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from .core.metrics import StageMetrics, bubble
from .localplan import LocalPlan
from .record import Record

__all__ = ["ClusterRun"]

_LATEST = 20  # windows whose mean loss says how good a cluster is, where nothing is held out


@dataclass
class ClusterRun:
    """A cluster that is there."""

    plan: LocalPlan
    record: Record
    samples: dict[int, int] = field(default_factory=dict)  # of windows on their way
    fed: int = 0
    done_samples: int = 0
    began_s: float = 0.0
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan
    saved: set[int] = field(default_factory=set)

    @property
    def samples_per_s(self) -> float:
        return self.done_samples / max(time.monotonic() - self.began_s, 1e-9) if self.began_s else 0.0

    @property
    def worth(self) -> float:
        """The smaller the better."""
        latest = self.losses[-_LATEST:]
        found = self.validation if not math.isnan(self.validation) else sum(latest) / max(len(latest), 1)
        return found if latest and not math.isnan(found) else math.inf

    def words(self) -> str:
        loss = f"loss {self.losses[-1]:.4f}, " if self.losses else ""
        idle = [f"{bubble(StageMetrics(), m):.0%}" for _, m in sorted(self.record.stages.items())]
        return f"{self.record.windows_done} updates, {loss}{self.samples_per_s:.1f} samples/s, bubbles {' '.join(idle)}"
