"""A model that cannot be traced is refused with a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.errors import TraceError
from ravnest.graph import trace


class Model(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.config = SimpleNamespace(encoder_layerdrop=0.1, dropout=0.1)
        self.skip_layer_drop = 0.25

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def by_configuration(model: Model, x: Tensor) -> Tensor:
    self = model
    skips = self.training and torch.rand([]) < self.config.encoder_layerdrop
    return x if skips else model.layer(x)


def by_attribute(self: Model, x: Tensor) -> Tensor:
    return x if torch.rand([]) < self.skip_layer_drop else self.layer(x)


def by_number(self: Model, x: Tensor) -> Tensor:
    if torch.rand([]) < 0.5:
        return x
    return self.layer(x)  # type: ignore[no-any-return]


def penalises(model: Model, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model.layer(x).tanh()
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + gradient  # type: ignore[no-any-return]


def maps(model: Model, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * row.sum())(model.layer(x))  # type: ignore[no-any-return]


def derives(model: Model, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: model.layer(y).sum())(x)  # type: ignore[no-any-return]


def reads(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) / x.abs().max().item()  # type: ignore[no-any-return]


def by_numpy(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) * float(x.detach().numpy().mean())  # type: ignore[no-any-return]


def by_where(model: Model, x: Tensor) -> Tensor:
    rows, _ = torch.where(x > 0)
    return model.layer(x) + x[rows].sum()  # type: ignore[no-any-return]


def by_unique(model: Model, x: Tensor) -> Tensor:
    return model.layer(x) + torch.unique(x.round()).sum()  # type: ignore[no-any-return]


def by_branch(model: Model, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (model.layer(x),))  # type: ignore[no-any-return]


def by_sparse(model: Model, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(3).to_sparse(), model.layer(x))  # type: ignore[no-any-return]


def by_nested(model: Model, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor([model.layer(x[0]), model.layer(x[1])])
    return rows.to_padded_tensor(0.0)


def packs(model: Model, x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x[..., None], torch.tensor([4, 3, 2]), batch_first=True)
    return nn.RNN(1, 4)(packed)[1][0]  # type: ignore[no-any-return]


REFUSED: list[tuple[Callable[..., Tensor], str]] = [
    (by_configuration, r"skips layers at random, with a probability of 0\.1.*\n.*set config\.encoder_layerdrop = 0\.0"),
    (by_attribute, r"a probability of 0\.25, at .*\n.*set skip_layer_drop = 0\.0 in the Model of the model"),
    (by_number, r"a probability of 0\.5, at .*\n.*set this probability to 0"),
    (penalises, r"It calls autograd in its forward pass or its loss"),
    (maps, r"test_refusals\.py:\d+ in .* uses a transform of torch\.func"),
    (derives, r"a transform of torch\.func"),
    (reads, r"reads a number from a tensor, as \.item\(\)"),
    (by_numpy, r"reads the values of a tensor with NumPy|It reads the values"),
    (by_where, r"whose result has a size that depends on values; select with a mask"),
    (by_unique, r"whose result has a size that depends on values; select with a mask"),
    (by_branch, r"test_refusals\.py:\d+ in .* uses cond"),
    (by_sparse, r"It uses sparse tensors; use dense ones"),
    (by_nested, r"It uses nested tensors; pad them"),
    (packs, r"It packs sequences; give the padded ones"),
]


@pytest.mark.filterwarnings("ignore")  # of torch, about prototypes
@pytest.mark.parametrize(("function", "match"), REFUSED, ids=[function.__name__ for function, _ in REFUSED])
def test_a_refusal_says_what_to_change(function: Callable[..., Tensor], match: str) -> None:
    with pytest.raises(TraceError, match=match):
        trace(Model(function), F.mse_loss, (torch.rand(3, 4), torch.rand(3, 4)))


def test_layers_that_are_never_skipped_are_traced() -> None:
    model = Model(by_configuration)
    model.config.encoder_layerdrop = 0.0
    assert trace(model, F.mse_loss, (torch.rand(3, 4), torch.rand(3, 4))).ops
