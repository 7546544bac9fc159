"""Checkpoints of a run on whoever joins: one cluster at a time sends what its stages had learnt after the same update.

The cluster that has come furthest is asked, one checkpoint at a time. If it is lost meanwhile, that checkpoint comes to
nothing and the next is asked of another. A complete one is also what stages begin from that nobody has a copy of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .checkpoints import Checkpoint, Manifest, checkpoints_in
from .keeping import CheckpointWishes, Keeping
from .localplan import LocalPlan

__all__ = ["FleetKeeping"]


@dataclass(frozen=True)
class _Begun:
    """A checkpoint that a cluster is asked for, after so many of its updates."""

    cluster: str
    updates: int
    keeping: Keeping
    paths: tuple[Path, ...]


class FleetKeeping:
    """`describe(plan)` says what a checkpoint of a cluster is of. `state_path` is for any thread."""

    def __init__(
        self,
        run: Path,
        wishes: CheckpointWishes,
        describe: Callable[[LocalPlan], Manifest],
        unused: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.wishes = wishes
        self._run, self._describe, self._unused = run, describe, unused
        self._begun: _Begun | None = None
        self._finishing: list[Keeping] = []
        self._last = 0  # how many batches were trained when the last was begun

    def is_due(self, trained: int) -> bool:
        """Whether it is time for the next, when so many batches are trained."""
        return bool(self.wishes.every) and self._begun is None and trained >= self._last + self.wishes.every

    def begin(self, cluster: str, plan: LocalPlan, *, updates: int, batches: int, trained: int) -> bool:
        """Whether one can be begun: the cluster is to be asked for its states after `updates` updates."""
        self._last = trained
        keeping = Keeping(self._run, self.wishes, self._describe(plan), len(plan.stages), self._unused())
        orders = keeping.order(updates, batches=batches)
        self._finishing = [*self._finishing[-1:], keeping]
        if orders:
            self._begun = _Begun(cluster, updates, keeping, tuple(Path(order.path) for order in orders))
        return bool(orders)

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        begun = self._begun
        if begun is None or (begun.cluster, begun.updates) != (cluster, updates) or stage >= len(begun.paths):
            return None
        return begun.paths[stage]

    def saved(self, cluster: str, stage: int, updates: int, failure: str) -> None:
        """A stage has sent its state, or could not."""
        begun = self._begun
        if begun is None or (begun.cluster, begun.updates) != (cluster, updates) or not begun.keeping.expects(updates):
            return
        begun.keeping.saved(stage, updates, failure)
        if not begun.keeping.is_waiting:
            self._begun = None

    def ended(self, cluster: str) -> None:
        """A cluster is no more."""
        if self._begun is not None and self._begun.cluster == cluster:
            self._begun.keeping.close()
            self._begun = None

    @property
    def is_waiting(self) -> bool:
        return self._begun is not None

    def news(self) -> list[str]:
        return [sentence for keeping in self._finishing for sentence in keeping.news()]

    def newest(self) -> Checkpoint | None:
        """The newest that is complete."""
        found = checkpoints_in(self._run)
        return found[-1] if found else None

    def close(self) -> None:
        """What was begun comes to nothing, what stages have sent is completed."""
        for keeping in self._finishing:
            keeping.close()
        self._begun = None
