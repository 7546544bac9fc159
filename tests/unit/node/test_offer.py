"""The offer of an agent: its share of the PC, which changes when other agents come or go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ravnest.errors import RavnestError
from ravnest.node.measurement import MeasuredSpeed, SpeedCache, measuring_conditions
from ravnest.node.offer import PcOffer, describe_share
from ravnest.profiling.host import host_memory, usable_cores
from ravnest.profiling.limits import MIN_MEMORY_BYTES, MachineLimits

CORES = max(1, int(usable_cores()))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the measured speed of this PC: 10 GFLOP/s for each core."""
    cache = SpeedCache(tmp_path / "speed.json", measuring_conditions())
    cache.put(MeasuredSpeed(10.0 * CORES, threads=CORES))
    return tmp_path


def test_a_speed_is_known_to_agents_with_other_directories(tmp_path: Path) -> None:
    """With `--data-dir`, for example; else two that start together would measure each other."""
    host = tmp_path / "host"
    host.mkdir()
    known = SpeedCache(host / "speed.json", measuring_conditions())
    known.put(MeasuredSpeed(10.0 * CORES, threads=CORES))
    lines: list[str] = []
    offer = PcOffer(MachineLimits(), tmp_path / "own", host)
    with offer.claimed():
        assert asyncio.run(offer.measure(lines.append)).gflops == pytest.approx(10.0 * CORES)
    assert lines == []


def test_agents_of_one_pc_share_it_and_adapt_when_others_come_and_go(directory: Path) -> None:
    lines: list[str] = []
    first, second = (PcOffer(MachineLimits(), directory, directory / "host") for _ in range(2))
    with first.claimed():
        alone = asyncio.run(first.measure(lines.append))
        assert alone.threads == CORES
        assert alone.gflops == pytest.approx(10.0 * CORES)
        assert first.changed() is None
        with second.claimed():
            other = asyncio.run(second.measure(lines.append))
            changed = first.changed()
            assert changed is not None
            mine, share = changed
            assert mine.threads + other.threads == max(CORES, 2)
            assert mine.gflops + other.gflops == pytest.approx(10.0 * CORES)
            assert mine.memory_bytes <= 0.7 * alone.memory_bytes
            assert describe_share(share).startswith("2 agents share this PC: offering ")
            assert first.changed() is None
            assert second.changed() is None
        changed = first.changed()
        assert changed is not None
        assert changed[0].threads == CORES
        assert describe_share(changed[1]).startswith("this agent has the PC for itself: offering ")
    assert lines == [], "the speed is known"


def test_limits_of_the_owner_are_kept(directory: Path) -> None:
    free = PcOffer(MachineLimits(), directory, directory / "host")
    limited = PcOffer(MachineLimits(threads=1, memory_bytes=500_000_000), directory, directory / "host")
    with free.claimed(), limited.claimed():
        profile = asyncio.run(limited.measure(lambda line: None))
        assert (profile.threads, profile.memory_bytes) == (1, 500_000_000)
        assert asyncio.run(free.measure(lambda line: None)).threads == max(1, CORES - 1)


def test_an_agent_without_enough_memory_does_not_start(directory: Path) -> None:
    greedy = PcOffer(MachineLimits(memory_bytes=host_memory().total_bytes), directory, directory / "host")
    late = PcOffer(MachineLimits(), directory, directory / "host")
    with greedy.claimed(), late.claimed(), pytest.raises(RavnestError, match="left for each of 2 agents here"):
        asyncio.run(late.measure(lambda line: None))
    assert host_memory().usable_bytes >= MIN_MEMORY_BYTES


def test_more_threads_than_cores_are_rejected(directory: Path) -> None:
    offer = PcOffer(MachineLimits(threads=CORES + 1), directory, None)
    with pytest.raises(ValueError, match=f"threads must be <= {usable_cores():g}, got {CORES + 1}"), offer.claimed():
        pass
