"""The requester's desk: what the coordinator asks is answered at once, what it tells becomes a note for the run.

The coordinator's loop and the thread of the run meet here: notes go through a queue, batches through the `Supply`.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .clusterplan import ClusterMaker
from .coordinator.events import Cluster, Event
from .coordinator.requester import Piece, Planned, RingShape, StageFiles
from .core.control import NodeProfile
from .core.orders import Reports
from .fleetkeeping import FleetKeeping
from .plan.fleet import Machine
from .supply import Supply

__all__ = ["Desk", "Ended", "Fed", "Happened", "Note", "Reported", "Settled", "part_path"]


@dataclass(frozen=True)
class Fed:
    cluster: str
    window: int
    batch: int
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Reported:
    cluster: str
    stage: int
    report: Reports


@dataclass(frozen=True)
class Settled:
    batch: int


@dataclass(frozen=True)
class Ended:
    cluster: str
    reason: str
    is_lost: bool


@dataclass(frozen=True)
class Happened:
    event: Event


Note = Fed | Reported | Settled | Ended | Happened


class Desk:
    """The `Requester` that the coordinator talks to: answers what is asked at once, and notes the rest."""

    def __init__(
        self,
        maker: ClusterMaker,
        supply: Supply,
        folder: Path,
        notes: queue.SimpleQueue[Note],
        keeping: FleetKeeping,
    ) -> None:
        self._maker, self._supply, self._folder, self._notes, self._keeping = maker, supply, folder, notes, keeping

    def plan(self, machines: Sequence[Machine], generation: int, broken: Sequence[str] = ()) -> Planned:
        return self._maker.plan(machines, generation, broken)

    def better(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        return self._maker.better(machines, running)

    def stages(
        self, cluster: Cluster, profiles: Sequence[NodeProfile], lacking: Sequence[int] = ()
    ) -> list[StageFiles]:
        return self._maker.stages(cluster, profiles, lacking)

    def rings(self, clusters: Sequence[Cluster]) -> list[RingShape]:
        return self._maker.rings(clusters)

    def available(self) -> int:
        return self._supply.available()

    def pieces(self, batch: int, count: int) -> list[Piece]:
        return self._supply.take(batch, count)

    def fed(self, cluster: str, window: int, batch: int, pieces: Sequence[Piece]) -> None:
        self._notes.put(Fed(cluster, window, batch, pieces))

    def settled(self, batch: int) -> None:
        self._supply.settled(batch)
        self._notes.put(Settled(batch))

    def reported(self, cluster: str, stage: int, report: Reports) -> None:
        self._notes.put(Reported(cluster, stage, report))

    def ended(self, cluster: str, reason: str, *, is_lost: bool) -> None:
        self._notes.put(Ended(cluster, reason, is_lost))

    def learnt(self) -> int:
        return 0 if self._maker.checkpoint is None else self._maker.checkpoint.step

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        return self._keeping.state_path(cluster, stage, updates)

    def weights_path(self, cluster: str, stage: int) -> Path:
        return part_path(self._folder, cluster, stage)


def part_path(folder: Path, cluster: str, stage: int) -> Path:
    """Where the weights of a stage are until the model is put together."""
    return folder / f".part-{cluster}-{stage}.safetensors"
