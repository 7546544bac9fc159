"""Exchanges replicas with other nodes: sends them, stores them, and fetches the state that an assignment resumes from.

The replica of a running stage is written between two of its actions; any other comes from the replica store. Each
transfer has a number known to both ends, and a link of its own. All its waits have deadlines, and it delays a running
stage only while the file is written. The file is sent in chunks and verified by its digest:

    target  ReplicaRequest (tensor names)  ->                                         source
                                           <-  ReplicaOffer (size, number of updates)
                                           <-  FileChunk, FileChunk, ...
                                           <-  TransferDone (digest)

The source sends the requested tensors; the target accepts no more bytes than its stage can need. The content of the
file is validated when a stage resumes from it (`pipeline.state.read_state`), like everything from outside.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import IO, Protocol

import msgspec

from ravnest.core.config import TaggedRecord
from ravnest.core.rate_limit import RateLimiter
from ravnest.errors import FrameError, LinkClosed, LinkError, RavnestError
from ravnest.graph import Stage
from ravnest.graph.program import DTYPES
from ravnest.pipeline.state import owned, select
from ravnest.protocol.control import ReplicaInfo, ReplicaSource, ReplicaStored, SendReplica, StoreReplica
from ravnest.protocol.peer import Peer
from ravnest.transport.link import Link, LinkConfig
from ravnest.transport.stream import StreamLink
from ravnest.worker.resources import WorkerResources

__all__ = ["ReplicaExchange", "RunningStage", "MESSAGES", "ReplicaUnavailable", "receive_replica", "send_replica"]

_CHUNK_BYTES = 2**18
_MESSAGE_S = 60.0
_PREPARE_S = 600.0  # until the source has written the state of its running stage


class ReplicaUnavailable(RavnestError):
    """The source refused to send the replica, with its reason."""


class ReplicaRequest(TaggedRecord, frozen=True):
    """Parameters and buffers to send; without names, the whole replica, without frozen ones of a running stage."""

    names: tuple[str, ...]


class ReplicaOffer(TaggedRecord, frozen=True):
    updates: int
    num_bytes: int


class FileChunk(TaggedRecord, frozen=True):
    """The next bytes of the file, as the buffer of the message."""


class TransferDone(TaggedRecord, frozen=True):
    digest: str


class TransferRefused(TaggedRecord, frozen=True):
    reason: str


MESSAGES = ReplicaRequest | ReplicaOffer | FileChunk | TransferDone | TransferRefused


def send_replica(
    link: Link,
    prepare: Callable[[tuple[str, ...]], tuple[Path, int]],
    *,
    turn: Callable[[float], bool] | None = None,
    rate_limiter: RateLimiter | None = None,
) -> int:
    """Answer a request; return the number of bytes sent.

    `prepare(names)` writes the file and returns its path and number of updates. `turn` waits until nothing more urgent
    is to be sent.
    """
    request = link.receive(_no_bytes, deadline_s=_MESSAGE_S)
    if not isinstance(request, ReplicaRequest):
        raise FrameError(f"{link.peer} sent {type(request).__name__}, expected ReplicaRequest")
    try:
        path, updates = prepare(request.names)
    except (RavnestError, OSError) as error:
        link.send(TransferRefused(str(error)[:500]), deadline_s=_MESSAGE_S)
        raise
    num_bytes, digest = path.stat().st_size, hashlib.sha256()
    link.send(ReplicaOffer(updates, num_bytes), deadline_s=_MESSAGE_S)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if turn is not None:
                turn(_MESSAGE_S)
            if rate_limiter is not None:
                time.sleep(rate_limiter.reserve(len(chunk)))
            digest.update(chunk)
            link.send(FileChunk(), [chunk], deadline_s=_MESSAGE_S)
    link.send(TransferDone(digest.hexdigest()), deadline_s=_MESSAGE_S)
    link.receive(_no_bytes, deadline_s=_MESSAGE_S)  # closing at once might lose the last message
    return num_bytes


def receive_replica(link: Link, names: tuple[str, ...], path: Path, *, max_bytes: int) -> int:
    """Request a replica and write it to `path`; return its number of updates.

    Raises `ReplicaUnavailable` or `LinkError`.
    """
    link.send(ReplicaRequest(names), deadline_s=_MESSAGE_S)
    offer = link.receive(_no_bytes, deadline_s=_PREPARE_S)
    if isinstance(offer, TransferRefused):
        raise ReplicaUnavailable(f"{link.peer} cannot send it: {offer.reason}")
    if not isinstance(offer, ReplicaOffer) or offer.updates < 0:
        raise FrameError(f"{link.peer} sent {type(offer).__name__}, expected ReplicaOffer")
    if offer.num_bytes > max_bytes:
        raise FrameError(f"{link.peer} offers {offer.num_bytes} bytes, this node accepts at most {max_bytes}")
    with path.open("wb") as file:
        _receive_chunks(link, file, offer.num_bytes)
    link.send(TransferDone(""), deadline_s=_MESSAGE_S)
    return offer.updates


def _receive_chunks(link: Link, file: IO[bytes], num_bytes: int) -> None:
    digest, memory, remaining_bytes = hashlib.sha256(), bytearray(_CHUNK_BYTES), num_bytes
    views: list[memoryview] = []

    def place(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
        if isinstance(header, FileChunk) and (
            len(lengths) != 1 or not 0 < lengths[0] <= min(_CHUNK_BYTES, remaining_bytes)
        ):
            raise FrameError(f"{link.peer} sent a chunk of {sum(lengths)} bytes, expected at most {remaining_bytes}")
        views[:] = [memoryview(memory)[:length] for length in lengths] if isinstance(header, FileChunk) else []
        return list(views)

    while not isinstance(message := link.receive(place, deadline_s=_MESSAGE_S), TransferDone):
        if not isinstance(message, FileChunk):
            raise FrameError(f"{link.peer} sent {type(message).__name__}, expected FileChunk or TransferDone")
        digest.update(views[0])
        file.write(views[0])
        remaining_bytes -= len(views[0])
    if remaining_bytes:
        raise LinkError(f"the replica from {link.peer} ended {remaining_bytes} bytes early")
    if digest.hexdigest() != message.digest:
        raise LinkError(f"the replica from {link.peer} is damaged: its digest differs")


def _no_bytes(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
    return []


# transfers of a worker

_MAX_TRANSFERS = 8
_CONNECT_S = 120.0
_MAX_STATE_FACTOR = 6  # bytes of a replica for each byte of the parameters and buffers that a stage owns
_HEADER_BYTES = 1 << 20


class RunningStage(Protocol):
    """A stage that this worker computes."""

    def write_replica(self, path: Path, *, frozen: bool) -> int:
        """Write the state between two actions, on request with frozen tensors; return its number of updates."""

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
            if source.source is None:
                return self._stored_path(source.replica)
            path = directory / f"source-{number}"
            try:
                self._fetch(source.source, source.transfer, names, path, max_bytes)
            except (LinkError, ReplicaUnavailable) as error:  # a consequence: this node is not at fault
                raise LinkClosed(
                    f"could not fetch the state of stage {source.replica.stage} from {source.source.name}: {error}"
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
        store, replica = self._resources.replica_store, command.replica
        try:
            with store.writing() as path:
                updates = self._fetch(command.source, command.transfer, (), path, self._resources.memory_bytes)
                stored, num_bytes = ReplicaInfo(replica.cluster, replica.stage, updates), path.stat().st_size
                store.put(path, stored)
        except (RavnestError, OSError) as error:
            self._report_failure(command.transfer, error)
        else:
            self._report(ReplicaStored(command.transfer, stored, num_bytes))

    def _send(self, command: SendReplica) -> None:
        running = self._running(command.replica.cluster, command.replica.stage)
        try:
            with (
                self._connected(command.target, command.transfer) as link,
                self._resources.replica_store.writing() as draft,
            ):
                send_replica(
                    link,
                    lambda names: self._prepare(command.replica, names, draft),
                    turn=None if running is None else running.wait,
                    rate_limiter=self._resources.rate_limiter,
                )
        except (RavnestError, OSError) as error:  # the target reports it too
            self._report_failure(command.transfer, error)

    def _report_failure(self, transfer: int, error: Exception) -> None:
        self._report(ReplicaStored(transfer, reason=str(error)[:500] or type(error).__name__))

    def _prepare(self, replica: ReplicaInfo, names: tuple[str, ...], draft: Path) -> tuple[Path, int]:
        """Return a file with the named tensors of a replica, all if there are no names, and its number of updates."""
        path, updates = self._newest(replica, draft, frozen=bool(names))
        if not names:
            return path, updates
        select(path, draft, names)
        return draft, updates

    def _newest(self, replica: ReplicaInfo, draft: Path, *, frozen: bool) -> tuple[Path, int]:
        """Write the state of the running stage to `draft`; without one, use the replica store."""
        reason = "this node does not compute it"
        running = self._running(replica.cluster, replica.stage)
        if running is not None:
            try:
                return draft, running.write_replica(draft, frozen=frozen)
            except RavnestError as error:
                reason = str(error)
        stored = self._resources.replica_store.find(replica.cluster, replica.stage)
        if stored is None:
            raise RavnestError(f"no replica of stage {replica.stage} of {replica.cluster}: {reason}")
        return self._resources.replica_store.path(stored), stored.updates


def _owned_bytes(stage: Stage) -> int:
    return sum(prod(item.shape) * DTYPES[item.dtype].itemsize for item in owned(stage).values())
