"""What is sent keeps to a rate, however many links share it; who is told to stop is not held up."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.core.clock import ManualClock
from ravnest.net.memory import memory_pair
from ravnest.net.pace import Pace
from ravnest.net.pump import Pump, PumpConfig
from tests.net.kinds import CONFIG, Note, receive

FRAMES = st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.0, 5.0)), min_size=1, max_size=50)


@given(FRAMES, st.floats(100.0, 10_000.0), st.floats(0.0, 1.0))
def test_never_more_than_the_rate_a_burst_and_a_frame(
    frames: list[tuple[int, float]], bytes_per_s: float, burst_s: float
) -> None:
    clock = ManualClock()
    pace = Pace(bytes_per_s, burst_s=burst_s, clock=clock)
    sent_bytes = 0
    for num_bytes, idle_s in frames:
        clock.advance(idle_s + pace.book(num_bytes))
        assert sent_bytes <= bytes_per_s * (clock.now_s() + burst_s) * (1 + 1e-9) + 1e-6
        sent_bytes += num_bytes


@given(FRAMES)
def test_a_sender_that_always_has_something_uses_the_whole_rate(frames: list[tuple[int, float]]) -> None:
    clock = ManualClock()
    pace = Pace(1000.0, burst_s=0.0, clock=clock)
    for num_bytes, _ in frames:
        clock.advance(pace.book(num_bytes))
    assert clock.now_s() == pytest.approx(sum(num_bytes for num_bytes, _ in frames[:-1]) / 1000.0)


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_is_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        Pace(rate)


def test_two_pumps_share_a_pace() -> None:
    pace = Pace(1e6, burst_s=0.0)
    pairs = [memory_pair(CONFIG, capacity_bytes=2**20) for _ in range(2)]
    pumps = [Pump(near, lambda h, n: [], lambda h, v: None, lambda e: None, PumpConfig(pace=pace)) for near, _ in pairs]
    began_s = time.monotonic()
    for pump in pumps:
        pump.start()
        for number in range(3):
            pump.put(Note(number), [bytes(100_000)], deadline_s=5.0)
    for _, far in pairs:
        for _ in range(3):
            receive(far)
    took_s = time.monotonic() - began_s
    for pump, (_, far) in zip(pumps, pairs, strict=True):
        pump.close()
        far.close()
    assert took_s > 0.45  # six tenths of a second, less the last frame


def test_a_pump_that_closes_does_not_wait_for_its_turn() -> None:
    near, far = memory_pair(CONFIG, capacity_bytes=2**20)
    pump = Pump(near, lambda h, n: [], lambda h, v: None, lambda e: None, PumpConfig(pace=Pace(1.0, burst_s=0.0)))
    pump.start()
    for number in range(2):
        pump.put(Note(number), [bytes(1000)], deadline_s=5.0)
    receive(far)
    began_s = time.monotonic()
    pump.close(flush_s=5.0)
    assert time.monotonic() - began_s < 2.0
    far.close()
