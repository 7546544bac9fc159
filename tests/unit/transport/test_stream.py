"""Frames over a scripted channel: waits that are too rare or too slow on real links."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from ravnest.core import clock as deadline_module
from ravnest.errors import LinkClosed, LinkTimeout
from ravnest.transport.frame import PREFIX_BYTES, encode_head
from ravnest.transport.stream import RefCount, StreamLink
from tests.unit.transport.kinds import CONFIG, DEADLINE_S, Note, allocate_into, run

HEAD = encode_head(Note(1), [4], generation=CONFIG.generation, max_bytes=100)


class SlowClock:
    """Replaces the `time` module; advances when a channel waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class SlowChannel:
    """Moves one chunk after each wait of `wait_s`; holds writes until flushed."""

    def __init__(self, clock: SlowClock, wait_s: float, chunks: Sequence[bytes] = ()) -> None:
        self.clock, self.wait_s, self.chunks = clock, wait_s, list(chunks)
        self.is_ready = False
        self.num_flushes_left = 2
        self.is_closed = False

    def try_write(self, views: Sequence[memoryview]) -> int:
        return views[0].nbytes if self._consume_ready() else 0

    def try_flush(self) -> bool:
        if self._consume_ready():
            self.num_flushes_left -= 1
        return self.num_flushes_left == 0

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        if not self._consume_ready():
            return None
        chunk = self.chunks.pop(0) if self.chunks else b""
        views[0][: len(chunk)] = chunk
        return len(chunk)

    def _consume_ready(self) -> bool:
        was_ready, self.is_ready = self.is_ready, False
        return was_ready

    def detect_dead_peer(self, after_s: float) -> None:
        raise AssertionError("not requested")

    def wait_writable(self, timeout_s: float) -> bool:
        self.clock.now_s += min(self.wait_s, timeout_s)
        self.is_ready = self.wait_s < timeout_s
        return self.is_ready

    wait_readable = wait_writable

    def shutdown(self) -> None:
        """No thread waits here."""

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SlowClock:
    clock = SlowClock()
    monkeypatch.setattr(deadline_module, "time", clock)
    return clock


def test_the_wait_for_a_frame_does_not_count_against_its_transfer(clock: SlowClock) -> None:
    chunks = [HEAD[:PREFIX_BYTES] + b"", HEAD[PREFIX_BYTES:], b"data"]
    link = StreamLink(SlowChannel(clock, 6.0, chunks), CONFIG, peer="slow")
    with pytest.raises(LinkTimeout):  # 6 s to begin, then 6 + 6 s where 10 are allowed
        link.receive(allocate_into({}), deadline_s=10)
    assert link.closed
    memory: dict[int, bytearray] = {}
    link = StreamLink(SlowChannel(clock, 4.0, chunks), CONFIG, peer="slow")
    assert link.receive(allocate_into(memory), deadline_s=10) == Note(1)  # 4 s to begin, then 4 + 4 s: 12 in all
    assert memory[0] == b"data"


def test_a_frame_is_sent_when_the_channel_is_flushed(clock: SlowClock) -> None:
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
    with pytest.raises(LinkTimeout, match=r"no progress .* for 10 s"):
        link.send(Note(1), deadline_s=10)
    assert not link.closed
    link.close()
    assert channel.is_closed


def test_a_resource_is_freed_when_its_last_user_leaves() -> None:
    inside, leave, freed = threading.Event(), threading.Event(), threading.Event()
    users = RefCount("resource", freed.set)

    def use() -> bool:
        with users:
            inside.set()
            assert leave.wait(DEADLINE_S)
            return freed.is_set()

    using = run(use)
    assert inside.wait(DEADLINE_S)
    users.close(lambda: None)
    users.close(lambda: pytest.fail("closed twice"))
    with pytest.raises(LinkClosed, match="resource closed locally"), users:
        pass
    leave.set()
    assert not using.result(DEADLINE_S)
    assert freed.is_set()
