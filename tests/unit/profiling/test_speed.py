"""The slowdown of operations in a training run."""

from __future__ import annotations

from itertools import count
from math import inf
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ravnest.graph import Program, Stage, legal_cuts, measure_costs, split, trace
from ravnest.graph.timing import OpSeconds
from ravnest.profiling import speed
from ravnest.profiling.speed import measure_slowdown


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 4))


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is 10 ms after the one before."""
    readings = count()
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: next(readings) / 100))


def test_the_slowdown_is_relative_to_the_given_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With operation times divided by a hundred, the slowdown is a hundred times larger, up to a limit."""
    program = trace(layers, nn.functional.mse_loss, (torch.zeros(64, 256), torch.zeros(64, 4)))
    costs = measure_costs(program, 64)
    seconds = (OpSeconds(2e-4, 3e-4),) * len(program.ops)
    quick = (OpSeconds(2e-6, 3e-6),) * len(program.ops)
    assert measure_slowdown(program, costs, quick, budget_s=0.3) == 1.5
    monkeypatch.setattr(speed, "_MAX_SLOWDOWN", inf)
    slowdown = measure_slowdown(program, costs, seconds, budget_s=0.3)
    assert 1 < slowdown < 100
    assert measure_slowdown(program, costs, quick, budget_s=0.3) == pytest.approx(100 * slowdown, rel=0.01)


def test_a_long_program_is_measured_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second per operation and a tenth of a second in all, only the first stretch is run."""
    ends: list[tuple[int, ...]] = []

    def recorded(program: Program, cuts: tuple[int, ...]) -> list[Stage]:
        ends.append(cuts)
        return split(program, cuts)

    monkeypatch.setattr(speed, "split", recorded)
    program = trace(layers, nn.functional.mse_loss, (torch.zeros(64, 256), torch.zeros(64, 4)))
    costs = measure_costs(program, 64)
    assert measure_slowdown(program, costs, (OpSeconds(0.5, 0.5),) * len(program.ops), budget_s=0.1) == 1.0
    assert ends == [(legal_cuts(program)[0],)]


class Picky(nn.Module):
    """Rejects made-up data: its indices are out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 4))

    def forward(self, places: Tensor) -> Tensor:
        return self.weight[places - 1000].sum()


def test_a_program_that_rejects_made_up_data_has_the_default_slowdown() -> None:
    program = trace(Picky, None, torch.full((4,), 1001))
    costs = measure_costs(program, 4)
    assert measure_slowdown(program, costs, (OpSeconds(1e-6, 1e-6),) * len(program.ops), budget_s=0.1) == 1.15
