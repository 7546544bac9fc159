"""What operations in a row cost more than one by one."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from ravnest.graph import measure_costs, trace
from ravnest.graph.timing import OpSeconds, measure_seconds
from ravnest.profile.strain import measure_strain


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 4))


def test_it_is_the_time_in_a_row_by_the_time_alone() -> None:
    """Told that the operations take a hundredth of their time, it finds a hundred times the strain."""
    program = trace(layers, nn.functional.mse_loss, (torch.zeros(64, 256), torch.zeros(64, 4)))
    costs = measure_costs(program, 64)
    seconds = measure_seconds(program, 64, budget_s=0.5, costs=costs)
    strain = measure_strain(program, costs, seconds, budget_s=0.3)
    quick = tuple(OpSeconds(s.forward_s / 100, s.backward_s / 100) for s in seconds)
    assert 1 <= strain < 20
    assert 20 < measure_strain(program, costs, quick, budget_s=0.3) < 2000


def test_a_long_program_is_measured_by_its_beginning() -> None:
    """Here each op is said to take a second, so only the first part is run, and the time is kept."""
    program = trace(layers, nn.functional.mse_loss, (torch.zeros(64, 256), torch.zeros(64, 4)))
    costs = measure_costs(program, 64)
    began = time.perf_counter()
    assert measure_strain(program, costs, (OpSeconds(0.5, 0.5),) * len(program.ops), budget_s=0.1) == 1.0
    assert time.perf_counter() - began < 5


class Picky(nn.Module):
    """Looks rows up at places that made-up data do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 4))

    def forward(self, places: Tensor) -> Tensor:
        return self.weight[places - 1000].sum()


def test_a_program_that_does_not_run_on_made_up_data_has_the_usual() -> None:
    program = trace(Picky, None, torch.full((4,), 1001))
    costs = measure_costs(program, 4)
    assert measure_strain(program, costs, (OpSeconds(1e-6, 1e-6),) * len(program.ops), budget_s=0.1) == 1.15
