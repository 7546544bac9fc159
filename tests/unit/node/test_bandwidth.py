"""The line to the coordinator: measured, capped, and guessed when the coordinator is busy."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ravnest.node.client import Client, pinned_context
from ravnest.node.measurement import with_line
from ravnest.protocol.control import NodeProfile
from tests.unit.node.fake_coordinator import FakeCoordinator
from tests.unit.transport.kinds import Members

USUAL = NodeProfile(memory_bytes=10**9, gflops=1.0)
LIMIT = 1e6
CHUNK_BYTES = 0.02 * LIMIT


def measured(directory: Path, *, num_busy: int = 0) -> tuple[NodeProfile, FakeCoordinator]:
    async def scenario() -> tuple[NodeProfile, FakeCoordinator]:
        members = Members(directory)
        async with FakeCoordinator(members) as coordinator:
            coordinator.num_busy = num_busy
            async with Client(coordinator.address, pinned_context(members.authority.certificate_pem)) as client:
                return await with_line(USUAL, client, LIMIT), coordinator

    return asyncio.run(scenario())


def test_a_line_is_measured_and_the_owners_limit_kept(tmp_path: Path) -> None:
    found, coordinator = measured(tmp_path)
    assert found.latency_s > 0
    assert found.down_bytes_per_s not in (USUAL.down_bytes_per_s, 0)
    assert found.up_bytes_per_s == LIMIT, "the coordinator reported more"
    assert 0 < coordinator.line_bytes <= LIMIT + CHUNK_BYTES


def test_a_busy_coordinator_is_retried(tmp_path: Path) -> None:
    found, coordinator = measured(tmp_path, num_busy=1)
    assert coordinator.num_busy == 0
    assert found.down_bytes_per_s != USUAL.down_bytes_per_s
