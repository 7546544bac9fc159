"""Replica store of a node: weights and optimizer state of stages, one file per stage, the newest of each.

    replicas/c7-2-140.safetensors        stage 2 of cluster c7 after 140 updates

A replica comes from a stage of this node when it ends, or from another node. Files outlive the agent, so that a node
that rejoins still has them. A file gets its name when it is complete. At most `MAX_REPLICAS` are kept; the oldest are
removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ravnest.protocol.control import MAX_REPLICAS, ReplicaInfo

__all__ = ["ReplicaStore"]

_NAME = re.compile(r"([a-z0-9][a-z0-9_-]{0,62})-(\d{1,6})-(\d{1,12})\.safetensors")
_SUFFIX = ".safetensors"
_DRAFT = ".replica-draft-"


class ReplicaStore:
    """One directory, written by the worker and read by its agent too."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Return all replicas, the oldest file first."""
        return tuple(replica for _, replica in sorted(self._scan(), key=lambda entry: entry[0]))

    def find(self, cluster: str, stage: int) -> ReplicaInfo | None:
        """Return the newest replica of a stage."""
        of_stage = [replica for replica in self.replicas() if (replica.cluster, replica.stage) == (cluster, stage)]
        return max(of_stage, key=lambda replica: replica.updates, default=None)

    def path(self, replica: ReplicaInfo) -> Path:
        return self.directory / f"{replica.cluster}-{replica.stage}-{replica.updates}{_SUFFIX}"

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Yield a path to write to, removed afterwards unless `put` was called with it. Raises `OSError`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{_DRAFT}{os.getpid()}-{os.urandom(4).hex()}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def put(self, path: Path, replica: ReplicaInfo) -> None:
        """Store a complete file as the newest replica of its stage."""
        path.replace(self.path(replica))
        os.utime(self.path(replica))
        for older in self.replicas():
            if (older.cluster, older.stage) == (replica.cluster, replica.stage) and older != replica:
                self._remove(older)
        for older in self.replicas()[:-MAX_REPLICAS]:
            self._remove(older)

    def clear(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def clear_drafts(self) -> None:
        """Remove incomplete files of a worker that was killed."""
        for path in self.directory.glob(f"{_DRAFT}*"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _remove(self, replica: ReplicaInfo) -> None:
        with contextlib.suppress(OSError):
            self.path(replica).unlink()

    def _scan(self) -> Iterator[tuple[float, ReplicaInfo]]:
        """Yield modification time and replica of every file."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.directory):
                match = _NAME.fullmatch(entry.name)
                if match is not None:
                    yield entry.stat().st_mtime, ReplicaInfo(match[1], int(match[2]), int(match[3]))
