"""The interface between a coordinator and the run that uses it.

The coordinator knows nodes, clusters and leases, but no models, tensors or weight files; a `Requester` provides those.
Methods marked "In a thread" may compute for long. All others are called in the coordinator's loop and must be quick.
`Blobs` holds the files that nodes fetch by digest: stage files in memory, weights on disk.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ravnest.coordinator.events import ClusterSpec, IdleNode
from ravnest.planner.fleet import Machine
from ravnest.protocol.commands import Report
from ravnest.protocol.control import Blob, NodeProfile

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Microbatch", "PlannedClusters", "Requester", "RingShape", "StageFiles", "Blobs"]


@dataclass(frozen=True)
class Microbatch:
    """One microbatch: its samples, its share of its batch, and its bytes in the layout of the first stage.

    `sizes` are the sizes that vary with the length of the data.
    """

    samples: int
    share: float
    buffers: Sequence[ReadableBuffer] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlannedClusters:
    """Clusters of free nodes, and the nodes without a stage, all with reasons."""

    clusters: tuple[ClusterSpec, ...]
    spares: tuple[IdleNode, ...] = ()
    left_out: tuple[IdleNode, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class StageFiles:
    """Files of a stage (see `protocol.control.Assignment`); `max_bytes` limits the weights that it uploads."""

    file: bytes
    config: bytes
    weights: Path | None = None
    max_bytes: int = field(default=1 << 40)
    states: tuple[Path, ...] = ()


@dataclass(frozen=True)
class RingShape:
    """Nodes that hold the same tensors, in ring order, and the names of these tensors."""

    members: tuple[str, ...]
    targets: tuple[str, ...]


class Requester(Protocol):
    """Plans clusters, creates stage files, provides batches, and receives reports."""

    def plan(
        self, machines: Sequence[Machine], generation: int, failed_clusters: Sequence[str] = ()
    ) -> PlannedClusters:
        """In a thread. Plan clusters of these machines (speeds in GFLOP/s); raises `PlanError`.

        `failed_clusters` had some of them as members: those are repaired where that is best.
        """

    def find_better_plan(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """In a thread. Running clusters of these machines to end for a better plan, and the reason."""

    def stages(
        self,
        cluster: ClusterSpec,
        profiles: Sequence[NodeProfile],
        missing_stages: Sequence[int] = (),
        missing_frozen: Sequence[int] = (),
    ) -> list[StageFiles]:
        """In a thread. Files of a cluster's stages; no complete replica exists of those in `missing_stages`.

        Those in `missing_frozen` have replicas without frozen tensors.
        """

    def rings(self, clusters: Sequence[ClusterSpec]) -> list[RingShape]:
        """In a thread. The rings in which these clusters average."""

    def available(self) -> int:
        """Number of batches produced by the data loader; their numbers are below this."""

    def microbatches(self, batch: int, count: int) -> list[Microbatch]:
        """A batch split into exactly `count` microbatches; those without samples have share 0."""

    def batch_started(self, cluster: str, step: int, batch: int, microbatches: Sequence[Microbatch]) -> None:
        """The cluster trains this batch in this step."""

    def prompt(self, tokens: Sequence[int]) -> tuple[Microbatch, int]:
        """A prompt of token ids as one sample, and the position of its last token; raises `ValueError`."""

    def batch_settled(self, batch: int) -> None:
        """The batch is trained and not needed again."""

    def stage_reported(self, cluster: str, stage: int, report: Report) -> None:
        """A stage sent a report."""

    def cluster_ended(self, cluster: str, reason: str, *, is_lost: bool) -> None:
        """The cluster ended."""

    def checkpoint_updates(self) -> int:
        """Updates in the checkpoint that stages without a replica start from; 0 without a checkpoint."""

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        """File for the whole state of a stage; None if no checkpoint is taken after `updates` updates."""

    def weights_path(self, cluster: str, stage: int) -> Path:
        """File for the weights that a stage uploads."""


class Blobs:
    """Files by digest, with reference counts: a blob is kept until it has been dropped as often as it was put."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes | Path] = {}
        self._uses: Counter[str] = Counter()

    def put(self, content: bytes | Path) -> Blob:
        digest, num_bytes = _digest(content)
        self._contents[digest] = content
        self._uses[digest] += 1
        return Blob(digest, num_bytes)

    def drop(self, blob: Blob) -> None:
        self._uses[blob.digest] -= 1
        if self._uses[blob.digest] <= 0:
            del self._uses[blob.digest]
            self._contents.pop(blob.digest, None)

    def get(self, digest: str) -> bytes | Path | None:
        return self._contents.get(digest)


def _digest(content: bytes | Path) -> tuple[str, int]:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest(), len(content)
    with content.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return digest.hexdigest(), file.tell()
