"""Peers of one host: stages are linked over unix sockets, rings over shared memory with a published buffer."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from ravnest.averaging.shared_memory import SharedBuffer, SharedLink, is_available
from ravnest.errors import LinkTimeout
from ravnest.transport.introduction import encode_introduction
from ravnest.transport.local import HELLO_BYTES, decode_hello, feed_socket, listen_local, unix_link
from ravnest.transport.stream import StreamLink
from ravnest.worker.resources import RING, LocalPeers, PeerConnection
from tests.unit.transport.kinds import CONFIG, Note, receive, run

DEADLINE_S = 60.0
Pair = tuple[LocalPeers, LocalPeers]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a short path, as sockets need."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def pair(directory: Path) -> Iterator[Pair]:
    anna, bert = LocalPeers(directory, "anna"), LocalPeers(directory, "bert")
    with contextlib.closing(anna), contextlib.closing(bert):
        yield anna, bert


def connect(pair: Pair, purpose: str, buffer: SharedBuffer | None = None) -> tuple[PeerConnection, PeerConnection]:
    """Connect both; `buffer` is anna's."""
    calling: Future[PeerConnection] = run(pair[1].connect, "anna", purpose, CONFIG, deadline_s=DEADLINE_S)
    anna = pair[0].connect("bert", purpose, CONFIG, deadline_s=DEADLINE_S, buffer=buffer)
    return anna, calling.result(DEADLINE_S)


def check_messages(left: StreamLink, right: StreamLink) -> None:
    for sender, receiver in ((left, right), (right, left)):
        sending = run(sender.send, Note(1, "a"), [b"x" * 100_000], deadline_s=DEADLINE_S)
        assert receive(receiver, DEADLINE_S) == (Note(1, "a"), [b"x" * 100_000])
        sending.result(DEADLINE_S)


def test_stages_are_linked_over_a_unix_socket(pair: Pair) -> None:
    anna, bert = connect(pair, "stage")
    with anna.link, bert.link:
        assert (anna.kind, bert.kind) == ("unix", "unix")
        assert (anna.link.peer, bert.link.peer) == ("bert", "anna")
        assert anna.hint == ""
        check_messages(anna.link, bert.link)


@pytest.mark.skipif(not is_available(), reason="needs shared memory of Linux")
def test_rings_are_linked_over_shared_memory_and_a_peer_reads_the_buffer_in_place(pair: Pair) -> None:
    buffer = SharedBuffer(4096)
    array = buffer.floats(8)
    anna, bert = connect(pair, RING, buffer)
    with anna.link, bert.link:
        assert (anna.kind, bert.kind) == ("memory", "memory")
        check_messages(anna.link, bert.link)
        array[:] = np.arange(8)  # written after the connection was made
        seen = cast("SharedLink", bert.link).peer_buffer
        offset = buffer.offset_of(array)
        assert seen is not None
        assert offset is not None
        assert np.array_equal(seen[offset : offset + array.nbytes].view(np.float32), array)
        assert not seen.flags.writeable
        assert cast("SharedLink", anna.link).peer_buffer is None, "bert published none"
    buffer.close()


def test_a_ring_without_shared_memory_is_linked_over_a_unix_socket(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ravnest.worker.resources.is_available", lambda: False)
    anna, bert = connect(pair, RING)
    with anna.link, bert.link:
        assert anna.kind == "unix"
        check_messages(anna.link, bert.link)


def test_a_closed_peer_is_a_timeout(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(LinkTimeout, match="bert"):
        pair[0].connect("bert", "stage", CONFIG, deadline_s=0.05)


def test_the_feed_leads_to_the_coordinator_of_the_directory(directory: Path, pair: Pair) -> None:
    with listen_local(feed_socket(directory)) as listener:
        listener.settimeout(DEADLINE_S)
        dialing = run(pair[0].connect_feed, "feed c1", CONFIG, deadline_s=DEADLINE_S)
        sock, _ = listener.accept()
        name, introduction = decode_hello(sock.recv(HELLO_BYTES, socket.MSG_WAITALL))
        assert (name, introduction.generation) == ("anna", CONFIG.generation)
        sock.sendall(encode_introduction(introduction))
        with unix_link(sock, CONFIG, peer=name) as coordinator, dialing.result(DEADLINE_S) as feed:
            assert feed.peer == "coordinator"
            check_messages(coordinator, feed)
