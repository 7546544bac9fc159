"""The seam between a coordinator and whoever wants a model trained: what the one asks of the other.

The coordinator knows nodes, clusters and leases; it knows nothing of models, tensors or files of weights. All that
comes through a `Requester`. Methods marked so are called in a thread, because they compute; all others are called in
the coordinator's loop and must be quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..core.control import NodeProfile
from ..core.orders import Reports
from ..plan.fleet import Machine
from .events import Cluster, Idle

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Piece", "Planned", "Requester", "RingShape", "StageFiles"]


@dataclass(frozen=True)
class Piece:
    """One microbatch: its samples, its part of its batch, and its bytes as the root expects them."""

    samples: int
    share: float
    buffers: Sequence[ReadableBuffer] = ()


@dataclass(frozen=True)
class Planned:
    """Clusters for nodes that were free, and who got no stage, all with reasons."""

    clusters: tuple[Cluster, ...]
    spares: tuple[Idle, ...] = ()
    left_out: tuple[Idle, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class StageFiles:
    """What a node needs to be a stage: see `core.control.Part`. `max_bytes` is of the weights that it sends back."""

    file: bytes
    brief: bytes
    weights: Path | None = None
    max_bytes: int = field(default=1 << 40)
    states: tuple[Path, ...] = ()


@dataclass(frozen=True)
class RingShape:
    """Nodes that own the same tensors, in the order in which they pass them on, and which tensors these are."""

    members: tuple[str, ...]
    targets: tuple[str, ...]


class Requester(Protocol):
    """Plans, makes stages, gives batches, hears reports."""

    def plan(self, machines: Sequence[Machine], generation: int, broken: Sequence[str] = ()) -> Planned:
        """In a thread. Who does what, of these machines (speeds in GFLOP/s); raises `PlanError`.

        `broken` are clusters that some of them were in: those are mended where that is best.
        """

    def better(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """In a thread. Which running clusters of these machines to end so that a better plan can be made, and why."""

    def stages(
        self, cluster: Cluster, profiles: Sequence[NodeProfile], lacking: Sequence[int] = ()
    ) -> list[StageFiles]:
        """In a thread. The files of a cluster's stages, root first; of those in `lacking` nobody has all of a copy."""

    def rings(self, clusters: Sequence[Cluster]) -> list[RingShape]:
        """In a thread. Who averages what with whom, if these clusters do."""

    def available(self) -> int:
        """How many batches the data have produced so far; their numbers are below this."""

    def pieces(self, batch: int, count: int) -> list[Piece]:
        """A batch in exactly `count` microbatches, those beyond its samples at no weight."""

    def fed(self, cluster: str, window: int, batch: int, pieces: Sequence[Piece]) -> None:
        """The cluster trains on this batch in this window."""

    def settled(self, batch: int) -> None:
        """The batch is trained, and will not be asked for again."""

    def reported(self, cluster: str, stage: int, report: Reports) -> None:
        """A stage told something."""

    def ended(self, cluster: str, reason: str, *, is_lost: bool) -> None:
        """The cluster is no more."""

    def learnt(self) -> int:
        """How many updates the checkpoint has that stages begin from if nobody has a copy; 0: there is none."""

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        """Where all that a stage had learnt is kept for a checkpoint; None: none is made after so many updates."""

    def weights_path(self, cluster: str, stage: int) -> Path:
        """Where a stage's weights are kept when they arrive."""
