"""Packed tensors, and optimizers whose state is packed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ravnest.errors import WeightsError
from ravnest.pipeline.gradient_buffers import GradientBuffers, add_into
from ravnest.pipeline.optimizers import LAMB, SGD, SOAP, Adam, AdamW, Muon, NAdam, Optimizer, Stepper
from ravnest.pipeline.packed_stepper import PackedStepper
from ravnest.pipeline.packing import CHUNK, Form, PackedTensor, noise, pack

FORMS: list[Form] = ["linear", "signed", "positive"]
OPTIMIZERS = [
    SGD(0.1), SGD(0.1, momentum=0.9, nesterov=True), Adam(1e-2), AdamW(1e-2), NAdam(1e-2), Muon(1e-2),
    SOAP(1e-2, basis_every=2), LAMB(1e-2),
]  # fmt: skip


def drawn(numel: int, form: Form, seed: int = 0) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return x.square() if form == "positive" else x


@settings(max_examples=30, deadline=None, derandomize=True)
@given(form=st.sampled_from(FORMS), numel=st.integers(1, 1500), scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]))
def test_a_packed_tensor_is_close(form: Form, numel: int, scale: float) -> None:
    x = drawn(numel, form) * scale
    packed = pack(form, x)
    assert packed.values.shape == x.shape
    for block, close in zip(torch.split(x, 256), torch.split(packed.unpacked(), 256), strict=True):
        bound = {"linear": 1 / 250, "signed": 1 / 120, "positive": 1 / 60}[form] * block.abs().max()
        assert ((block - close).abs() <= bound).all()


def test_zeros_stay_zeros_and_a_second_moment_is_never_zero() -> None:
    for form in FORMS:
        assert not pack(form, torch.zeros(700)).unpacked().any()
    mixed = torch.zeros(256)
    mixed[0] = 1.0
    assert (pack("positive", mixed).unpacked() > 0).all()


def test_numbers_that_are_not_finite_do_not_become_finite() -> None:
    for form in FORMS:
        x = drawn(256, form)
        x[3] = float("nan")
        assert not torch.isfinite(pack(form, x).unpacked()).all()


def test_random_rounding_lets_small_changes_add_up() -> None:
    """A second moment that decays by a thousandth per update, where the distance of two codes is two hundredths."""
    packed, x = pack("positive", torch.full((256,), 2.0)), torch.full((256,), 2.0)
    packed.write(0, 256, torch.cat([torch.full((1,), 4.0), x[1:]]))
    for number in range(300):
        now = packed.read(0, 256)
        packed.write(0, 256, torch.cat([torch.full((1,), 4.0), now[1:] * 0.999]), noise("w", number, 0))
    assert float(packed.unpacked()[1:].mean()) == pytest.approx(2.0 * 0.999**300, rel=0.05)


def test_the_same_update_is_rounded_in_the_same_way() -> None:
    assert torch.equal(noise("w", 3, 0), noise("w", 3, 0))
    assert not torch.equal(noise("w", 3, 0), noise("w", 4, 0))


@pytest.mark.parametrize(
    ("values", "scales"),
    [
        (torch.zeros(300), torch.zeros(2)),
        (torch.zeros(299, dtype=torch.int8), torch.zeros(2)),
        (torch.zeros(300, dtype=torch.int8), torch.zeros(3)),
        (torch.zeros(300, dtype=torch.int8), torch.zeros(2).double()),
    ],
)
def test_codes_that_do_not_fit_are_rejected(values: Tensor, scales: Tensor) -> None:
    with pytest.raises(WeightsError, match="must be"):
        PackedTensor("linear", (300,), values, scales)


def steps(stepper: Stepper | PackedStepper, weights: dict[str, Tensor], count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        drawn_now = torch.Generator().manual_seed(step)
        gradients = {n: torch.randn(t.shape, generator=drawn_now) + 0.5 for n, t in weights.items()}
        stepper.step(weights, gradients, step, norm=1.0)


def parameters() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(1)
    return {"matrix": torch.randn(40, 30, generator=made), "bias": torch.randn(30, generator=made)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_a_packed_optimizer_follows_the_exact_one(optimizer: Optimizer) -> None:
    exact, packed, before = parameters(), parameters(), parameters()
    steps(Stepper(optimizer, exact), exact, 12)
    steps(PackedStepper(optimizer, packed), packed, 12)
    for name, start in before.items():
        moved = (exact[name] - start).norm()
        assert (exact[name] - packed[name]).norm() <= 0.05 * moved, name


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_a_packed_optimizer_resumes_exactly(optimizer: Optimizer) -> None:
    through, resumed = parameters(), parameters()
    steps(PackedStepper(optimizer, through), through, 6)
    first, second = PackedStepper(optimizer, resumed), PackedStepper(optimizer, resumed)
    steps(first, resumed, 3)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    steps(second, resumed, 3, first=3)
    assert all(torch.equal(through[name], tensor) for name, tensor in resumed.items())


def test_a_parameter_of_several_chunks_is_updated_like_a_short_one() -> None:
    long, short = {"w": torch.ones(CHUNK + 300)}, {"w": torch.ones(300)}
    gradient = torch.linspace(0.1, 1.0, 300)
    for tensors in (long, short):
        stepper = PackedStepper(AdamW(1e-2), tensors)
        for step in range(2):
            whole = gradient if len(tensors["w"]) == 300 else torch.cat([torch.ones(CHUNK), gradient])
            stepper.step(tensors, {"w": whole}, step)
    assert torch.allclose(long["w"][CHUNK:], short["w"], atol=1e-3)


@pytest.mark.parametrize("optimizer", [SOAP(1e-2), LAMB(1e-2)], ids=lambda o: o.name)
def test_a_parameter_that_is_updated_as_a_whole_may_be_large(optimizer: Optimizer) -> None:
    exact, packed = ({"w": torch.full((4, CHUNK // 4 + 100), 0.5)} for _ in range(2))
    steps(Stepper(optimizer, exact), exact, 4)
    steps(PackedStepper(optimizer, packed), packed, 4)
    assert (exact["w"] - packed["w"]).norm() <= 0.05 * (exact["w"] - 0.5).norm()


def test_a_parameter_without_a_gradient_does_not_change() -> None:
    weights = parameters()
    stepper = PackedStepper(AdamW(1e-2), weights)
    stepper.step(weights, {"bias": torch.ones(30)}, 0)
    assert torch.equal(weights["matrix"], parameters()["matrix"])
    assert {name.split("/")[0] for name in stepper.state_dict()} == {"bias"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias/exp_avg": torch.zeros(29, dtype=torch.int8)}, "must be"),
        ({"bias/exp_avg_scale": torch.zeros(2)}, "must be"),
        ({"bias/step": torch.zeros(2)}, "must be float32 of shape"),
        ({"other/step": torch.zeros(())}, "belongs to no parameter"),
    ],
)
def test_packed_state_that_does_not_fit_is_rejected(changes: dict[str, Tensor], message: str) -> None:
    weights = parameters()
    stepper = PackedStepper(AdamW(1e-2), weights)
    steps(stepper, weights, 1)
    with pytest.raises(WeightsError, match=message):
        PackedStepper(AdamW(1e-2), weights).load_state_dict({**stepper.state_dict(), **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_summed_and_dropped(dtype: torch.dtype) -> None:
    leaves = {"used": torch.ones(3, requires_grad=True), "unused": torch.ones(3, requires_grad=True)}
    buffers = GradientBuffers(leaves, dtype)
    for _ in range(2):
        buffers.collect_from(leaves)
        (leaves["used"] * 2.0).sum().backward()  # type: ignore[no-untyped-call]
        assert leaves["used"].grad is None
    taken = buffers.take()
    assert taken.keys() == {"used"}, "a parameter without a gradient must not be updated"
    assert torch.equal(taken["used"], torch.full((3,), 4.0, dtype=dtype))
    assert not buffers.take()


def test_a_wider_type_is_added_without_a_whole_copy() -> None:
    target, source = torch.ones(CHUNK + 5, dtype=torch.bfloat16), torch.full((CHUNK + 5,), 2.0)
    add_into(target, source)
    assert torch.equal(target, torch.full((CHUNK + 5,), 3.0, dtype=torch.bfloat16))
