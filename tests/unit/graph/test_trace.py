"""Tracing: supported models, losses and batches, and the errors for unsupported ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import zoo
from benchmarks.zoo import Case
from ravnest.errors import TraceError, UnsupportedOp
from ravnest.graph import legal_cuts, split, trace
from tests.unit.graph.pipeline import assert_same, eager_step, fresh_state, staged_step


class MaskedLayers(nn.Module):
    """A mask and a scale, given by keyword, that every layer uses; integer inputs; dropout."""

    def __init__(self, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor, *, mask: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + scale * self.drop(layer(x)) * mask.unsqueeze(-1)
        return (x * mask.unsqueeze(-1)).mean((1, 2))  # type: ignore[no-any-return]


def masked_batch(n: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (n, 5), generator=generator)
    return {"ids": ids, "mask": (ids > 2).float(), "scale": 0.5}, torch.ones(n)


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": nn.HuberLoss(),
    "bce": F.binary_cross_entropy_with_logits,
    "with_metrics": lambda y, t: (F.mse_loss(y, t), {"mean": y.mean(), "largest": y.max()}),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_masks_dropout_keywords_and_losses(loss: str) -> None:
    case = Case("masked", MaskedLayers, LOSSES[loss], masked_batch)
    torch.manual_seed(0)
    model = case.build()
    program = trace(model, case.loss, case.batch(4))
    reference = eager_step(case, model, case.batch(3))
    step = staged_step(split(program, legal_cuts(program)), fresh_state(program), program.feed(case.batch(3)))
    assert_same(step, reference)
    assert [v.name for v in program.outputs] == ["loss", *(["mean", "largest"] if loss == "with_metrics" else [])]


def test_a_loss_with_weights_of_its_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(()))
            self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, y: Tensor, t: Tensor) -> Tensor:
            return F.cross_entropy(y * self.log_scale.exp(), t, weight=self.weights)  # type: ignore[arg-type]

    program = trace(nn.Linear(4, 3), Scaled(), (torch.ones(5, 4), torch.zeros(5, dtype=torch.int64)))
    assert [s.target for s in program.state] == ["weight", "bias", "loss.log_scale", "loss.weights"]


def test_a_batch_of_one_traces_for_any_batch() -> None:
    program = trace(nn.Linear(4, 1), lambda y, t: F.mse_loss(y[:, 0], t), (torch.ones(1, 4), torch.ones(1)))
    assert program.inputs[0].shape == ((1, 0), 4)
    assert program.feed((torch.ones(7, 4), torch.ones(7)))[0].shape == (7, 4)


def test_tracing_leaves_the_model_as_it_was() -> None:
    case = zoo.digits()
    model = case.build()
    model.features[1].eval()  # type: ignore[index, union-attr]
    before = {n: t.clone() for n, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    trace(model, case.loss, case.batch(4))
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_two_traces_are_the_same_data() -> None:
    case = zoo.llama()
    first, second = (trace(case.build, case.loss, case.batch(2)) for _ in range(2))
    assert split(first, [50, 90]) == split(second, [50, 90])


class Model(nn.Module):
    """A linear layer around a function that goes wrong."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def branch(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def fixed_batch(x: Tensor) -> Tensor:
    return x.view(3, 4) * 2


def decomposition(x: Tensor) -> Tensor:
    values: Tensor = torch.linalg.eigvals(x.mT @ x).real
    return x + values.sum()


def shape_of_data(x: Tensor) -> Tensor:
    return torch.unique(x.round()).sum() + x  # type: ignore[no-any-return]


def broken(x: Tensor) -> Tensor:
    raise KeyError("my own mistake")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (branch, "depends on the values"),
        (fixed_batch, "fixes the batch size"),
        (shape_of_data, r"whose result has a size that depends on values; select with a mask instead"),
        (broken, "my own mistake"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_models_that_cannot_be_traced(function: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace(Model(function), lambda y, t: F.mse_loss(y, t), (torch.ones(3, 4), torch.ones(3, 4)))


def test_an_op_outside_the_list_is_named_with_its_line() -> None:
    with pytest.raises(UnsupportedOp) as error:
        trace(Model(decomposition), F.mse_loss, (torch.ones(3, 4), torch.ones(3, 4)))
    message = str(error.value)
    assert "aten.linalg_eigvals.default" in message
    assert "test_trace.py" in message
    assert "in forward: return self.function(self.linear(x))" in message
    assert "CONTRIBUTING.md" in message


def test_an_op_outside_the_list_in_the_loss_is_attributed_to_it() -> None:
    with pytest.raises(UnsupportedOp, match=r"the loss function calls aten\.linalg_eigvals"):
        trace(nn.Linear(4, 4), lambda y, t: decomposition(y).sum(), (torch.ones(3, 4), torch.ones(3, 4)))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, t: y, r"float32 tensor with 2 dimensions.*\.mean\(\)"),
        (lambda y, t: (y > 0).sum(), "int64"),
        (lambda y, t: 1.0, "a float"),
        (lambda y, t: (y.mean(), y), "dict of tensors"),
        (None, "neither a scalar"),
    ],
)
def test_invalid_losses(loss: Any, message: str) -> None:
    model = Model(lambda x: x) if loss else Model(lambda x: (x,))  # type: ignore[arg-type, return-value]
    batch = (torch.ones(3, 4), torch.ones(3, 4)) if loss else torch.ones(3, 4)
    with pytest.raises(TraceError, match=message):
        trace(model, loss, batch)


def test_builders_that_do_not_build() -> None:
    with pytest.raises(ValueError, match=r"not a torch\.nn\.Module"):
        trace(lambda: 3, F.mse_loss, (torch.ones(3, 4), torch.ones(3, 4)))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="function that builds one"):
        trace(3, F.mse_loss, (torch.ones(3, 4), torch.ones(3, 4)))  # type: ignore[arg-type]

    def looks_at_values() -> nn.Module:
        return nn.Linear(4, int(torch.rand(1).item() * 10) + 1)

    with pytest.raises(TraceError, match="pass the model itself"):
        trace(looks_at_values, F.mse_loss, (torch.ones(3, 4), torch.ones(3, 4)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.ones(2, 5), torch.ones(2)), r"batch.inputs has shape \(2, 5\), the program was traced for \(2, 4\)"),
        ((torch.ones(2, 4).double(), torch.ones(2)), "float64"),
        ((torch.ones(2, 4), torch.ones(3)), r"batch.targets has shape \(3,\)"),
        (({"x": torch.ones(2, 4)}, torch.ones(2)), r"batch.inputs is a dict, it was a tensor in the first batch"),
        ((torch.ones(2, 4), "x"), r"batch.targets is 'x', it was a tensor .* leave out text in the collator"),
        (torch.ones(2, 4), "must be a pair"),
        ((torch.ones(2, 4), object()), "a batch contains tensors"),
    ],
)
def test_batches_that_do_not_fit(batch: Any, message: str) -> None:
    program = trace(nn.Linear(4, 1), lambda y, t: F.mse_loss(y[:, 0], t), (torch.ones(3, 4), torch.ones(3)))
    with pytest.raises(ValueError, match=message):
        program.feed(batch)


def test_fixed_batch_on_request() -> None:
    batch = (torch.ones(3, 4), torch.ones(3, 4))
    program = trace(Model(fixed_batch), F.mse_loss, batch, dynamic_batch=False)
    assert program.inputs[0].shape == (3, 4)
    assert len(program.feed(batch)) == 2
