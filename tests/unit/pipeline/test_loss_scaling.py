"""float16 with loss scaling trains as float32 does, also where gradients are too small or too large for float16."""

from __future__ import annotations

import pytest
import torch

from ravnest.pipeline.loss_scaling import LossScaler
from tests.accelerator.devices import TestAccelerator
from tests.unit.pipeline.test_devices import ACCELERATOR, PROCESSOR, run

CPU = torch.device("cpu")


def test_scales_are_exact_and_adapt_to_what_is_received() -> None:
    scaler = LossScaler(CPU, is_last_stage=False)
    received = torch.tensor([3e-9, -1e-9])  # below the least number of float16
    (scaled,) = scaler.scale([received])
    assert scaled is not None
    assert 0.5 < scaled.abs().max() <= 1.0
    (back,) = scaler.unscale([scaled])
    assert back is not None
    assert torch.equal(back, received)


def test_a_gradient_that_overflows_counts_as_zero_and_lowers_the_scale() -> None:
    scaler = LossScaler(CPU, is_last_stage=False)
    weight = torch.ones(2, requires_grad=True)
    scaler.watch({"weight": weight})
    before = scaler.target
    scaler.scale([torch.ones(2)])
    weight.backward(torch.tensor([1.0, float("inf")]))  # type: ignore[no-untyped-call]
    (kept,) = scaler.unscale([torch.ones(2)])
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0]
    assert kept is not None
    assert kept.tolist() == [1.0, 1.0]
    assert scaler.target == before / 4
    scaler.scale([torch.ones(2)])
    scaler.unscale([torch.ones(2)])
    assert scaler.target > before / 4


def test_sums_of_microbatches_with_other_scales_are_right() -> None:
    scaler = LossScaler(CPU, is_last_stage=False)
    weight = torch.ones(2, requires_grad=True)
    for received in (torch.tensor([4.0, 2.0]), torch.tensor([1.0, 0.25])):
        scaler.watch({"weight": weight})
        (scaled,) = scaler.scale([received])
        (weight * 2.0).backward(scaled)  # type: ignore[no-untyped-call]
        scaler.unscale([])
    assert weight.grad is not None
    assert weight.grad.tolist() == [10.0, 4.5]


@pytest.mark.parametrize("memory", ["exact", pytest.param("compact", marks=pytest.mark.soak)])
def test_float16_trains_on_both_kinds_of_devices(memory: str, accelerator: TestAccelerator) -> None:
    exact = run("gpt_tied", PROCESSOR, memory=memory)
    accelerator.reset()
    half = run("gpt_tied", ACCELERATOR, memory=memory, autocast="fp16")
    assert half.losses[0] != exact.losses[0]
    for number, losses in exact.losses.items():
        assert half.losses[number] == pytest.approx(losses, rel=5e-3)
    for name, tensor in exact.weights.items():
        assert torch.allclose(half.weights[name], tensor, atol=2e-2), name
