"""The requester's desk: what the coordinator asks is answered at once, what it tells becomes a note for the run.

The coordinator's loop and the thread of the run meet here: notes go through a queue, batches through the `BatchQueue`.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ravnest.coordinator.events import ClusterSpec, Event
from ravnest.coordinator.requester import Microbatch, PlannedClusters, RingShape, StageFiles
from ravnest.planner.fleet import Machine
from ravnest.protocol.commands import Reports
from ravnest.protocol.control import NodeProfile
from ravnest.run.checkpoint.writer import RunCheckpoints
from ravnest.run.cluster_builder import ClusterBuilder
from ravnest.run.data import BatchQueue

__all__ = [
    "RunRequester",
    "ClusterStopped",
    "BatchFed",
    "EventOccurred",
    "NodeMessage",
    "Note",
    "StageReported",
    "BatchSettled",
    "part_path",
]


@dataclass(frozen=True)
class BatchFed:
    cluster: str
    window: int
    batch: int
    pieces: Sequence[Microbatch]


@dataclass(frozen=True)
class StageReported:
    cluster: str
    stage: int
    report: Reports


@dataclass(frozen=True)
class BatchSettled:
    batch: int


@dataclass(frozen=True)
class ClusterStopped:
    cluster: str
    reason: str
    is_lost: bool


@dataclass(frozen=True)
class EventOccurred:
    event: Event


@dataclass(frozen=True)
class NodeMessage:
    """A sentence of a local node, for the user; `is_failure`: why its stage failed."""

    text: str
    is_failure: bool = False


Note = NodeMessage | BatchFed | StageReported | BatchSettled | ClusterStopped | EventOccurred


class RunRequester:
    """The `Requester` that the coordinator talks to: answers what is asked at once, and notes the rest."""

    def __init__(
        self,
        maker: ClusterBuilder,
        supply: BatchQueue,
        folder: Path,
        notes: queue.SimpleQueue[Note],
        keeping: RunCheckpoints,
    ) -> None:
        self._maker, self._supply, self._folder, self._notes, self._keeping = maker, supply, folder, notes, keeping

    def plan(
        self, machines: Sequence[Machine], generation: int, failed_clusters: Sequence[str] = ()
    ) -> PlannedClusters:
        return self._maker.plan(machines, generation, failed_clusters)

    def find_better_plan(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        return self._maker.better(machines, running)

    def stages(
        self, cluster: ClusterSpec, profiles: Sequence[NodeProfile], missing_stages: Sequence[int] = ()
    ) -> list[StageFiles]:
        return self._maker.stages(cluster, profiles, missing_stages)

    def rings(self, clusters: Sequence[ClusterSpec]) -> list[RingShape]:
        return self._maker.rings(clusters)

    def available(self) -> int:
        return self._supply.available()

    def microbatches(self, batch: int, count: int) -> list[Microbatch]:
        return self._supply.take(batch, count)

    def batch_started(self, cluster: str, step: int, batch: int, microbatches: Sequence[Microbatch]) -> None:
        self._notes.put(BatchFed(cluster, step, batch, microbatches))

    def batch_settled(self, batch: int) -> None:
        self._supply.settled(batch)
        self._notes.put(BatchSettled(batch))

    def stage_reported(self, cluster: str, stage: int, report: Reports) -> None:
        self._notes.put(StageReported(cluster, stage, report))

    def cluster_ended(self, cluster: str, reason: str, *, is_lost: bool) -> None:
        self._notes.put(ClusterStopped(cluster, reason, is_lost))

    def checkpoint_updates(self) -> int:
        return 0 if self._maker.checkpoint is None else self._maker.checkpoint.step

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        return self._keeping.state_path(cluster, stage, updates)

    def weights_path(self, cluster: str, stage: int) -> Path:
        return part_path(self._folder, cluster, stage)


def part_path(folder: Path, cluster: str, stage: int) -> Path:
    """Where the weights of a stage are until the model is put together."""
    return folder / f".part-{cluster}-{stage}.safetensors"
