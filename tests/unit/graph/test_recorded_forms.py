"""Forms that torch.export does not record, and batches that the model writes to, train as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.case import FORMS, Case, examine
from ravnest.errors import TraceError
from ravnest.graph import trace
from ravnest.graph.verify import verify

Forward = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(6, 8), nn.Linear(8, 3), forward
        self.norm = nn.LayerNorm(8)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.function(self, x)))  # type: ignore[no-any-return]


def reads_data(model: Model, x: Tensor) -> Tensor:
    hidden = model.a(x)
    return hidden - hidden.data.mean(0)  # type: ignore[no-any-return]


def writes_data(model: Model, x: Tensor) -> Tensor:
    hidden = model.a(x)
    model.mean.data.lerp_(hidden.data.mean(0), 0.1)
    return hidden - model.mean  # type: ignore[no-any-return]


def sets_data(model: Model, x: Tensor) -> Tensor:
    hidden = model.a(x)
    model.mean.data = model.mean.data * 0.9 + hidden.detach().mean(0) * 0.1
    return hidden - model.mean  # type: ignore[no-any-return]


def infers(model: Model, x: Tensor) -> Tensor:
    with torch.inference_mode():
        mean = model.a(x).mean(0)
    with torch.inference_mode(False):
        hidden = model.a(x)
    return hidden - mean.clone()  # type: ignore[no-any-return]


@torch.inference_mode()
def statistics(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True)


def infers_by_decorator(model: Model, x: Tensor) -> Tensor:
    return model.a(x - statistics(x))  # type: ignore[no-any-return]


def writes_to_its_input(model: Model, x: Tensor) -> Tensor:
    x += 1
    return model.a(x)  # type: ignore[no-any-return]


def writes_to_a_view(model: Model, x: Tensor) -> Tensor:
    x[:, 0] += 1
    x[:, 1:3].mul_(2)
    return model.a(x)  # type: ignore[no-any-return]


def from_distributions(model: Model, x: Tensor) -> Tensor:
    normal = torch.distributions.Normal(model.a(x), F.softplus(model.a(x)) + 1e-3)
    gamma = torch.distributions.Gamma(model.a(x).exp(), torch.ones(8))
    weights = torch.distributions.Dirichlet(torch.ones(8))
    share = torch.distributions.Beta(0.4, 0.4).sample()
    drawn: Tensor = normal.rsample() * share + gamma.rsample() + weights.sample()
    return drawn - normal.log_prob(drawn.detach())  # type: ignore[no-any-return,no-untyped-call]


def only_checked(model: Model, x: Tensor) -> Tensor:
    assert torch.unique_consecutive(x.sum(1)).shape[0] >= 1
    assert (x == 0).nonzero().shape[0] < 100
    return model.a(x)  # type: ignore[no-any-return]


FORWARDS = [
    reads_data, writes_data, sets_data, infers, infers_by_decorator, writes_to_its_input, writes_to_a_view,
    from_distributions, only_checked,
]  # fmt: skip


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_it_trains_as_it_is(forward: Forward, form: str) -> None:
    outcome = examine(Case("form", "test", partial(Model, forward), F.mse_loss, example), form)
    assert outcome.kind in ("exact", "close"), outcome.reason


def mark(outputs: Tensor, targets: Tensor) -> Tensor:
    targets[targets == 1] = -100
    return F.cross_entropy(outputs, targets)


def test_a_loss_may_write_to_its_targets() -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return example()[0], torch.tensor([0, 1, 2, 0])

    assert examine(Case("marked", "test", lambda: nn.Linear(6, 3), mark, batch), "instance").kind == "exact"


def test_sparse_gradients_are_trained_as_dense_ones() -> None:
    ids = torch.tensor([[1, 2], [2, 2], [5, 0]])

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))

    case = Case("sparse", "test", model, F.mse_loss, lambda: (ids, torch.ones(3, 3)))
    assert examine(case, "instance").kind == "exact"


def refused(model: nn.Module, batch: Any, match: str) -> None:
    program = trace(model, F.mse_loss, batch)
    with pytest.raises(TraceError, match=match):
        verify(program, model, F.mse_loss, program.feed(batch), seed=0)


def test_a_write_to_an_input_that_is_the_target_too_is_refused() -> None:
    x = torch.rand(4, 6)
    model = nn.Sequential(Model(writes_to_its_input), nn.Linear(3, 6))
    refused(model, (x, x), "writes to a tensor of the batch that shares its memory")
    words = torch.rand(4, 7)
    refused(nn.Sequential(Model(writes_to_a_view), nn.Linear(3, 6)), (words[:, :-1], words[:, 1:]), "shares its memory")


def seeds(model: Model, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noise = torch.randn(8)
    return model.a(x) + noise  # type: ignore[no-any-return]


def test_a_seed_in_the_forward_pass_is_named() -> None:
    refused(Model(seeds), example(), r"Likely cause: the forward pass calls torch\.manual_seed")


def test_a_generator_of_the_models_own_is_refused() -> None:
    generator = torch.Generator()
    model = Model(lambda model, x: model.a(x) + torch.rand(8, generator=generator))
    with pytest.raises(TraceError, match=r"a torch\.Generator of its own, draw from torch's generator"):
        trace(model, F.mse_loss, example())


def test_detached_data_of_a_parameter_may_not_be_written() -> None:
    def clamps(model: Model, x: Tensor) -> Tensor:
        model.a.weight.data.clamp_(-1, 1)
        return model.a(x)  # type: ignore[no-any-return]

    with pytest.raises(TraceError, match="writes to a parameter in the forward pass"):
        trace(Model(clamps), F.mse_loss, example())
