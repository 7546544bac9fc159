"""Links through shared memory: messages of any size, closed ends, and checks of the peer's memory."""

from __future__ import annotations

import fcntl
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ravnest.averaging.shared_memory import is_available, shared_link
from ravnest.errors import HandshakeError, LinkClosed, LinkTimeout
from ravnest.protocol.averaging import Chunk, Message, Phase
from ravnest.transport.link import LinkConfig
from tests.unit.averaging.shared_pair import shared_pair

pytestmark = pytest.mark.skipif(not is_available(), reason="needs memfd, eventfd and descriptor passing")

CONFIG = LinkConfig(headers=Message)
HEADER = Chunk(0, 0, 0, Phase.REDUCE, 0, 0)
DEADLINE_S = 30.0


@pytest.mark.parametrize("size", [0, 1, 1000, 2**21, 5 * 2**20 + 3])
def test_messages_arrive_whole_and_in_order(size: int) -> None:
    left, right = shared_pair(CONFIG)
    sent = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    received = np.empty_like(sent)
    with left, right, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            sending = pool.submit(left.send, HEADER, [sent.data], deadline_s=DEADLINE_S)
            received.fill(0)
            assert right.receive(lambda header, lengths: [received.data], deadline_s=DEADLINE_S) == HEADER
            sending.result(DEADLINE_S)
            np.testing.assert_array_equal(received, sent)


def test_messages_sent_before_the_close_arrive() -> None:
    left, right = shared_pair(CONFIG)
    with right:
        left.send(HEADER, [bytes(5)], deadline_s=DEADLINE_S)
        left.close()
        assert right.receive(lambda header, lengths: [memoryview(bytearray(5))], deadline_s=DEADLINE_S) == HEADER
        with pytest.raises(LinkClosed):
            right.receive(lambda header, lengths: [], deadline_s=DEADLINE_S)
        with pytest.raises(LinkClosed):
            right.send(HEADER, [bytes(2**22)], deadline_s=DEADLINE_S)


def test_a_peer_that_does_not_read_stops_the_sender_until_the_deadline() -> None:
    left, right = shared_pair(CONFIG)
    with left, right, pytest.raises(LinkTimeout):
        left.send(HEADER, [bytes(2**22)], deadline_s=0.1)


def test_closing_wakes_a_waiting_receiver() -> None:
    left, right = shared_pair(CONFIG)
    with right, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(left.receive, lambda header, lengths: [], deadline_s=DEADLINE_S)
        left.close()
        with pytest.raises(LinkClosed):
            waiting.result(DEADLINE_S)


def test_a_peer_without_shared_memory_is_rejected() -> None:
    near, far = socket.socketpair()
    with far:
        far.sendall(b"what")
        with pytest.raises(HandshakeError, match="shared memory"):
            shared_link(near, CONFIG, peer="b")


@pytest.mark.parametrize("seals", [0, 0x0002 | 0x0004])
def test_memory_that_is_not_sealed_or_too_small_is_rejected(seals: int) -> None:
    near, far = socket.socketpair()
    memory = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096 if seals else 2**21)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    counters = [os.eventfd(0), os.eventfd(0)]
    with far:
        socket.send_fds(far, [b"RVNS"], [memory, *counters])
        with pytest.raises(HandshakeError, match="must be sealed"):
            shared_link(near, CONFIG, peer="b")
    for fd in (memory, *counters):
        os.close(fd)
