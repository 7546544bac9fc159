"""The oneDNN linear layer: equal up to rounding, and plain PyTorch where it does not apply."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ravnest.graph.interpreter import linear, onednn_is_faster


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (2, 3, 4, 8)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], with_bias: bool, strided: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(6, 8), torch.randn(6) if with_bias else None
    x = torch.randn(*shape[:-2], shape[-1], shape[-2]).mT if strided else torch.randn(shape)
    found, expected = (_results(call, x, weight, bias) for call in (linear, torch.nn.functional.linear))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def _results(call: object, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    out = call(*leaves)  # type: ignore[operator]
    gradients = torch.autograd.grad((out * torch.arange(out.numel()).view(out.shape)).sum(), leaves)
    return [out.detach(), *gradients]


def test_only_required_gradients_are_computed() -> None:
    weight = torch.randn(6, 8)
    x = torch.randn(3, 8, requires_grad=True)
    linear(x, weight).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weight.grad is None


def test_results_are_deterministic() -> None:
    x, weight = torch.randn(64, 96), torch.randn(32, 96)
    assert torch.equal(linear(x, weight), linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_use_plain_pytorch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 8, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


def test_autocast_is_respected() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(torch.randn(3, 8), torch.randn(6, 8)).dtype is torch.bfloat16


def test_the_choice_is_made_once() -> None:
    assert onednn_is_faster() is onednn_is_faster()
    assert onednn_is_faster.cache_info().misses == 1


@pytest.mark.parametrize("weight", [torch.randn(6, 7), torch.randn(6)])
def test_mismatched_sizes_are_an_error(weight: Tensor) -> None:
    with pytest.raises(RuntimeError):
        linear(torch.randn(3, 8), weight)
