"""What a node tells of its device."""

from __future__ import annotations

import pytest

from ravnest.node.console import joined
from ravnest.protocol.control import NodeProfile


def test_a_plan_uses_the_smaller_memory_of_device_and_pc() -> None:
    assert NodeProfile(memory_bytes=8_000, gflops=1.0).plannable_bytes == 8_000
    assert NodeProfile(memory_bytes=8_000, host_memory_bytes=32_000, gflops=1.0).plannable_bytes == 8_000
    assert NodeProfile(memory_bytes=24_000, host_memory_bytes=16_000, gflops=1.0).plannable_bytes == 16_000


def test_an_accelerator_is_named_when_a_node_joins() -> None:
    profile = NodeProfile(memory_bytes=8 * 10**9, gflops=900.0, device="cuda:0", device_name="A Card")
    assert "900 GFLOP/s on cuda:0 (A Card), " in joined("attic", profile)
    assert " on " not in joined("attic", NodeProfile(memory_bytes=8 * 10**9, gflops=9.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_name": "x" * 101}, "device_name must have at most 100 characters, got 101"),
        ({"host_memory_bytes": -1}, "host_memory_bytes must be >= 0"),
    ],
)
def test_impossible_profiles_are_rejected(changes: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NodeProfile(memory_bytes=1, gflops=1.0, **changes)  # type: ignore[arg-type]
