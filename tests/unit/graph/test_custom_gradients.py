"""Backward passes of a model's own train as in plain PyTorch: autograd functions and hooks on gradients.

Every case is trained for a few steps in plain PyTorch and in three stages that were encoded and decoded, from the model
itself and from a builder. Loss and all gradients must be equal to the last bit.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.errors import TraceError
from ravnest.graph import Interpreter, Program, Tape, dump, initialise, legal_cuts, load, measure_costs, split, trace
from ravnest.graph.timing import measure_seconds
from ravnest.graph.verify import verify
from tests.sampling import every
from tests.unit.graph.custom_gradients import (
    FUNCTIONS,
    HOOKS,
    Branching,
    Checkpointed,
    Keeping,
    Listed,
    Model,
    Noisy,
    Recomputed,
    Round,
    Sparse,
    hook,
    on_parameter,
    use,
)
from tests.unit.graph.pipeline import fresh_state, staged_step, thirds

CASES = {**FUNCTIONS, **{f"hook {name}": make for name, make in HOOKS.items()}}


@pytest.fixture(autouse=True)
def ignored_warnings() -> Iterator[None]:
    """Of torch, about reentrant checkpoints and hooks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def batch(size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


def traced(make: Callable[[], nn.Module], *, is_built: bool = False) -> Program:
    return trace(make if is_built else made(make), F.mse_loss, batch())


def descend(tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.grad is not None:
                tensor -= 0.1 * tensor.grad
                tensor.grad = None


def assert_equal_steps(
    make: Callable[[], nn.Module],
    program: Program,
    state: dict[str, Tensor],
    *,
    steps: int = 2,
    recompute: bool = False,
) -> None:
    """Train the model and its stages; loss, gradients and weights have the same bits after each step."""
    model = made(make)
    stages = split(program, thirds(legal_cuts(program)))
    for step in range(steps):
        x, target = batch(4 + step)  # of another size than the example
        torch.manual_seed(5)
        loss = F.mse_loss(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = dict(model.named_parameters())
        expected = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        found = staged_step(stages, state, [x, target], recompute=recompute)
        assert torch.equal(found.outputs[0], loss.detach())
        assert found.gradients.keys() == expected.keys()
        assert [n for n, g in found.gradients.items() if not torch.equal(g, expected[n])] == []
        descend(parameters)
        descend(state)
    assert all(torch.equal(state[name], p) for name, p in model.named_parameters() if name in state)


@pytest.mark.parametrize("name", every(2, CASES))
def test_steps_are_those_of_plain_pytorch(name: str) -> None:
    program = traced(CASES[name])
    assert program.untraced == ()
    assert_equal_steps(CASES[name], program, fresh_state(program))
    assert verify(program, made(CASES[name]), F.mse_loss, list(batch()), seed=3).largest_difference == 0


@pytest.mark.parametrize("name", every(3, CASES))
def test_a_builder_gives_the_same(name: str) -> None:
    program = traced(CASES[name], is_built=True)
    state: dict[str, Tensor] = {}
    for stage in split(program, thirds(legal_cuts(program))):
        state |= {n: t for n, t in initialise(load(dump(stage)), 3).items() if n not in state}
    for item in program.state:
        state[item.target].requires_grad_(item.trainable)
    assert_equal_steps(CASES[name], program, state, recompute=True)


def test_the_first_layer_moves_as_in_plain_pytorch() -> None:
    make = FUNCTIONS["straight-through"]
    program, model = traced(make), made(make)
    before = model.get_parameter("first.weight").clone()
    assert_equal_steps(make, program, fresh_state(program), steps=20)
    state = fresh_state(program)
    for step in range(20):
        staged_step(split(program, thirds(legal_cuts(program))), state, list(batch(4 + step)))
        descend(state)
    assert not torch.equal(state["first.weight"], before)


class Normalised(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 7, 2), nn.CrossMapLRN2d(size, alpha=0.5, k=2), nn.Flatten())
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x.view(-1, 1, 2, 2)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 9])
def test_local_response_normalisation_is_that_of_torch(size: int) -> None:
    make = lambda: Normalised(size)  # noqa: E731
    program = traced(make)
    assert any(op.backward for op in program.ops)
    assert_equal_steps(make, program, fresh_state(program))


@pytest.mark.parametrize("name", ["clipped straight-through", "several inputs", "hook both of a module"])
def test_costs_and_times_include_the_backward_pass(name: str) -> None:
    program = traced(CASES[name])
    costs = measure_costs(program, batch=3)
    seconds = measure_seconds(program, 3, budget_s=0.2, costs=costs)
    own = [i for i, op in enumerate(program.ops) if op.backward]
    assert len(seconds) == len(program.ops)
    assert all(costs.ops[i].backward_flops > 0 for i in own)
    saved = [program.values[str(ref)[1:]] for i in own for ref in program.ops[i].args[2] or () if str(ref)[1] == "v"]  # type: ignore[union-attr]
    held = [storage.num_bytes for storage in costs.saved if set(own).intersection(storage.ops)]
    assert len(held) >= len({value.name for value in saved})


def test_flops_of_a_product_in_a_backward_pass_are_counted() -> None:
    program = traced(CASES["several inputs"])
    (own,) = [i for i, op in enumerate(program.ops) if op.backward]
    assert measure_costs(program, batch=8).ops[own].backward_flops >= 2 * 2 * 8 * 6 * 6


def test_evaluation_ignores_the_backward_pass() -> None:
    program, model = traced(CASES["clipped straight-through"]), made(CASES["clipped straight-through"])
    (stage,) = split(program, [])
    with torch.no_grad():
        (loss,) = Interpreter(load(dump(stage)))(fresh_state(program), list(batch()), training=False)
        assert torch.equal(loss, F.mse_loss(model(batch()[0]), batch()[1]))


def test_a_backward_pass_runs_in_the_autocast_of_its_forward_pass() -> None:
    program = traced(CASES["several inputs"])
    (stage,) = split(program, [])
    gradients = []
    for in_autocast in (False, True):
        state = fresh_state(program)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tape = Tape(Interpreter(stage), state, list(batch()))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_autocast):
            tape.backward()
        gradients.append(state["first.weight"].grad)
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])


UNTRACED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random numbers": (lambda: Model(Noisy.apply), r"the autograd function Noisy: it draws random numbers"),
    "autograd": (lambda: Model(Recomputed.apply), "the autograd function Recomputed: it calls autograd itself"),
    "another operation": (lambda: Model(Sparse.apply), r"Sparse: it calls aten\.nonzero.*not on the list"),
    "values": (lambda: Model(Branching.apply), "the autograd function Branching: "),
    "numbers": (lambda: Model(Listed.apply), "Listed: .*2 gradients for 1 arguments"),
    "a hook with random numbers": (
        lambda: on_parameter(lambda gradient: gradient * torch.rand_like(gradient)),
        r"the gradient hook .*of the parameter third\.weight: it draws random numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNTRACED)
def test_a_backward_pass_that_cannot_be_traced_is_compared(name: str) -> None:
    make, reason = UNTRACED[name]
    program = traced(make)
    assert re.search(reason, program.untraced[0])
    with pytest.raises((TraceError, RuntimeError), match=f"Likely cause: .*{reason}|incorrect number"):
        verify(program, made(make), F.mse_loss, list(batch()), seed=3)


def test_a_backward_pass_that_autograd_gives_too_needs_no_trace() -> None:
    make = lambda: Model(Checkpointed.apply)  # noqa: E731
    program = traced(make)
    assert program.untraced == ("the autograd function Checkpointed: it calls autograd itself",)
    assert_equal_steps(make, program, fresh_state(program))


class Counted(nn.Module):
    """A hook that writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("total", torch.zeros(()))
        self.total: Tensor
        hook(self.layer.weight, self.count)

    def count(self, gradient: Tensor) -> None:
        self.total += gradient.abs().sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Leaking(Model):
    """A gradient that the forward pass reads."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        use(Keeping, h)
        return self.second(h * Keeping.kept[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Counted, "writes by aten.add_.Tensor to a tensor that it did not make"),
        (Leaking, "a gradient is used in the forward pass"),
    ],
)
def test_effects_of_a_backward_pass_are_rejected(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        traced(make)


def test_torch_is_left_as_it_was() -> None:
    before = Tensor.register_hook, torch.autograd.grad, torch.autograd.backward
    traced(CASES["hook both of a module"])
    assert (Tensor.register_hook, torch.autograd.grad, torch.autograd.backward) == before
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    x = torch.ones(2, requires_grad=True)
    use(Round, x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "is_split"),
    [
        ("straight-through", True),
        ("reversal", True),
        ("hook that clips", True),
        ("hook on a parameter", True),
        ("hook of a module", True),
        ("whole batch", False),
        ("hook several on a parameter", False),
    ],
)
def test_a_backward_pass_over_the_whole_batch_is_noticed(name: str, is_split: bool) -> None:
    program, model = traced(CASES[name]), made(CASES[name])
    effect = verify(program, model, F.mse_loss, list(batch(3)), seed=3, second=list(batch(6))).gradient_effect
    assert effect < 1e-4 if is_split else effect > 0.1
