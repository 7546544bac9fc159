"""Connects the coordinator's loop to the thread of the run.

Calls of the coordinator that need a result (plans, files, batches) are answered at once; all others become notes in a
queue, which the thread of the run handles (`RunMonitor`). Batches go through the `BatchQueue`.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ravnest.coordinator.events import ClusterSpec, Event
from ravnest.coordinator.requester import Microbatch, PlannedClusters, RingShape, StageFiles
from ravnest.planner.fleet import Machine
from ravnest.protocol.commands import Report
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
    step: int
    batch: int
    microbatches: Sequence[Microbatch]


@dataclass(frozen=True)
class StageReported:
    cluster: str
    stage: int
    report: Report


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
    """A message of a local node for the user; `is_failure`: the reason why its stage failed."""

    text: str
    is_failure: bool = False


Note = NodeMessage | BatchFed | StageReported | BatchSettled | ClusterStopped | EventOccurred


class RunRequester:
    """The `Requester` of the coordinator. Called in the coordinator's loop."""

    def __init__(
        self,
        builder: ClusterBuilder,
        batch_queue: BatchQueue,
        folder: Path,
        notes: queue.SimpleQueue[Note],
        checkpoints: RunCheckpoints,
    ) -> None:
        self._builder, self._batch_queue, self._folder, self._notes, self._checkpoints = (
            builder,
            batch_queue,
            folder,
            notes,
            checkpoints,
        )

    def plan(
        self, machines: Sequence[Machine], generation: int, failed_clusters: Sequence[str] = ()
    ) -> PlannedClusters:
        return self._builder.plan(machines, generation, failed_clusters)

    def find_better_plan(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        return self._builder.find_better_plan(machines, running)

    def stages(
        self,
        cluster: ClusterSpec,
        profiles: Sequence[NodeProfile],
        missing_stages: Sequence[int] = (),
        missing_frozen: Sequence[int] = (),
    ) -> list[StageFiles]:
        return self._builder.stages(cluster, profiles, missing_stages, missing_frozen)

    def rings(self, clusters: Sequence[ClusterSpec]) -> list[RingShape]:
        return self._builder.rings(clusters)

    def available(self) -> int:
        return self._batch_queue.available()

    def microbatches(self, batch: int, count: int) -> list[Microbatch]:
        return self._batch_queue.take(batch, count)

    def prompt(self, tokens: Sequence[int]) -> tuple[Microbatch, int]:
        return self._batch_queue.prompt(tokens)

    def batch_started(self, cluster: str, step: int, batch: int, microbatches: Sequence[Microbatch]) -> None:
        self._notes.put(BatchFed(cluster, step, batch, microbatches))

    def batch_settled(self, batch: int) -> None:
        self._batch_queue.settled(batch)
        self._notes.put(BatchSettled(batch))

    def stage_reported(self, cluster: str, stage: int, report: Report) -> None:
        self._notes.put(StageReported(cluster, stage, report))

    def cluster_ended(self, cluster: str, reason: str, *, is_lost: bool) -> None:
        self._notes.put(ClusterStopped(cluster, reason, is_lost))

    def checkpoint_updates(self) -> int:
        return 0 if self._builder.checkpoint is None else self._builder.checkpoint.updates

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        return self._checkpoints.state_path(cluster, stage, updates)

    def weights_path(self, cluster: str, stage: int) -> Path:
        return part_path(self._folder, cluster, stage)


def part_path(folder: Path, cluster: str, stage: int) -> Path:
    """Return the path of a stage's weights until the model is assembled."""
    return folder / f".part-{cluster}-{stage}.safetensors"
