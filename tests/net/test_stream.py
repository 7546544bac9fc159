"""Frames over a scripted channel: the waits that real links make too rarely or too slowly to test."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from ravnest.core.errors import LinkClosed, LinkTimeout
from ravnest.net import deadline as deadline_module
from ravnest.net.frame import PREFIX_BYTES, encode_head
from ravnest.net.gate import Gate
from ravnest.net.stream import StreamLink
from tests.net.kinds import CONFIG, DEADLINE_S, Note, run, taking

HEAD = encode_head(Note(1), [4], generation=CONFIG.generation, max_bytes=100)


class SlowClock:
    """Stands in for the `time` module; moves when a channel waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class SlowChannel:
    """Takes or brings one piece after each wait of `wait_s`; writes sit in it until flushed."""

    def __init__(self, clock: SlowClock, wait_s: float, pieces: Sequence[bytes] = ()) -> None:
        self.clock, self.wait_s, self.pieces = clock, wait_s, list(pieces)
        self.is_ready = False
        self.num_flushes_left = 2
        self.is_closed = False

    def try_write(self, views: Sequence[memoryview]) -> int:
        return views[0].nbytes if self._take_turn() else 0

    def try_flush(self) -> bool:
        if self._take_turn():
            self.num_flushes_left -= 1
        return self.num_flushes_left == 0

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        if not self._take_turn():
            return None
        piece = self.pieces.pop(0) if self.pieces else b""
        views[0][: len(piece)] = piece
        return len(piece)

    def _take_turn(self) -> bool:
        was_ready, self.is_ready = self.is_ready, False
        return was_ready

    def notice_death(self, after_s: float) -> None:
        raise AssertionError("nobody asked for it")

    def wait_writable(self, timeout_s: float) -> bool:
        self.clock.now_s += min(self.wait_s, timeout_s)
        self.is_ready = self.wait_s < timeout_s
        return self.is_ready

    wait_readable = wait_writable

    def shutdown(self) -> None:
        """Nobody waits here for real."""

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SlowClock:
    clock = SlowClock()
    monkeypatch.setattr(deadline_module, "time", clock)
    return clock


def test_waiting_for_a_frame_does_not_shorten_its_own_time(clock: SlowClock) -> None:
    pieces = [HEAD[:PREFIX_BYTES] + b"", HEAD[PREFIX_BYTES:], b"data"]
    link = StreamLink(SlowChannel(clock, 6.0, pieces), CONFIG, peer="slow")
    with pytest.raises(LinkTimeout):  # 6 s to begin, then 6 + 6 s where 10 are allowed
        link.receive(taking({}), deadline_s=10)
    assert link.closed
    memory: dict[int, bytearray] = {}
    link = StreamLink(SlowChannel(clock, 4.0, pieces), CONFIG, peer="slow")
    assert link.receive(taking(memory), deadline_s=10) == Note(1)  # 4 s to begin, then 4 + 4 s: 12 in all
    assert memory[0] == b"data"


def test_a_frame_is_sent_when_the_channel_holds_nothing_of_it_back(clock: SlowClock) -> None:
    channel = SlowChannel(clock, 1.0)
    link = StreamLink(channel, CONFIG, peer="slow")
    link.send(Note(1), [b"data"], deadline_s=10)
    assert channel.num_flushes_left == 0
    assert link.stats.sent.num_bytes == len(HEAD) + 4
    channel.num_flushes_left = 100
    with pytest.raises(LinkTimeout):
        link.send(Note(1), deadline_s=10)
    assert link.closed
    assert channel.is_closed


def test_a_send_that_never_began_leaves_the_link_open(clock: SlowClock) -> None:
    channel = SlowChannel(clock, 20.0)
    link = StreamLink(channel, CONFIG, peer="slow")
    with pytest.raises(LinkTimeout, match="did not move for 10 s"):
        link.send(Note(1), deadline_s=10)
    assert not link.closed
    link.close()
    assert channel.is_closed


def test_what_a_thread_uses_is_freed_when_it_leaves() -> None:
    inside, leave, freed = threading.Event(), threading.Event(), threading.Event()
    gate = Gate("the thing", freed.set)

    def use() -> bool:
        with gate:
            inside.set()
            assert leave.wait(DEADLINE_S)
            return freed.is_set()

    using = run(use)
    assert inside.wait(DEADLINE_S)
    gate.shut(lambda: None)
    gate.shut(lambda: pytest.fail("shut twice"))
    with pytest.raises(LinkClosed, match="the thing was closed on this side"), gate:
        pass
    leave.set()
    assert not using.result(DEADLINE_S)
    assert freed.is_set()
