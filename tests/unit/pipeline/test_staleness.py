"""Corrections for late gradients, against the formulas written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from ravnest.pipeline.optimizers import SGD, Stepper
from ravnest.pipeline.staleness import DEFAULT, Correction, Corrector, delay_compensation, look_ahead, lr_discount, none

Params = dict[str, Tensor]


def tensors(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)}


def test_look_ahead_is_the_formula() -> None:
    new, old = tensors(1), tensors(2)
    out = Corrector(look_ahead(1.5)).compute_weights(new, tensors(2))
    for name in new:
        assert torch.allclose(out[name], new[name] + 1.5 * (new[name] - old[name]))


def test_second_order_extrapolation_is_the_formula() -> None:
    """C = W + a*d + c*(d - d_before); the first update has no d_before."""
    corrector = Corrector(look_ahead(1.0, curvature=0.5))
    for i in range(1, 5):
        out = corrector.compute_weights(tensors(i), tensors(i - 1))
        step = tensors(i)["a"] - tensors(i - 1)["a"]
        before = tensors(i - 1)["a"] - tensors(i - 2)["a"] if i > 1 else step
        assert torch.allclose(out["a"], tensors(i)["a"] + step + 0.5 * (step - before), atol=1e-5)


def test_memory_is_reused() -> None:
    """After the first update nothing is allocated: the old weights and the last step exchange memory."""
    corrector = Corrector(look_ahead(1.0, curvature=1.0))
    out = corrector.compute_weights(tensors(1), first := tensors(0))
    second = corrector.compute_weights(tensors(2), out)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert corrector.compute_weights(tensors(3), second)["a"].data_ptr() == out["a"].data_ptr()
    plain, old = Corrector(look_ahead(1.0)), tensors(0)
    assert plain.compute_weights(tensors(1), old)["a"].data_ptr() == old["a"].data_ptr()


def test_second_order_extrapolation_is_for_a_delay_of_one() -> None:
    assert Corrector(look_ahead(1.0, curvature=1.0), delay=1).extra_copies == 2
    assert Corrector(look_ahead(1.0, curvature=1.0), delay=3).extra_copies == 1
    assert Corrector(look_ahead(1.0), delay=1).extra_copies == 1
    assert Corrector(none()).extra_copies == 0


def test_look_ahead_grows_with_the_delay() -> None:
    new, old = tensors(1), tensors(2)
    out = Corrector(look_ahead(0.5), delay=4).compute_weights(new, tensors(2))
    assert torch.allclose(out["a"], new["a"] + 2.0 * (new["a"] - old["a"]))


@pytest.mark.parametrize("correction", [none(), look_ahead(0.0)])
def test_without_look_ahead_the_compute_weights_are_the_master_weights(correction: Correction) -> None:
    new, corrector = tensors(1), Corrector(correction)
    assert not corrector.needs_buffer
    out = corrector.compute_weights(new, tensors(2))
    assert all(torch.equal(out[name], new[name]) for name in new)


def test_compute_weights_may_require_gradients() -> None:
    new, old = tensors(1), tensors(2)
    out = Corrector(look_ahead(1.0)).compute_weights(new, {n: t.requires_grad_() for n, t in tensors(2).items()})
    assert torch.allclose(out["a"].detach(), 2 * new["a"] - old["a"])


def test_discount() -> None:
    assert Corrector(lr_discount(1.0), delay=1).lr_factor == 0.5
    assert Corrector(lr_discount(0.5), delay=3).lr_factor == 0.5
    assert Corrector(lr_discount(2.0), delay=0).lr_factor == 1.0
    assert Corrector(look_ahead(1.0), delay=3).lr_factor == 1.0


def test_compensation_is_the_formula_in_place() -> None:
    gradients, now, then = tensors(1), tensors(2), tensors(3)
    want = {n: g + 0.1 * g * g * (now[n] - then[n]) for n, g in gradients.items()}
    corrector = Corrector(delay_compensation(0.1))
    assert corrector.needs_gradient_adjustment
    corrector.adjust_gradient(gradients, now, then)
    assert all(torch.allclose(gradients[n], want[n]) for n in want)


@pytest.mark.parametrize("corrector", [Corrector(look_ahead(1.0)), Corrector(delay_compensation(0.1), delay=0)])
def test_other_corrections_leave_gradients_alone(corrector: Corrector) -> None:
    gradients = tensors(1)
    assert not corrector.needs_gradient_adjustment
    corrector.adjust_gradient(gradients, tensors(2), tensors(3))
    assert all(torch.equal(gradients[n], tensors(1)[n]) for n in gradients)


def test_without_delay_nothing_is_corrected() -> None:
    corrector = Corrector(Correction(look_ahead=2.0, lr_discount=1.0, compensation=1.0), delay=0)
    assert not corrector.needs_buffer
    assert corrector.lr_factor == 1.0


def test_error_feedback_is_equivalent_to_look_ahead() -> None:
    """Delayed descent on a quadratic: correct each step by the last step's error, or extrapolate the plain steps."""
    curvature, lr, a = torch.tensor([1.0, 0.3, 0.05]), 0.4, 1.5
    start = torch.tensor([1.0, -2.0, 3.0])

    steps: list[Tensor] = [torch.zeros(3)]
    fed_back = [start]
    for u in range(12):
        steps.append(-lr * curvature * fed_back[max(0, u - 1)])
        fed_back.append(fed_back[-1] + steps[-1] + a * (steps[-1] - steps[-2]))

    master = {"w": start.clone()}
    compute = [{"w": start.clone()}]
    stepper, corrector = Stepper(SGD(lr), master), Corrector(look_ahead(a))
    for u in range(12):
        out = {"w": master["w"].clone()}
        stepper.step(master, {"w": curvature * compute[max(0, u - 1)]["w"]}, u)
        compute.append(corrector.compute_weights(master, out))

    for ours, theirs in zip(compute, fed_back, strict=True):
        assert torch.allclose(ours["w"], theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("correction", "name"),
    [
        (none(), "none"),
        (look_ahead(1.5), "look-ahead 1.5"),
        (Correction(look_ahead=1.0, lr_discount=0.5), "look-ahead 1 + lr discount 0.5"),
    ],
)
def test_names(correction: Correction, name: str) -> None:
    assert correction.name == name


@pytest.mark.parametrize("make", [look_ahead, lr_discount, delay_compensation])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_an_invalid_number_is_rejected(make: Callable[[float], Correction], value: float) -> None:
    with pytest.raises(ValueError, match="must be a finite number >= 0"):
        make(value)


def test_serialization() -> None:
    packed = msgspec.msgpack.encode(DEFAULT)
    assert msgspec.msgpack.decode(packed, type=Correction) == DEFAULT
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"code":1}', type=Correction)
