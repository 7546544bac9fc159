"""A machine measures itself: real programs, real memory, and what its owner limits."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ravnest.graph import trace
from ravnest.nodefile import read_nodes
from ravnest.plan.fleet import Machine
from ravnest.profile.answer import Answerer
from ravnest.profile.line import Line
from ravnest.profile.machine import LEAST_BYTES, Offer, Profile, measure_machine
from ravnest.profile.mix import Workload, reference_mix, there_and_back
from ravnest.profile.show import as_json, as_node, as_table
from ravnest.profile.speed import measure_speed, usable_cores


def tiny() -> Workload:
    program = trace(lambda: nn.Linear(64, 32), nn.functional.mse_loss, (torch.zeros(8, 64), torch.zeros(8, 32)))
    return Workload(program, batch=8)


def profile(**changes: Any) -> Profile:
    given: dict[str, Any] = {
        "name": "attic", "memory_bytes": 7_260_000_000, "threads": 2, "gflops": 41.52, "device": "cpu",
        "measured_on": "the job's own program", **changes,
    }  # fmt: skip
    return Profile(**given)


def test_a_machine_is_measured_within_the_offer() -> None:
    answerer = Answerer(("127.0.0.1", 0))
    peer = answerer.address
    thread = threading.Thread(target=answerer.serve)
    thread.start()
    said: list[str] = []
    offer = Offer(memory_bytes=10**9, threads=1, max_upload_bytes_per_s=5e6)
    try:
        found = measure_machine(offer, name="attic", job=tiny(), peer=peer, line_s=0.5, report=said.append)
    finally:
        answerer.close()
        thread.join(timeout=20)
    assert (found.name, found.memory_bytes, found.threads) == ("attic", 10**9, 1)
    assert found.gflops > 0.01
    assert found.measured_on == "the job's own program"
    assert found.line is not None
    assert found.line.up_bytes_per_s == pytest.approx(5e6, rel=0.25)
    assert said == [
        "memory",
        "latency to 127.0.0.1",
        "download from 127.0.0.1",
        "upload to 127.0.0.1",
        "training speed",
    ]


def test_the_flops_of_the_mix_are_those_that_torch_counts() -> None:
    """Which on a processor does not see those of the fused attention."""
    for block in reference_mix():
        with FlopCounterMode(display=False) as counted:
            there_and_back(block.build(), torch.rand(block.shape, requires_grad=True))
        assert 0.95 * block.flops <= counted.get_total_flops() <= block.flops


def test_speed_of_the_mix_and_of_a_program_like_it() -> None:
    """Operations one by one come to about what a whole pass takes (within a factor: other things run here too)."""
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
    ("offer", "message"),
    [
        ({"memory_bytes": 0}, "too little to lend"),
        ({"memory_bytes": LEAST_BYTES - 1}, "torch alone needs"),
        ({"threads": 0}, "at least 1 thread"),
        ({"max_upload_bytes_per_s": 1.0}, "at least 8 kbit/s"),
    ],
)
def test_offers_that_are_none(offer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Offer(**offer)


def test_more_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"1000.0 TB of memory is more than the .* that there is"):
        measure_machine(Offer(memory_bytes=10**15))
    with pytest.raises(ValueError, match=rf"100000 threads, but {usable_cores():g} cores"):
        measure_machine(Offer(threads=100_000))
    with pytest.raises(ValueError, match="not a valid name"):
        measure_machine(name="My PC!")


def test_a_node_file_takes_it(tmp_path: Path) -> None:
    known = profile(line=Line(2.5e6, 12.5e6, 0.012))
    unknown = profile(name="cellar", memory_bytes=987_654_321, max_upload_bytes_per_s=5e6)
    (tmp_path / "nodes.toml").write_text(f"{as_node(known)}\n\n{as_node(unknown)}\n")
    attic, cellar = read_nodes(tmp_path / "nodes.toml").machines
    assert attic == Machine(
        name="attic", memory_bytes=7.2e9, speed=41.5, up_bytes_per_s=2.5e6, down_bytes_per_s=12.5e6, latency_s=0.012
    )
    assert (cellar.memory_bytes, cellar.up_bytes_per_s) == (987_600_000, 5e6)
    assert '# down = "?"' in as_node(unknown)


def test_for_programs_and_people() -> None:
    found = json.loads(as_json(profile(line=Line(1.0, 2.0, 0.5))))
    assert found["line"] == {"up_bytes_per_s": 1.0, "down_bytes_per_s": 2.0, "latency_s": 0.5}
    assert found["gflops"] == 41.52
    assert as_table(profile()).row_count == 6
