"""The speed of a PC is measured once, by one agent at a time, and remembered under its conditions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ravnest.node.measurement import MeasuredSpeed, SpeedCache, measure_speed_once

WEEK_S = 7 * 86400.0


def test_a_speed_is_remembered_for_a_week_under_its_conditions(tmp_path: Path) -> None:
    now_s = [1000.0]
    cache = SpeedCache(tmp_path / "speed.json", "a processor", lambda: now_s[0])
    assert cache.get(1) is None
    cache.put(MeasuredSpeed(30.0, threads=2))
    assert cache.get(2) == MeasuredSpeed(30.0, threads=2)
    assert cache.get(1) == MeasuredSpeed(15.0, threads=1)
    assert SpeedCache(tmp_path / "speed.json", "another", lambda: now_s[0]).get(2) is None
    now_s[0] = 999.0  # the clock was set back
    assert cache.get(2) is None
    now_s[0] = 1000.0 + WEEK_S
    assert cache.get(2) is None
    cache.put(MeasuredSpeed(30.0, threads=2), is_busy=True)
    now_s[0] += 599.0
    assert cache.get(2) is not None
    now_s[0] += 1.0
    assert cache.get(2) is None


@pytest.mark.parametrize(
    "content", ["", "nonsense", '{"conditions": "c", "at_s": 0, "valid_s": 9e9, "speed": {"gflops": -1, "threads": 1}}']
)
def test_an_invalid_file_is_ignored(content: str, tmp_path: Path) -> None:
    (tmp_path / "speed.json").write_text(content)
    assert SpeedCache(tmp_path / "speed.json", "c", lambda: 1.0).get(1) is None


def test_the_speed_of_an_accelerator_is_measured_each_time(tmp_path: Path) -> None:
    cache = SpeedCache(tmp_path / "speed.json", "c")
    cache.put(MeasuredSpeed(900.0, threads=1, device="cuda", memory_bytes=10**9))
    assert cache.get(1) is None


@pytest.mark.slow
def test_agents_that_start_together_measure_once(tmp_path: Path) -> None:
    lines: list[str] = []

    async def measure() -> MeasuredSpeed:
        cache = SpeedCache(tmp_path / "speed.json", "c")
        return await measure_speed_once(cache, tmp_path, lambda: 1, None, lines.append)

    async def both() -> tuple[MeasuredSpeed, MeasuredSpeed]:
        return await asyncio.gather(measure(), measure())

    first, second = asyncio.run(both())
    assert first.gflops > 0
    assert second.gflops == first.gflops
    assert sorted(lines) == ["measuring this PC", "waits until another agent has measured this PC"]
