"""Transfer a replica from one node to another: a file over a link, in chunks, verified by its digest.

    target  ReplicaRequest (tensor names)  ->                                         source
                                           <-  ReplicaOffer (size, number of updates)
                                           <-  FileChunk, FileChunk, ...
                                           <-  TransferDone (digest)

The source sends the requested tensors; the target accepts no more bytes than its stage can need. The content of the
file is validated when a stage resumes from it (`pipeline.state.read_state`), like everything from outside.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from ravnest.core.rate_limit import RateLimiter
from ravnest.core.record import TaggedRecord
from ravnest.errors import FrameError, LinkError, RavnestError
from ravnest.transport.link import Link

__all__ = ["MESSAGES", "ReplicaUnavailable", "receive_replica", "send_replica"]

_CHUNK_BYTES = 2**18
_MESSAGE_S = 60.0
_PREPARE_S = 600.0  # until the source has written the state of its running stage


class ReplicaUnavailable(RavnestError):
    """The source refused to send the replica, with its reason."""


class ReplicaRequest(TaggedRecord, frozen=True):
    """Parameters and buffers to send; without names, the whole replica."""

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
