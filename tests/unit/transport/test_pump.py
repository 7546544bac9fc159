"""The pump: order, backpressure, errors that reach the owner, and no leaked threads."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from ravnest.errors import FrameError, LinkClosed, LinkTimeout
from ravnest.transport.link import Flow, Link, LinkStats, Place
from ravnest.transport.pump import Pump, PumpConfig
from ravnest.transport.stream import StreamLink
from tests.unit.transport.kinds import CONFIG, DEADLINE_S, Kind, Note, receive, run
from tests.unit.transport.memory import memory_pair

BIG = bytes(2**22)  # more than a memory link holds: sending it waits for a reader


class Owner:
    """Records the callbacks of a pump."""

    def __init__(self) -> None:
        self.messages: queue.Queue[tuple[msgspec.Struct, list[bytes]]] = queue.Queue()
        self.errors: queue.Queue[Exception] = queue.Queue()

    def place(self, header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
        return [memoryview(bytearray(length)) for length in lengths]

    def on_message(self, header: msgspec.Struct, buffers: Sequence[memoryview]) -> None:
        self.messages.put((header, [bytes(buffer) for buffer in buffers]))

    def pump(self, link: Link, config: PumpConfig | None = None) -> Pump:
        return Pump(link, self.place, self.on_message, self.errors.put, config)


class ScriptedLink:
    """A link that receives a script, then waits to be closed."""

    generation = 0
    peer = "script"
    stats = LinkStats(sent=Flow(), received=Flow())

    def __init__(self, script: list[Note | LinkTimeout]) -> None:
        self._script = script
        self._closing = threading.Event()

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def send(self, header: msgspec.Struct, buffers: Sequence[object] = (), *, deadline_s: float) -> None:
        """Ignored."""

    def receive(self, place: Place, *, deadline_s: float) -> msgspec.Struct:
        if not self._script:
            assert self._closing.wait(deadline_s)
            raise LinkClosed("closed")
        step = self._script.pop(0)
        if isinstance(step, LinkTimeout):
            raise step
        place(step, ())
        return step

    def close(self) -> None:
        self._closing.set()


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert [name for name in names if name.startswith(("send to", "receive from"))] == []


@pytest.fixture
def pair() -> Iterator[tuple[StreamLink, StreamLink]]:
    near, far = memory_pair(CONFIG, names=("right", "left"))
    with near, far:
        yield near, far


def test_messages_go_both_ways_in_order(kind: Kind, owner: Owner) -> None:
    other = Owner()
    sent: queue.Queue[int] = queue.Queue()
    with kind.pair() as (left, right), owner.pump(left) as here, other.pump(right) as there:
        for number in range(100):
            here.put(Note(number), [bytes(number)], functools.partial(sent.put, number), deadline_s=DEADLINE_S)
            there.put(Note(-number), deadline_s=DEADLINE_S)
        for number in range(100):
            assert other.messages.get(timeout=DEADLINE_S) == (Note(number), [bytes(number)])
            assert owner.messages.get(timeout=DEADLINE_S) == (Note(-number), [])
            assert sent.get(timeout=DEADLINE_S) == number
        assert there.close(flush_s=DEADLINE_S)
        assert isinstance(owner.errors.get(timeout=DEADLINE_S), LinkClosed)
    assert other.errors.empty()


def test_a_full_queue_blocks_the_caller(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    near, far = pair
    with owner.pump(near, PumpConfig(capacity=2)) as pump:
        pump.put(Note(1), [BIG], deadline_s=DEADLINE_S)
        pump.put(Note(2), [BIG], deadline_s=DEADLINE_S)
        assert pump.depth == 2
        with pytest.raises(LinkTimeout, match="accepted none of 2 messages"):
            pump.put(Note(3), deadline_s=0.02)
        waiting = run(pump.put, Note(3), deadline_s=DEADLINE_S)
        for number in (1, 2, 3):
            assert receive(far)[0] == Note(number)
        waiting.result(DEADLINE_S)
        assert pump.close(flush_s=DEADLINE_S)
        assert pump.depth == 0


def test_on_sent_is_called_after_the_buffers_were_sent(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    near, far = pair
    sent = threading.Event()
    with owner.pump(near) as pump:
        pump.put(Note(1), [BIG], sent.set, deadline_s=DEADLINE_S)
        assert not sent.is_set()
        receive(far)
        assert sent.wait(DEADLINE_S)


def test_closing_with_a_flush_sends_the_queue(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    near, far = pair
    with owner.pump(near) as pump:
        for number in range(3):
            pump.put(Note(number), [BIG], deadline_s=DEADLINE_S)
        closing = run(pump.close, flush_s=DEADLINE_S)
        assert [receive(far)[0] for _ in range(3)] == [Note(0), Note(1), Note(2)]
        assert closing.result(DEADLINE_S)
    assert owner.errors.empty()


def test_closing_without_a_flush_drops_the_queue(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    near, far = pair
    with owner.pump(near, PumpConfig(capacity=2)) as pump:
        pump.put(Note(1), [BIG], deadline_s=DEADLINE_S)
        pump.put(Note(2), [BIG], deadline_s=DEADLINE_S)
        waiting = run(pump.put, Note(3), deadline_s=60)
        assert not pump.close()
        assert not pump.close()
        with pytest.raises(LinkClosed, match="is stopped"):
            waiting.result(DEADLINE_S)
    with pytest.raises(LinkClosed):
        receive(far)
    assert owner.errors.empty()  # a local close is not an error


def test_the_death_of_the_peer_is_reported_once(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    near, far = pair
    with owner.pump(near) as pump:
        pump.put(Note(1), [BIG], deadline_s=DEADLINE_S)
        far.close()
        assert isinstance(owner.errors.get(timeout=DEADLINE_S), LinkClosed)
        assert not pump.close(flush_s=DEADLINE_S)
        with pytest.raises(LinkClosed, match="is stopped"):
            pump.put(Note(2), deadline_s=DEADLINE_S)
    assert owner.errors.empty()


def test_a_rejected_frame_is_reported(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    near, far = pair
    far.generation += 1
    with owner.pump(near):
        far.send(Note(1), deadline_s=DEADLINE_S)
        assert isinstance(owner.errors.get(timeout=DEADLINE_S), FrameError)


def test_a_frame_that_takes_too_long_is_reported(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    near, _ = pair
    with owner.pump(near, PumpConfig(frame_s=0.02)) as pump:
        pump.put(Note(1), [BIG], deadline_s=DEADLINE_S)
        assert isinstance(owner.errors.get(timeout=DEADLINE_S), LinkTimeout)
        assert near.closed


def test_an_idle_peer_is_not_an_error(owner: Owner) -> None:
    link = ScriptedLink([LinkTimeout("nothing yet"), Note(1), LinkTimeout("nothing yet"), Note(2)])
    with Pump(link, owner.place, owner.on_message, owner.errors.put):
        assert owner.messages.get(timeout=DEADLINE_S) == (Note(1), [])
        assert owner.messages.get(timeout=DEADLINE_S) == (Note(2), [])
    assert owner.errors.empty()


def test_an_error_in_a_callback_reaches_the_owner(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    def fail(header: msgspec.Struct, buffers: Sequence[memoryview]) -> None:
        raise ZeroDivisionError("bug in the callback")

    near, far = pair
    with Pump(near, owner.place, fail, owner.errors.put):
        far.send(Note(1), deadline_s=DEADLINE_S)
        assert isinstance(owner.errors.get(timeout=DEADLINE_S), ZeroDivisionError)
        assert near.closed


def test_a_callback_may_close_the_pump(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    near, far = pair
    closed = threading.Event()

    def close(header: msgspec.Struct, buffers: Sequence[memoryview]) -> None:
        pump.close()
        closed.set()

    with Pump(near, owner.place, close, owner.errors.put) as pump:
        far.send(Note(1), deadline_s=DEADLINE_S)
        assert closed.wait(DEADLINE_S)
    assert owner.errors.empty()


def test_a_stuck_callback_does_not_hang_the_owner(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    near, far = pair
    stuck, release = threading.Event(), threading.Event()

    def wait(header: msgspec.Struct, buffers: Sequence[memoryview]) -> None:
        stuck.set()
        assert release.wait(DEADLINE_S)

    pump = Pump(near, owner.place, wait, owner.errors.put, PumpConfig(callback_s=0.05))
    with contextlib.closing(far):
        pump.start()
        far.send(Note(1), deadline_s=DEADLINE_S)
        assert stuck.wait(DEADLINE_S)
        with pytest.raises(LinkTimeout, match="stuck in a callback"):
            pump.close()
        release.set()
        pump.close(flush_s=DEADLINE_S)


def test_a_pump_never_started_can_be_closed(owner: Owner, pair: tuple[StreamLink, StreamLink]) -> None:
    pump = owner.pump(pair[0])
    assert pump.close()
    assert pair[0].closed
