"""Conformance suite of links: in memory, over unix sockets and over TLS."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence

import pytest

from ravnest.errors import LinkClosed, LinkTimeout
from ravnest.transport.stream import StreamLink
from tests.unit.transport.kinds import DEADLINE_S, Kind, Note, receive, run


def send(link: StreamLink, number: int, *buffers: bytes, deadline_s: float = DEADLINE_S) -> None:
    link.send(Note(number), buffers, deadline_s=deadline_s)


def send_each(link: StreamLink, messages: Iterable[Sequence[bytes]]) -> None:
    for number, buffers in enumerate(messages):
        send(link, number, *buffers)


def until_closed(step: Callable[[StreamLink], object], link: StreamLink) -> None:
    try:
        while True:
            step(link)
    except LinkClosed:
        return


def test_messages_arrive_whole_and_in_order(kind: Kind) -> None:
    rng = random.Random(1)
    messages = [[rng.randbytes(rng.choice([0, 1, 100, 5000])) for _ in range(rng.randrange(5))] for _ in range(60)]
    with kind.pair() as (left, right):
        sending = run(send_each, left, messages)
        for number, buffers in enumerate(messages):
            assert receive(right) == (Note(number), buffers)
        sending.result(DEADLINE_S)


def test_a_big_frame_is_received_into_the_given_memory(kind: Kind) -> None:
    data = random.Random(2).randbytes(10**6) * (kind.big_bytes // 10**6)
    memory = bytearray(len(data) + 2)
    with kind.pair() as (left, right):
        sending = run(send, left, 1, b"a", data, b"z")
        view = memoryview(memory)
        right.receive(lambda header, lengths: [view[:1], view[1:-1], view[-1:]], deadline_s=DEADLINE_S)
        sending.result(DEADLINE_S)
        assert right.stats.received.num_bytes == left.stats.sent.num_bytes > len(data)
    assert memory == b"a" + data + b"z"


def test_no_buffers_and_empty_buffers(kind: Kind) -> None:
    with kind.pair() as (left, right):
        send(left, 1)
        send(left, 2, b"")
        send(left, 3, b"", b"x", b"")
        assert receive(right) == (Note(1), [])
        assert receive(right) == (Note(2), [b""])
        assert receive(right) == (Note(3), [b"", b"x", b""])


def test_as_many_buffers_as_a_frame_may_have(kind: Kind) -> None:
    buffers = [bytes([i % 256]) * (i % 7) for i in range(4096)]
    with kind.pair() as (left, right):
        sending = run(send, left, 1, *buffers)
        assert receive(right) == (Note(1), buffers)
        sending.result(DEADLINE_S)


def test_many_small_frames(kind: Kind) -> None:
    with kind.pair() as (left, right):
        sending = run(send_each, left, [[b"abc"]] * 2000)
        assert [receive(right)[0].number for _ in range(2000)] == list(range(2000))
        sending.result(DEADLINE_S)
        assert (left.stats.sent.frames, right.stats.received.frames) == (2000, 2000)
        assert left.stats.sent.num_bytes == right.stats.received.num_bytes


def test_both_ways_at_once(kind: Kind) -> None:
    def send_all(link: StreamLink, seed: int) -> None:
        rng = random.Random(seed)
        for number in range(150):
            send(link, number, rng.randbytes(rng.randrange(60_000)))

    def receive_all(link: StreamLink, seed: int) -> None:
        rng = random.Random(seed)
        for number in range(150):
            assert receive(link) == (Note(number), [rng.randbytes(rng.randrange(60_000))])

    with kind.pair() as (left, right):
        jobs = [(send_all, left, 1), (receive_all, left, 2), (send_all, right, 2), (receive_all, right, 1)]
        futures = [run(job, link, seed) for job, link, seed in jobs]
        for future in futures:
            future.result(4 * DEADLINE_S)


def test_two_senders_do_not_mix_their_frames(kind: Kind) -> None:
    def send_same(link: StreamLink, number: int) -> None:
        for _ in range(20):
            send(link, number, bytes([number]) * 70_000)

    with kind.pair() as (left, right):
        senders = [run(send_same, left, number) for number in (1, 2)]
        for _ in range(40):
            header, (data,) = receive(right)
            assert data == bytes([header.number]) * 70_000
        for sender in senders:
            sender.result(DEADLINE_S)


def test_a_slow_reader_stops_the_writer_and_nothing_is_lost(kind: Kind) -> None:
    data = bytes(4000)

    def fill(link: StreamLink) -> None:
        for number in range(kind.in_flight_bytes // len(data) + 1):
            send(link, number, data, deadline_s=0.1)

    with kind.pair() as (left, right):
        with pytest.raises(LinkTimeout):
            fill(left)
        num_sent = left.stats.sent.frames
        assert num_sent > 0
        assert left.stats.sent.blocked_s > 0
        assert not left.closed
        assert [receive(right)[0].number for _ in range(num_sent)] == list(range(num_sent))
        send(left, num_sent, data)
        assert receive(right) == (Note(num_sent), [data])


def test_a_frame_larger_than_the_buffers_waits_for_its_reader(kind: Kind) -> None:
    data = bytes(kind.in_flight_bytes + 2**20)
    with kind.pair() as (left, right):
        with pytest.raises(LinkTimeout):
            send(left, 1, data, deadline_s=0.2)
        assert left.closed  # half a frame is out
        with pytest.raises(LinkClosed, match=r"connection to .* lost"):
            receive(right)
        assert right.closed


def test_a_deadline_before_a_frame_leaves_the_link_usable(kind: Kind) -> None:
    with kind.pair() as (left, right):
        for deadline_s in (0.0, 0.02):
            with pytest.raises(LinkTimeout, match="no progress"):
                receive(right, deadline_s=deadline_s)
        assert right.stats.received.blocked_s > 0
        send(left, 1, b"still here")
        assert receive(right) == (Note(1), [b"still here"])


def test_a_second_receiver_waits_for_the_first(kind: Kind) -> None:
    placing, release = threading.Event(), threading.Event()

    def place(header: object, lengths: tuple[int, ...]) -> list[memoryview]:
        placing.set()
        assert release.wait(DEADLINE_S)
        return []

    with kind.pair() as (left, right):
        send(left, 1)
        first = run(lambda: right.receive(place, deadline_s=DEADLINE_S))
        assert placing.wait(DEADLINE_S)
        with pytest.raises(LinkTimeout, match="busy"):
            receive(right, deadline_s=0.02)
        release.set()
        assert first.result(DEADLINE_S) == Note(1)


def test_close_wakes_an_idle_receiver(kind: Kind) -> None:
    with kind.pair() as (left, right):
        del left
        about_to_wait = threading.Event()

        def wait() -> None:
            about_to_wait.set()
            receive(right, deadline_s=60)

        waiting = run(wait)
        assert about_to_wait.wait(DEADLINE_S)
        right.close()
        with pytest.raises(LinkClosed, match="closed locally"):
            waiting.result(DEADLINE_S)


def test_close_wakes_sender_and_receiver_in_the_middle_of_frames(kind: Kind) -> None:
    placing, release = threading.Event(), threading.Event()

    def place(header: object, lengths: tuple[int, ...]) -> list[memoryview]:
        placing.set()
        assert release.wait(DEADLINE_S)
        return [memoryview(bytearray(length)) for length in lengths]

    with kind.pair() as (left, right):
        data = bytes(kind.in_flight_bytes + 2**20)
        sending = run(send, left, 1, data, deadline_s=60)
        receiving = run(lambda: right.receive(place, deadline_s=60))
        assert placing.wait(DEADLINE_S)  # the frame has begun, and cannot end
        left.close()
        with pytest.raises(LinkClosed, match="closed locally"):
            sending.result(DEADLINE_S)
        right.close()
        release.set()
        with pytest.raises(LinkClosed, match="closed locally"):
            receiving.result(DEADLINE_S)


def test_frames_sent_before_closing_still_arrive(kind: Kind) -> None:
    with kind.pair() as (left, right):
        send(left, 1, b"last")
        left.close()
        left.close()
        assert left.closed
        assert receive(right) == (Note(1), [b"last"])
        with pytest.raises(LinkClosed, match=r"connection to .* lost"):
            receive(right)
        with pytest.raises(LinkClosed, match="closed locally"):
            receive(right)


def test_sending_to_a_peer_that_closed_fails(kind: Kind) -> None:
    with kind.pair() as (left, right):
        right.close()
        with pytest.raises(LinkClosed):
            send_each(left, [[bytes(10_000)]] * 1000)
        assert left.closed
        with pytest.raises(LinkClosed, match="closed locally"):
            send(left, 0)


def test_closing_from_a_third_thread_leaks_no_descriptor(kind: Kind) -> None:
    def receive_one(link: StreamLink) -> None:
        receive(link)
        begun.set()

    before = len(os.listdir("/dev/fd"))
    for _ in range(10):
        begun = threading.Event()
        with kind.pair() as (left, right):
            jobs = [
                run(until_closed, lambda link: send(link, 1, bytes(50_000)), left),
                run(until_closed, receive_one, right),
                run(until_closed, receive, left),
            ]
            assert begun.wait(DEADLINE_S)
            left.close()
            for job in jobs:
                job.result(DEADLINE_S)
    assert len(os.listdir("/dev/fd")) == before


def test_the_generation_of_a_link_can_change(kind: Kind) -> None:
    with kind.pair() as (left, right):
        left.generation = right.generation = 8
        send(left, 1)
        assert receive(right) == (Note(1), [])


def test_stats_are_a_snapshot_of_each_direction(kind: Kind) -> None:
    with kind.pair() as (left, right):
        before = left.stats
        send(right, 1, b"abc")
        receive(left)
        assert (before.received.frames, left.stats.received.frames) == (0, 1)
        assert (right.stats.sent.frames, right.stats.received.frames) == (1, 0)


def test_bad_arguments_raise_value_error(kind: Kind) -> None:
    with kind.pair() as (left, right):
        for deadline_s in (-1.0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="deadline"):
                send(left, 1, deadline_s=deadline_s)
        send(left, 1, b"abc")
        with pytest.raises(ValueError, match="writable"):
            right.receive(lambda header, lengths: [memoryview(b"abc")], deadline_s=DEADLINE_S)
        assert right.closed
