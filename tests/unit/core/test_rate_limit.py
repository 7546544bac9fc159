"""The rate limiter: the rate holds for all links together, and closing a link does not wait for it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.core.rate_limit import RateLimiter
from ravnest.transport.pump import Pump, PumpConfig
from tests.unit.core.manual_clock import ManualClock
from tests.unit.transport.kinds import CONFIG, Note, receive
from tests.unit.transport.memory import memory_pair

FRAMES = st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.0, 5.0)), min_size=1, max_size=50)


@given(FRAMES, st.floats(100.0, 10_000.0), st.floats(0.0, 1.0))
def test_never_exceeds_the_rate_plus_a_burst_and_a_frame(
    frames: list[tuple[int, float]], bytes_per_s: float, burst_s: float
) -> None:
    clock = ManualClock()
    rate_limiter = RateLimiter(bytes_per_s, burst_s=burst_s, clock=clock)
    sent_bytes = 0
    for num_bytes, idle_s in frames:
        clock.advance(idle_s + rate_limiter.reserve(num_bytes))
        assert sent_bytes <= bytes_per_s * (clock.now_s() + burst_s) * (1 + 1e-9) + 1e-6
        sent_bytes += num_bytes


@given(FRAMES)
def test_a_busy_sender_uses_the_whole_rate(frames: list[tuple[int, float]]) -> None:
    clock = ManualClock()
    rate_limiter = RateLimiter(1000.0, burst_s=0.0, clock=clock)
    for num_bytes, _ in frames:
        clock.advance(rate_limiter.reserve(num_bytes))
    assert clock.now_s() == pytest.approx(sum(num_bytes for num_bytes, _ in frames[:-1]) / 1000.0)


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_the_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="must be > 0"):
        RateLimiter(rate)


def test_two_pumps_share_a_rate_limiter() -> None:
    rate_limiter = RateLimiter(1e6, burst_s=0.0)
    pairs = [memory_pair(CONFIG, capacity_bytes=2**20) for _ in range(2)]
    pumps = [
        Pump(near, lambda h, n: [], lambda h, v: None, lambda e: None, PumpConfig(rate_limiter=rate_limiter))
        for near, _ in pairs
    ]
    start_s = time.monotonic()
    for pump in pumps:
        pump.start()
        for number in range(3):
            pump.put(Note(number), [bytes(100_000)], deadline_s=60.0)
    for _, far in pairs:
        for _ in range(3):
            receive(far)
    took_s = time.monotonic() - start_s
    for pump, (_, far) in zip(pumps, pairs, strict=True):
        pump.close()
        far.close()
    assert took_s > 0.45  # six tenths of a second, less the last frame


def test_closing_a_pump_does_not_wait_for_the_rate_limiter() -> None:
    near, far = memory_pair(CONFIG, capacity_bytes=2**20)
    pump = Pump(
        near, lambda h, n: [], lambda h, v: None, lambda e: None, PumpConfig(rate_limiter=RateLimiter(1.0, burst_s=0.0))
    )
    pump.start()
    for number in range(2):
        pump.put(Note(number), [bytes(1000)], deadline_s=60.0)
    receive(far)
    start_s = time.monotonic()
    pump.close(flush_s=60.0)
    assert time.monotonic() - start_s < 2.0
    far.close()
