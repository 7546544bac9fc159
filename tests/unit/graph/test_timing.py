"""Measured seconds per op, compared with a real training step in the same run, both in processor time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import zoo
from benchmarks.zoo import Case
from ravnest.graph import Interpreter, Program, Tape, measure_costs, split, timing, trace
from ravnest.graph.ops import ALLOWED
from ravnest.graph.timing import OpSeconds, measure_seconds
from tests.unit.graph.pipeline import fresh_state

pytestmark = pytest.mark.usefixtures("processor_time")
AMPLE_S = 100.0  # the number of rounds ends the measurement before


def step_seconds(program: Program, batch: Any, repeats: int) -> float:
    """The minimum time of a forward and backward pass."""
    runner, state, inputs = Interpreter(split(program, [])[0]), fresh_state(program), program.feed(batch)
    least = float("inf")
    for _ in range(repeats):
        for tensor in state.values():
            tensor.grad = None
        start_s = time.process_time()
        Tape(runner, state, inputs).backward()
        least = min(least, time.process_time() - start_s)
    return least


@pytest.mark.parametrize(
    ("case", "batch", "repeats"), [(zoo.gpt(), 8, 20), (zoo.resnet50(), 2, 3)], ids=["gpt", "resnet50"]
)
def test_the_sum_predicts_a_real_step(case: Case, batch: int, repeats: int) -> None:
    program = trace(case.build().train(), case.loss, case.batch(batch))
    predicted = real = float("inf")
    for _ in range(15):  # taking turns, until both have found the caches warm
        predicted = min(predicted, sum(s.total_s for s in measure_seconds(program, batch, budget_s=0.8)))
        real = min(real, step_seconds(program, case.batch(batch), repeats))
        if 0.7 < predicted / real < 1.4:
            break
    assert 0.5 < predicted / real < 2


def test_every_op_is_measured_and_views_are_nearly_free() -> None:
    case = zoo.gpt()
    program = trace(case.build, case.loss, case.batch(2))
    seconds = measure_seconds(program, 16, budget_s=AMPLE_S)
    assert len(seconds) == len(program.ops)
    assert all(s.forward_s >= 0 and s.backward_s >= 0 for s in seconds)
    views = sum(s.total_s for s, op in zip(seconds, program.ops, strict=True) if ALLOWED.get(op.op) == "views")
    assert views < 0.3 * sum(s.total_s for s in seconds)


def test_equal_layers_are_measured_once_and_random_numbers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    minimum = timing._Measurement._minimum

    def counted(measurement: timing._Measurement) -> tuple[float, float]:
        measured.append(measurement.op.op)
        return minimum(measurement)

    monkeypatch.setattr(timing._Measurement, "_minimum", counted)
    monkeypatch.setattr(timing, "_MAX_ROUNDS", 1)
    before = torch.get_rng_state()
    counts = []
    for layers in (2, 6):
        case = zoo.gpt(layers=layers)
        program = trace(case.build, case.loss, case.batch(2))
        measured.clear()
        seconds = measure_seconds(program, 4, budget_s=AMPLE_S)
        counts.append(len(measured))
        linear = {s for s, op in zip(seconds, program.ops, strict=True) if op.op == "aten.linear.default"}
        assert len(linear) == 5  # qkv, proj, fc, out, head
    assert counts[0] == counts[1] < 40
    assert torch.equal(before, torch.get_rng_state())


class Writer(nn.Module):
    """Writes into a part of a tensor, and into a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.lin = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(self.norm(x))
        y = torch.zeros_like(h)
        y[:, :3] = h[:, 3:] * 2
        y[:, 3:].add_(h[:, :3])
        assert isinstance(self.seen, Tensor)
        self.seen.add_(1)
        return y


def test_ops_that_write_in_place_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    program = trace(Writer(), lambda y, t: ((y - t) ** 2).mean(), (torch.ones(4, 6), torch.zeros(4, 6)))
    assert "writes" in {ALLOWED.get(op.op) for op in program.ops}
    monkeypatch.setattr(timing, "_estimated", None)
    assert sum(s.backward_s for s in measure_seconds(program, 512, budget_s=AMPLE_S)) > 0


def test_ops_that_cannot_be_measured_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    case = zoo.gpt()
    program = trace(case.build, case.loss, case.batch(2))
    monkeypatch.setattr(timing, "_rows", lambda op, arguments: 10**9)  # ids out of range: no embedding runs
    seconds = measure_seconds(program, 4, budget_s=AMPLE_S)
    embeddings = [s for s, op in zip(seconds, program.ops, strict=True) if op.op == "aten.embedding.default"]
    assert len(embeddings) == 2
    assert all(0 < s.forward_s < sum(s.total_s for s in seconds) for s in embeddings)


def test_after_the_budget_the_rest_is_estimated_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    case = zoo.gpt()
    program = trace(case.build, case.loss, case.batch(2))
    costs = measure_costs(program, 4)
    start_s = time.process_time()
    seconds = measure_seconds(program, 4, budget_s=1e-9, costs=costs)
    assert time.process_time() - start_s < 5
    linear = [
        (s, c) for s, c, op in zip(seconds, costs.ops, program.ops, strict=True) if op.op == "aten.linear.default"
    ]
    assert all(s == OpSeconds(c.forward_flops * 5e-11, c.backward_flops * 5e-11) for s, c in linear)


@pytest.mark.parametrize(("batch", "budget_s"), [(0, 1.0), (1, 0.0)])
def test_invalid_arguments_are_rejected(batch: int, budget_s: float) -> None:
    case = zoo.gpt(layers=1)
    program = trace(case.build, case.loss, case.batch(2))
    with pytest.raises(ValueError, match="must be >"):
        measure_seconds(program, batch, budget_s=budget_s)
