"""Agents of a PC with accelerators: each offers the device that it computes on, or a share of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ravnest.node.offer import PcOffer
from ravnest.profiling.limits import MachineLimits
from tests.accelerator.installed import install

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

MEMORY = 2_000_000_000
OFFERED = MEMORY * 9 // 10  # a tenth is a reserve


def test_agents_on_one_accelerator_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "package", monkeypatch, devices=2, memory_bytes=MEMORY)
    lines: list[str] = []
    first, second, third = (
        PcOffer(MachineLimits(threads=1), tmp_path, tmp_path / "host", device=device)
        for device in ("auto", "testacc:0", "cpu")
    )
    with first.claimed():
        profile = asyncio.run(first.measure(lines.append))
        assert (profile.device, profile.device_name) == ("testacc:0", "Test Accelerator 0")
        assert profile.memory_bytes == OFFERED
        assert profile.host_memory_bytes > 0
        assert "computing on testacc:0; this PC also has testacc:1: start an agent for each" in lines
        assert first.changed() is None
        with second.claimed():
            shared = asyncio.run(second.measure(lines.append))
            assert (shared.device, shared.memory_bytes) == ("testacc:0", OFFERED // 2)
            assert "1 other agent of this PC computes on testacc:0: its memory and speed are shared" in lines
            changed = first.changed()
            assert changed is not None
            assert changed[0].memory_bytes == OFFERED // 2
        with third.claimed():
            assert asyncio.run(third.measure(lines.append)).device == "cpu"
            changed = first.changed()
            assert changed is not None
            assert changed[0].memory_bytes == OFFERED, "an agent on the processor has no share of the accelerator"
