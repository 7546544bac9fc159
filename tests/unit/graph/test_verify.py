"""A program that would train something else than the model is rejected before the first step, with the cause."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import zoo
from ravnest.errors import TraceError
from ravnest.graph import trace
from ravnest.graph.verify import Verification, verify
from tests.unit.graph.custom_gradients import Noisy


class Model(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 6), nn.Linear(6, 1), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))  # type: ignore[no-any-return]


def noisy(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * torch.rand_like(gradient))  # type: ignore[no-untyped-call]
    return x.relu()


def checkpointed(x: Tensor, *, reentrant: bool) -> Tensor:
    return checkpoint(torch.tanh, x, use_reentrant=reentrant)  # type: ignore[no-any-return]


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)


def verified(model: Any, example: Any = None, loss: Any = nn.functional.mse_loss) -> Verification:
    example = batch() if example is None else example
    program = trace(model, loss, example)
    return verify(program, model, loss, program.feed(example), seed=3)


def tripled(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 3 for gradient in of_inputs)


def with_module_hook() -> Model:
    model = Model()
    model.second.register_backward_hook(tripled)
    return model


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


def with_parameter_hook() -> Model:
    model = Model()
    model.first.weight.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
    return model


REJECTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random backward": (
        lambda: Model(Noisy.apply),
        r"first\.(bias|weight).*the autograd function Noisy: it draws random",
    ),
    "random hook": (lambda: Model(noisy), r"the gradient of first\..*the hook noisy.* on the gradient of a tensor"),
    "old module hook": (with_module_hook, r"the backward hook of the module second; register_full_backward_hook works"),
    "late parameter hook": (with_parameter_hook, r"the parameter first\.weight that runs after its gradient is accum"),
    "Python's random": (lambda: Model(lambda x: x * random.random()), "random numbers of Python or NumPy"),
    "NumPy's random": (lambda: Model(lambda x: x * float(np.random.rand())), "random numbers of Python or NumPy"),
}


@pytest.mark.filterwarnings("ignore")  # of torch, about hooks and reentrant checkpoints
@pytest.mark.parametrize("name", REJECTED)
def test_a_difference_is_rejected_with_its_cause(name: str) -> None:
    make, message = REJECTED[name]
    with pytest.raises(TraceError, match=message):
        verified(make())


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.count: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x - self.mean)  # type: ignore[no-any-return]


def frozen_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
    model[1].eval()
    return model


def questioned() -> Model:
    model = Model()
    assert not torch.equal(model.first.weight, torch.zeros(6, 4))
    if (model.second.weight.abs() < 100).all():
        model.between = torch.tanh
    return model


def initialised() -> Model:
    model = Model()
    nn.init.sparse_(model.first.weight, 0.5)
    nn.init.eye_(model.second.weight)
    return model


EXACT: dict[str, Callable[[], nn.Module]] = {
    "plain": Model,
    "dropout": lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 1)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)),
    "frozen batch norm": frozen_norm,
    "counter": Counter,
    "checkpoint": lambda: Model(lambda x: checkpointed(x, reentrant=False)),
    "orthogonal": lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 6)), nn.Linear(6, 1)),
    "orthogonal, wide": lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 3)), nn.Linear(3, 1)),
    "a question while building": questioned,
    "sparse and identity": initialised,
    "reentrant checkpoint": lambda: Model(lambda x: checkpointed(x, reentrant=True)),
}


@pytest.mark.filterwarnings("ignore")  # of torch, about reentrant checkpoints
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("is_built", [False, True], ids=["instance", "builder"])
def test_models_are_exact(name: str, is_built: bool) -> None:
    make = EXACT[name]
    assert verified(make if is_built else make()).is_exact


def test_a_number_and_a_tensor() -> None:
    torch.manual_seed(0)
    model = Model(lambda x: torch.add(0.3, x, alpha=0.7) * torch.sub(1.5, x, alpha=0.2))
    assert verified(model).largest_difference < 1e-6


@pytest.mark.parametrize("case", [zoo.gpt(tied=True), zoo.bert(), zoo.digits()], ids=lambda case: case.name)
def test_stock_models_pass(case: zoo.Case) -> None:
    torch.manual_seed(0)
    assert verified(case.build(), case.batch(2), case.loss).largest_difference < 1e-4


def similarities(outputs: Tensor, targets: Tensor) -> Tensor:
    """A contrastive loss: every sample is compared with all others of its batch."""
    normal = nn.functional.normalize(outputs)
    return nn.functional.cross_entropy(normal @ normal.T, torch.arange(outputs.shape[0]))


@pytest.mark.parametrize(
    ("loss", "least", "most"),
    [
        (nn.MSELoss(), 0.0, 1e-5),
        (nn.MSELoss(reduction="sum"), 0.4, 0.6),
        (similarities, 0.2, 0.6),
        (lambda y, t: nn.functional.mse_loss(y, t) + y.std() * 0.05, 1e-5, 0.1),
    ],
    ids=["mean", "sum", "contrastive", "statistics"],
)
def test_a_loss_over_the_whole_batch_is_noticed(loss: Any, least: float, most: float) -> None:
    model, example = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)), (batch(8)[0], torch.ones(8, 3))
    program = trace(model, loss, example)
    parts = [[leaf[i : i + 4] for leaf in program.feed(example)] for i in (0, 4)]
    assert least <= verify(program, model, loss, parts[0], seed=0, second=parts[1]).batch_effect <= most


def test_the_model_and_the_generators_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
    model[0].weight.grad = torch.ones(6, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    verified(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(6, 4))
    assert model[3].weight.grad is None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_parts_in_evaluation_mode_stay_in_it() -> None:
    program = trace(frozen_norm(), nn.functional.mse_loss, batch())
    norms = [op for op in program.ops if op.op == "aten.batch_norm.default"]
    assert [op.args[5] for op in norms] == [False]
    whole = trace(frozen_norm().eval(), nn.functional.mse_loss, batch())
    assert [op.args[5] for op in whole.ops if op.op == "aten.batch_norm.default"] == [True]


def test_a_mixed_mode_is_rejected() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).eval()
    model[1].train()
    with pytest.raises(TraceError, match=r"its part 1 is in training mode: call model\.train\(\) first"):
        trace(model, nn.functional.mse_loss, batch())


def test_a_builder_with_other_random_numbers_is_rejected() -> None:
    def build() -> nn.Module:
        model = Model()
        with torch.no_grad():
            model.first.weight.fill_(random.random())
        return model

    with pytest.raises(TraceError, match="another initial value each time"):
        verified(build)


class Counting(nn.Module):
    """Changes itself outside its buffers, where a trace sees only the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(4, 4), {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        return self.layer(x) * min(self.state["calls"], 3)  # type: ignore[no-any-return]


def test_a_model_that_changes_itself_in_its_forward_pass_is_refused() -> None:
    batch = torch.rand(3, 4), torch.rand(3, 4)
    model = Counting()
    program = trace(model, F.mse_loss, batch)
    model.state["calls"] = 0  # so that the first comparison is equal
    with pytest.raises(TraceError, match="the model gives another loss the second time"):
        verify(program, model, F.mse_loss, program.feed(batch), seed=0)
