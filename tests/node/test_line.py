"""The line to the coordinator: measured, capped, and guessed when the coordinator is busy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ravnest.core.control import NodeProfile
from ravnest.node.client import Client, pinned_context
from ravnest.node.line import with_line
from tests.net.kinds import Members
from tests.node.office import Office

pytestmark = pytest.mark.timeout(30)

USUAL = NodeProfile(memory_bytes=10**9, gflops=1.0)


def measured(directory: Path, limit: float | None, *, num_busy: int = 0) -> NodeProfile:
    async def measuring() -> NodeProfile:
        members = Members(directory)
        async with Office(members) as office:
            office.num_busy = num_busy
            async with Client(office.address, pinned_context(members.authority.certificate_pem)) as client:
                return await with_line(USUAL, client, limit)

    return asyncio.run(measuring())


def test_a_line_is_measured_and_the_owners_limit_kept(tmp_path: Path) -> None:
    found = measured(tmp_path, 1e6)
    assert 0 < found.latency_s < 0.1
    assert found.down_bytes_per_s not in (USUAL.down_bytes_per_s, 0)
    assert 5e5 < found.up_bytes_per_s <= 1e6


def test_a_busy_coordinator_is_asked_again(tmp_path: Path) -> None:
    found = measured(tmp_path, 1e6, num_busy=1)
    assert found.down_bytes_per_s != USUAL.down_bytes_per_s
