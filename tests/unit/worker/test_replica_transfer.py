"""Replicas over a link: complete and unchanged, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ravnest.errors import FrameError, LinkError, RavnestError
from ravnest.transport.link import LinkConfig
from ravnest.transport.stream import StreamLink
from ravnest.worker.replication import (
    MESSAGES,
    FileChunk,
    ReplicaOffer,
    ReplicaRequest,
    ReplicaUnavailable,
    TransferDone,
    receive_replica,
    send_replica,
)
from tests.unit.transport.memory import memory_pair

Ends = tuple[StreamLink, StreamLink]
CONTENT = bytes(range(256)) * 3000


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = memory_pair(LinkConfig(headers=MESSAGES, generation=7))
    with left, right:
        yield left, right


def in_thread(work: Any) -> Future[Any]:
    """Run in a thread; the future has its result or exception."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # raised again by `result`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def no_bytes(header: object, lengths: tuple[int, ...]) -> list[memoryview]:
    return []


def test_a_replica_arrives_complete_and_the_source_gets_the_names(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    requested: list[tuple[str, ...]] = []

    def prepare(names: tuple[str, ...]) -> tuple[Path, int]:
        requested.append(names)
        return tmp_path / "a", 140

    turns: list[float] = []

    def turn(wait_s: float) -> bool:
        turns.append(wait_s)
        return True

    sent = in_thread(lambda: send_replica(ends[0], prepare, turn=turn))
    assert receive_replica(ends[1], ("w", "b"), tmp_path / "b", max_bytes=len(CONTENT)) == 140
    assert (tmp_path / "b").read_bytes() == CONTENT
    assert sent.result(60) == len(CONTENT)
    assert requested == [("w", "b")]
    assert len(turns) == -(-len(CONTENT) // 2**18)  # before every chunk


def test_a_source_without_a_replica_sends_the_reason(ends: Ends, tmp_path: Path) -> None:
    def prepare(names: tuple[str, ...]) -> tuple[Path, int]:
        raise RavnestError("no replica here")

    sent = in_thread(lambda: send_replica(ends[0], prepare))
    with pytest.raises(ReplicaUnavailable, match="no replica here"):
        receive_replica(ends[1], (), tmp_path / "b", max_bytes=100)
    with pytest.raises(RavnestError, match="no replica"):
        sent.result(60)


def test_an_offer_over_the_limit_is_rejected(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    in_thread(lambda: send_replica(ends[0], lambda names: (tmp_path / "a", 1)))
    with pytest.raises(FrameError, match="accepts at most 1000"):
        receive_replica(ends[1], (), tmp_path / "b", max_bytes=1000)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("fault", ["changed", "short", "long", "unexpected", "huge"])
def test_a_misbehaving_source_is_detected(ends: Ends, tmp_path: Path, fault: str) -> None:
    def misbehave() -> None:
        link = ends[0]
        assert isinstance(link.receive(no_bytes, deadline_s=60.0), ReplicaRequest)
        link.send(ReplicaOffer(3, 1000), deadline_s=60.0)
        link.send(FileChunk(), [b"x" * 600], deadline_s=60.0)
        match fault:
            case "changed":
                link.send(FileChunk(), [b"x" * 400], deadline_s=60.0)
                link.send(TransferDone("0" * 64), deadline_s=60.0)
            case "short":
                link.send(TransferDone("0" * 64), deadline_s=60.0)
            case "long":
                link.send(FileChunk(), [b"x" * 401], deadline_s=60.0)
            case "unexpected":
                link.send(ReplicaOffer(3, 1000), deadline_s=60.0)
            case "huge":
                link.send(FileChunk(), [b"x" * 2**19], deadline_s=60.0)

    in_thread(misbehave)
    with pytest.raises(LinkError):
        receive_replica(ends[1], (), tmp_path / "b", max_bytes=2**20)
