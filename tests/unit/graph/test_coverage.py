"""A sample of `benchmarks.coverage`: models, layers and operations train as they are, or are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.case import FORMS, Case, Subject, examine
from benchmarks.coverage.huggingface import architectures
from benchmarks.coverage.layers import layer_cases, loss_cases, operation_cases
from ravnest.errors import TraceError
from ravnest.graph import trace
from ravnest.graph.export_errors import another_configuration

EVERY = 20  # of the layers, losses and operations
OPERATIONS = (
    "stochastic depth", "gumbel_softmax", "fft", "stft", "grid_sample", "interpolate antialias", "interpolate 3d",
    "inverse", "cholesky", "roll", "flip", "unfold", "diff", "bernoulli", "uniform_", "complex numbers",
)  # fmt: skip
LAYERS = (
    "weight_norm", "old weight_norm", "spectral_norm", "EmbeddingBag", "TransformerEncoder default", "LazyLinear",
    "LazyBatchNorm2d", "FractionalMaxPool2d",
)  # fmt: skip
MODELS = ("gpt2", "qwen3_moe")
LOSSES = ("CTCLoss", "GaussianNLLLoss")
REFUSED = {"orthogonal", "vmap", "as_strided", "AdaptiveLogSoftmaxWithLoss", "Embedding max_norm"}


def sample() -> Iterator[Case]:
    named = {*OPERATIONS, *LAYERS, *LOSSES}
    for i, case in enumerate([*layer_cases(), *loss_cases(), *operation_cases()]):
        if case.name in named or (i % EVERY == 0 and case.name not in REFUSED):
            yield case


@pytest.mark.parametrize(
    ("case", "form"),
    [
        pytest.param(case, form, id=f"{case.name}-{form}", marks=pytest.mark.soak if i % 2 != FORMS.index(form) else ())
        for i, case in enumerate(sample())
        for form in FORMS
    ],
)
def test_it_trains_as_it_is(case: Case, form: str) -> None:
    outcome = examine(case, form)
    assert outcome.kind in ("exact", "close"), outcome.reason


@pytest.mark.slow
@pytest.mark.parametrize("model", [m for m in architectures("causal") if m.name in MODELS], ids=lambda m: m.name)
def test_stock_language_models_train_with_their_default_configuration(model: Subject) -> None:
    labelled, with_loss_function = model.cases()
    for case, form in ((labelled, "builder"), (with_loss_function, "instance")):
        outcome = examine(case, form)
        assert outcome.kind in ("exact", "close"), outcome.reason


def converted(convert: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return convert(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_builder_may_end_with_a_conversion(dtype: torch.dtype, form: str) -> None:
    build = partial(converted, lambda model: model.to(dtype))
    batch = torch.ones(4, 6, dtype=dtype), torch.ones(4, 1, dtype=dtype)
    case = Case("conversion", "dtype", build, F.mse_loss, lambda: batch)
    assert examine(case, form).kind == "exact"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())  # type: ignore[no-any-return]


def test_a_conversion_keeps_tied_parameters() -> None:
    example = (torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64))
    program = trace(lambda: Tied().double(), F.mse_loss, example)
    assert program.ties == {"second.weight": "first.weight"}


def test_a_model_whose_parts_differ_in_strides_can_be_cut_anywhere() -> None:
    """A value is contiguous after it has crossed a cut, so a view that torch allowed may need a copy."""

    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).transpose(1, 2).contiguous().transpose(1, 2)
            return (y.view(x.shape[0], 3, 2, 3).transpose(1, 2) * 2).transpose(1, 2).reshape(x.shape[0], 18).mean(1)  # type: ignore[no-any-return]

    batch = torch.rand(4, 3, 4), torch.rand(4)
    program = trace(Strided(), F.mse_loss, batch)
    assert "aten.view.default" not in {op.op for op in program.ops}
    assert examine(Case("strides", "test", Strided, F.mse_loss, lambda: batch), "instance").kind == "exact"


class TensorLengths(nn.Module):
    """Lengths from the batch, as in speech recognition."""

    def forward(self, output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        log_probabilities = output.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probabilities, targets["tokens"], targets["steps"], targets["lengths"])


@pytest.mark.parametrize("form", FORMS)
def test_the_lengths_of_a_ctc_loss_come_from_the_batch(form: str) -> None:
    tokens = torch.randint(1, 6, (3, 2))
    targets = {"tokens": tokens, "steps": torch.tensor([5, 4, 5]), "lengths": torch.tensor([2, 1, 2])}
    case = Case("ctc", "test", lambda: nn.Linear(4, 6), TensorLengths(), lambda: (torch.ones(3, 5, 4), targets))
    outcome = examine(case, form)
    assert outcome.kind == "exact", outcome.reason


class Random(nn.Module):
    """Draws of all forms while it is built; those of other stages are skipped when a stage makes its own tensors."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.no_grad():
            for layer in (self.first, self.second, self.third):
                layer.weight.copy_(draw(layer.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "draw", [torch.rand_like, torch.randn_like, lambda w: torch.rand(w.shape)], ids=["rand_like", "randn_like", "rand"]
)
def test_a_builder_may_draw_in_any_form(draw: Callable[[Tensor], Tensor]) -> None:
    batch = torch.ones(3, 4), torch.ones(3, 4)
    outcome = examine(Case("draws", "test", lambda: Random(draw), F.mse_loss, lambda: batch), "builder")
    assert outcome.kind == "exact", outcome.reason


class Scheduled(nn.Module):
    """Reads values of tensors while it is built, as models with stochastic depth do."""

    def __init__(self, rates: Callable[[], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.rates = [float(rate) for rate in rates()]

    def forward(self, x: Tensor) -> Tensor:
        for layer, rate in zip(self.layers, self.rates, strict=True):
            x = layer(x) * rate
        return x


DETERMINISTIC: list[Callable[[], Tensor]] = [
    lambda: torch.linspace(0.5, 1, 3),
    lambda: torch.arange(6.0).reshape(2, 3).sum(0) / 9,
    lambda: torch.ones(3).mul_(0.5).cumsum(0),
]


@pytest.mark.parametrize("rates", DETERMINISTIC, ids=range(len(DETERMINISTIC)))
def test_a_builder_may_read_values_that_no_random_number_decides(rates: Callable[[], Tensor]) -> None:
    batch = torch.ones(3, 4), torch.ones(3, 4)
    outcome = examine(Case("values", "test", lambda: Scheduled(rates), F.mse_loss, lambda: batch), "builder")
    assert outcome.kind == "exact", outcome.reason


@pytest.mark.parametrize(
    "rates", [lambda: torch.rand(3), lambda: torch.ones(3) + torch.empty(3).normal_()], ids=range(2)
)
def test_a_builder_that_reads_random_values_is_refused(rates: Callable[[], Tensor]) -> None:
    with pytest.raises(TraceError, match="Do not read values of tensors while building"):
        trace(lambda: Scheduled(rates), F.mse_loss, (torch.ones(3, 4), torch.ones(3, 4)))


@pytest.mark.parametrize("shape", [(3, 6), (6, 3)], ids=str)
def test_an_orthogonal_initialisation_is_recorded(shape: tuple[int, int]) -> None:
    """It transposes wide matrices in place."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, shape[1]), nn.Linear(shape[1], shape[0]), nn.Linear(shape[0], 1))
        nn.init.orthogonal_(model[1].weight)  # type: ignore[arg-type]
        return model

    batch = torch.ones(3, 4), torch.ones(3, 1)
    outcome = examine(Case("orthogonal", "test", build, F.mse_loss, lambda: batch), "builder")
    assert outcome.kind == "exact", outcome.reason


def test_a_number_that_is_only_asserted_is_not_read() -> None:
    class Lengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4)

        def forward(self, ids: Tensor) -> Tensor:
            torch._check(ids.max().item() < 9)  # type: ignore[no-untyped-call]
            return self.embedding(ids).mean(1)  # type: ignore[no-any-return]

    batch = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 4)
    outcome = examine(Case("assertion", "test", Lengths, F.mse_loss, lambda: batch), "instance")
    assert outcome.kind == "exact", outcome.reason


def test_a_weight_that_the_forward_pass_changes_is_refused() -> None:
    with pytest.raises(TraceError, match="max_norm, which changes its weights in the forward pass"):
        trace(nn.Embedding(9, 4, max_norm=1.0), F.mse_loss, (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, 4)))


def test_an_operation_of_a_library_is_not_to_be_rewritten() -> None:
    source = "/x/site-packages/transformers/models/a.py:3 in forward: x.item()"
    assert "transformers is a library: choose another configuration" in another_configuration(source)
    assert another_configuration("/home/me/model.py:3 in forward: x.item()") == ""


def test_layers_that_are_skipped_at_random_are_refused() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x if torch.rand([]) < 0.5 else self.layer(x)

    with pytest.raises(TraceError, match="skips layers at random, with a probability of"):
        trace(Skips(), F.mse_loss, (torch.ones(2, 4), torch.ones(2, 4)))
