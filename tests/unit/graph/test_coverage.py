"""A sample of `benchmarks.coverage`: models, layers and operations train as they are, or are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.case import Case, examine
from benchmarks.coverage.huggingface import causal_cases
from benchmarks.coverage.layers import layer_cases, loss_cases, operation_cases
from ravnest.errors import TraceError
from ravnest.graph import trace

FORMS = ("instance", "builder")
EVERY = 20  # of the layers, losses and operations
OPERATIONS = (
    "stochastic depth", "gumbel_softmax", "fft", "stft", "grid_sample", "interpolate antialias", "interpolate 3d",
    "inverse", "cholesky", "roll", "flip", "unfold", "diff", "bernoulli", "uniform_", "complex numbers",
)  # fmt: skip
LAYERS = ("weight_norm", "old weight_norm", "old spectral_norm", "EmbeddingBag", "TransformerEncoder default")
MODELS = ("gpt2", "opt", "qwen3_moe")
REFUSED = {
    "FractionalMaxPool2d", "CTCLoss", "orthogonal", "vmap", "as_strided", "GaussianNLLLoss",
    "AdaptiveLogSoftmaxWithLoss",
}  # fmt: skip


def sample() -> Iterator[Case]:
    named = {*OPERATIONS, *LAYERS}
    for i, case in enumerate([*layer_cases(), *loss_cases(), *operation_cases()]):
        if case.name in named or (i % EVERY == 0 and case.name not in REFUSED and not case.name.startswith("Lazy")):
            yield case


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", list(sample()), ids=lambda case: case.name)
def test_it_trains_as_it_is(case: Case, form: str) -> None:
    outcome = examine(case, form)
    assert outcome.kind in ("exact", "close"), outcome.reason


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [c for c in causal_cases() if c.name in MODELS], ids=lambda case: case.name)
def test_stock_language_models_train_with_their_default_configuration(case: Case, form: str) -> None:
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


def test_a_builder_with_lazy_modules_is_refused_with_a_reason() -> None:
    with pytest.raises(TraceError, match="the builder uses lazy modules"):
        trace(lambda: nn.Sequential(nn.LazyLinear(3)), F.mse_loss, (torch.ones(2, 4), torch.ones(2, 3)))


def test_layers_that_are_skipped_at_random_are_refused() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x if torch.rand([]) < 0.5 else self.layer(x)

    with pytest.raises(TraceError, match="depends on the values"):
        trace(Skips(), F.mse_loss, (torch.ones(2, 4), torch.ones(2, 4)))
