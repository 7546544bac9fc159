"""Exchange replicas with other nodes: send them, store them, and fetch the state that an assignment resumes from.

The replica of a running stage is written between two of its actions; any other comes from the replica store. Each
transfer has a number known to both ends, and a link of its own. It ends within its deadlines whatever the other end
does, and disturbs a running stage only while the file is written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Protocol

from ravnest.errors import LinkClosed, LinkError, RavnestError
from ravnest.graph import Stage
from ravnest.graph.program import DTYPES
from ravnest.pipeline.state import owned, select
from ravnest.protocol.control import ReplicaInfo, ReplicaSource, ReplicaStored, SendReplica, StoreReplica
from ravnest.protocol.peer import Peer
from ravnest.transport.link import LinkConfig
from ravnest.transport.stream import StreamLink
from ravnest.worker.replica_transfer import MESSAGES, ReplicaUnavailable, receive_replica, send_replica
from ravnest.worker.resources import WorkerResources

__all__ = ["ReplicaExchange", "RunningStage"]

_MAX_TRANSFERS = 8
_CONNECT_S = 120.0
_MAX_STATE_FACTOR = 6  # bytes of a replica for each byte of the parameters and buffers that a stage owns
_HEADER_BYTES = 1 << 20


class RunningStage(Protocol):
    """A stage that this worker computes."""

    def write_replica(self, path: Path) -> int:
        """Write the state between two actions; return its number of updates."""

    def wait(self, timeout_s: float, /) -> bool:
        """Wait briefly until the stage's own messages are sent."""


class ReplicaExchange:
    """Transfers of one worker. `running(cluster, stage)` returns that stage if this worker computes it."""

    def __init__(
        self,
        resources: WorkerResources,
        running: Callable[[str, int], RunningStage | None],
        report: Callable[[ReplicaStored], None],
    ) -> None:
        self._resources, self._running, self._report = resources, running, report
        self._pool = ThreadPoolExecutor(_MAX_TRANSFERS, thread_name_prefix="replicas")
        self._lock = threading.Lock()  # guards the next
        self._is_closed = False

    def start(self, command: SendReplica | StoreReplica) -> None:
        """Start a transfer in the background."""
        with self._lock:
            if not self._is_closed:
                self._pool.submit(self._send if isinstance(command, SendReplica) else self._store, command)  # type: ignore[arg-type]

    def close(self) -> None:
        """Start no further transfer; those in progress end with the process."""
        with self._lock:
            self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def gather(self, stage: Stage, sources: tuple[ReplicaSource, ...], directory: Path) -> list[Path]:
        """Return the files to resume from, in the order of `sources`; raises `LinkClosed` if one is unavailable."""
        names = tuple(owned(stage))
        max_bytes = _MAX_STATE_FACTOR * _owned_bytes(stage) + _HEADER_BYTES

        def get(number: int, source: ReplicaSource) -> Path:
            if source.giver is None:
                return self._stored_path(source.copy)
            path = directory / f"source-{number}"
            try:
                self._fetch(source.giver, source.transfer, names, path, max_bytes)
            except (LinkError, ReplicaUnavailable) as error:  # not this node's fault
                raise LinkClosed(
                    f"could not fetch the state of stage {source.copy.stage} from {source.giver.name}: {error}"
                ) from error
            return path

        if not sources or not names:  # a stage without parameters has no state
            return []
        with ThreadPoolExecutor(len(sources), thread_name_prefix="sources") as pool:  # all at once: sources time out
            return [path.result() for path in [pool.submit(get, i, source) for i, source in enumerate(sources)]]

    def _stored_path(self, replica: ReplicaInfo) -> Path:
        """Return the path of a stored replica, or of a newer one of the same stage."""
        store = self._resources.replica_store
        path, newest = store.path(replica), store.find(replica.cluster, replica.stage)
        return path if path.exists() or newest is None else store.path(newest)

    def _fetch(self, source: Peer, transfer: int, names: tuple[str, ...], path: Path, max_bytes: int) -> int:
        with self._connected(source, transfer) as link:
            return receive_replica(link, names, path, max_bytes=max_bytes)

    @contextlib.contextmanager
    def _connected(self, peer: Peer, transfer: int) -> Iterator[StreamLink]:
        purpose = f"replica {transfer}"
        config = LinkConfig(headers=MESSAGES, generation=transfer, max_frame_bytes=2**20)
        self._resources.expect(purpose, [peer.name])
        try:
            with self._resources.connect_peer(peer, purpose, config, deadline_s=_CONNECT_S).link as link:
                yield link
        finally:
            self._resources.expect(purpose, [])

    def _store(self, command: StoreReplica) -> None:
        store, wanted = self._resources.replica_store, command.copy
        try:
            with store.writing() as path:
                updates = self._fetch(command.source, command.transfer, (), path, self._resources.memory_bytes)
                stored, num_bytes = ReplicaInfo(wanted.cluster, wanted.stage, updates), path.stat().st_size
                store.put(path, stored)
        except (RavnestError, OSError) as error:
            self._report_failure(command.transfer, error)
        else:
            self._report(ReplicaStored(command.transfer, stored, num_bytes))

    def _send(self, command: SendReplica) -> None:
        running = self._running(command.copy.cluster, command.copy.stage)
        try:
            with (
                self._connected(command.target, command.transfer) as link,
                self._resources.replica_store.writing() as draft,
            ):
                send_replica(
                    link,
                    lambda names: self._prepare(command.copy, names, draft),
                    turn=None if running is None else running.wait,
                    rate_limiter=self._resources.rate_limiter,
                )
        except (RavnestError, OSError) as error:  # the target reports it too
            self._report_failure(command.transfer, error)

    def _report_failure(self, transfer: int, error: Exception) -> None:
        self._report(ReplicaStored(transfer, reason=str(error)[:500] or type(error).__name__))

    def _prepare(self, replica: ReplicaInfo, names: tuple[str, ...], draft: Path) -> tuple[Path, int]:
        """Return a file with the named tensors of a replica, all if there are no names, and its number of updates."""
        path, updates = self._newest(replica, draft)
        if not names:
            return path, updates
        select(path, draft, names)
        return draft, updates

    def _newest(self, replica: ReplicaInfo, draft: Path) -> tuple[Path, int]:
        """Write the state of the running stage to `draft`; without one, use the replica store."""
        reason = "this node does not compute it"
        running = self._running(replica.cluster, replica.stage)
        if running is not None:
            try:
                return draft, running.write_replica(draft)
            except RavnestError as error:
                reason = str(error)
        stored = self._resources.replica_store.find(replica.cluster, replica.stage)
        if stored is None:
            raise RavnestError(f"no replica of stage {replica.stage} of {replica.cluster}: {reason}")
        return self._resources.replica_store.path(stored), stored.updates


def _owned_bytes(stage: Stage) -> int:
    return sum(prod(item.shape) * DTYPES[item.dtype].itemsize for item in owned(stage).values())
