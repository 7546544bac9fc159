"""Models that write in place: functionalized where that is equivalent, kept in one stage where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo import Case
from ravnest.errors import CutError, TraceError
from ravnest.graph import Program, legal_cuts, split, trace
from tests.unit.graph.pipeline import assert_same, eager_step, fresh_state, staged_step


class Writes(nn.Module):
    """A model around a function that writes into `h`, an activation of shape (batch, 6)."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("history", torch.zeros(4, 6))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.write(self.first(x))).sum(1)  # type: ignore[no-any-return]


def relu_in_place(h: Tensor) -> Tensor:
    return F.relu(h * 2, inplace=True)


def old_name_read_later(h: Tensor) -> Tensor:
    y = h + 1
    y.mul_(3)
    y.relu_()
    return y * 2


def slice_assignment(h: Tensor) -> Tensor:
    y = h * 1
    y[:, 0] = 5.0
    y[:, 1:3] = h[:, 3:5]
    return y


def view_sees_the_write(h: Tensor) -> Tensor:
    y = h * 1
    half = y[:, :3]
    y.mul_(2)
    return torch.cat([half, y], 1)[:, :6]


def write_through_a_view(h: Tensor) -> Tensor:
    y = h * 1
    y.view(-1, 2, 3)[:, 0].relu_()
    return y


def dtype_stays(h: Tensor) -> Tensor:
    y = torch.zeros(h.shape, dtype=torch.float32)
    y.add_(h.double())
    return y + h


def masked(h: Tensor) -> Tensor:
    y = h.clone()
    y.masked_fill_(h > 0, -1.0)
    y[h < -1] = 0.5
    return y + h


FUNCTIONS = [
    relu_in_place, old_name_read_later, slice_assignment, view_sees_the_write, write_through_a_view, dtype_stays,
    masked,
]  # fmt: skip


def case_of(write: Callable[[Tensor], Tensor]) -> Case:
    generator = torch.Generator().manual_seed(0)
    return Case(
        write.__name__,
        lambda: Writes(write),
        lambda y, t: F.mse_loss(y, t),
        lambda n: (torch.randn(n, 6, generator=generator), torch.ones(n)),
    )


@pytest.mark.parametrize("write", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_cut_gives_the_same_gradients(write: Callable[[Tensor], Tensor]) -> None:
    case = case_of(write)
    torch.manual_seed(0)
    model = case.build()
    batch = case.batch(3)
    program = trace(model, case.loss, batch)
    reference = eager_step(case, model, batch)
    for cuts in ([], legal_cuts(program), *([c] for c in legal_cuts(program))):
        assert_same(staged_step(split(program, cuts), fresh_state(program), program.feed(batch)), reference)


def traced(write: Callable[[Tensor], Tensor]) -> Program:
    case = case_of(write)
    return trace(case.build(), case.loss, case.batch(3))


def test_in_place_activations_become_functional() -> None:
    program = traced(old_name_read_later)
    assert not program.atomic_ranges
    assert not any(op.op.split(".")[1].endswith("_") for op in program.ops)


def test_a_cut_inside_an_atomic_range_says_where_to_cut() -> None:
    program = traced(write_through_a_view)
    ((first, last),) = program.atomic_ranges
    with pytest.raises(CutError, match=rf"Cut at {first} or {last + 1}") as error:
        split(program, [last])
    assert "test_functional.py" in str(error.value), "the line of the model is named"


class Counts(nn.Module):
    """Writes to its buffers: a counter, and a row of a table."""

    count: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        self.count += 1
        self.table[1] = h.detach().mean(0)
        return (h * self.table[1]).sum(1)


def test_buffers_are_written_in_training_and_left_alone_in_evaluation() -> None:
    from ravnest.graph import Interpreter

    case = Case("counts", Counts, F.mse_loss, lambda n: (torch.ones(n, 6), torch.ones(n)))
    torch.manual_seed(0)
    model = case.build()
    program = trace(model, case.loss, case.batch(3))
    state = fresh_state(program)
    step = staged_step(split(program, legal_cuts(program)[:1]), state, program.feed(case.batch(3)), recompute=True)
    assert_same(step, eager_step(case, model, case.batch(3)))
    assert state["count"].item() == 1
    table = state["table"].clone()
    Interpreter(split(program, [])[0])(state, [2 * x for x in program.feed(case.batch(3))], training=False)
    assert state["count"].item() == 1
    assert torch.equal(state["table"], table)


def test_writing_a_parameter_is_rejected() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return (x * self.weight).sum(1)

    with pytest.raises(TraceError, match=r"mul_\(0.9\).* writes to a parameter"):
        trace(Wrong(), F.mse_loss, (torch.ones(3, 6), torch.ones(3)))
