"""Measurement of this machine with real programs and memory, within its owner's limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ravnest.cli.profile import as_node, as_table, profile_json
from ravnest.graph import trace
from ravnest.planner.fleet import Machine
from ravnest.planner.node_file import read_nodes
from ravnest.profiling.bandwidth import Line
from ravnest.profiling.host import usable_cores
from ravnest.profiling.machine import MIN_MEMORY_BYTES, MachineLimits, MachineProfile, measure_machine
from ravnest.profiling.speed import Workload, forward_backward, measure_speed, reference_mix
from tests.unit.profiling.test_bandwidth import served


def tiny() -> Workload:
    program = trace(lambda: nn.Linear(64, 32), nn.functional.mse_loss, (torch.zeros(8, 64), torch.zeros(8, 32)))
    return Workload(program, batch=8)


def profile(**changes: Any) -> MachineProfile:
    given: dict[str, Any] = {
        "name": "attic", "memory_bytes": 7_260_000_000, "threads": 2, "gflops": 41.52, "device": "cpu",
        "measured_on": "the job's own program", **changes,
    }  # fmt: skip
    return MachineProfile(**given)


def test_a_machine_is_measured_within_its_limits() -> None:
    reports: list[str] = []
    limits = MachineLimits(memory_bytes=10**9, threads=1, max_upload_bytes_per_s=5e6)
    with served() as (peer, _):
        found = measure_machine(limits, name="attic", job=tiny(), peer=peer, line_s=0.5, report=reports.append)
    assert (found.name, found.memory_bytes, found.threads) == ("attic", 10**9, 1)
    assert found.gflops > 0
    assert found.measured_on == "the job's own program"
    assert found.line is not None
    assert 0 < found.line.up_bytes_per_s <= 5e6
    assert reports == [
        "memory",
        "latency to 127.0.0.1",
        "download from 127.0.0.1",
        "upload to 127.0.0.1",
        "training speed",
    ]


def test_the_flops_of_the_mix_are_those_that_torch_counts() -> None:
    """On a CPU torch does not count those of fused attention."""
    for block in reference_mix():
        with FlopCounterMode(display=False) as counted:
            forward_backward(block.build(), torch.rand(block.shape, requires_grad=True))
        assert 0.95 * block.flops <= counted.get_total_flops() <= block.flops


def test_speed_of_the_mix_and_of_a_program_like_it(processor_time: None) -> None:
    """Operations one by one take about as long as a whole pass."""
    threads = torch.get_num_threads()
    found = measure_speed(threads=1, budget_s=1.0)
    assert torch.get_num_threads() == threads
    assert "transformer" in found.measured_on
    layers = lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)), nn.Flatten(0), _Mean())  # noqa: E731
    program = measure_speed(Workload(trace(layers, None, torch.zeros(64, 512)), 64), threads=1, budget_s=1.0)
    assert 0.2 < found.gflops / program.gflops < 5


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"memory_bytes": 0}, "memory must be >= 400.0 MB, got 0 B"),
        ({"memory_bytes": MIN_MEMORY_BYTES - 1}, "torch alone needs"),
        ({"threads": 0}, "threads must be >= 1, got 0"),
        ({"max_upload_bytes_per_s": 1.0}, "must be >= 8 kbit/s"),
    ],
)
def test_limits_that_are_too_low(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MachineLimits(**limits)


def test_limits_beyond_the_machine() -> None:
    with pytest.raises(ValueError, match=r"memory must be <= .*, got 1000.0 TB"):
        measure_machine(MachineLimits(memory_bytes=10**15))
    with pytest.raises(ValueError, match=rf"threads must be <= {usable_cores():g}, got 100000"):
        measure_machine(MachineLimits(threads=100_000))
    with pytest.raises(ValueError, match="not a valid name"):
        measure_machine(name="My PC!")


def test_a_profile_is_a_node_of_a_node_file(tmp_path: Path) -> None:
    known = profile(line=Line(2.5e6, 12.5e6, 0.012))
    unknown = profile(name="cellar", memory_bytes=987_654_321, max_upload_bytes_per_s=5e6)
    (tmp_path / "nodes.toml").write_text(f"{as_node(known)}\n\n{as_node(unknown)}\n")
    attic, cellar = read_nodes(tmp_path / "nodes.toml").machines
    assert attic == Machine(
        name="attic", memory_bytes=7.2e9, speed=41.5, up_bytes_per_s=2.5e6, down_bytes_per_s=12.5e6, latency_s=0.012
    )
    assert (cellar.memory_bytes, cellar.up_bytes_per_s) == (987_600_000, 5e6)
    assert '# down = "?"' in as_node(unknown)


def test_a_profile_as_json_and_as_a_table() -> None:
    found = json.loads(profile_json(profile(line=Line(1.0, 2.0, 0.5))))
    assert found["line"] == {"up_bytes_per_s": 1.0, "down_bytes_per_s": 2.0, "latency_s": 0.5}
    assert found["gflops"] == 41.52
    assert as_table(profile()).row_count == 6
