"""Optimizers as data: their arithmetic equals torch.optim bit for bit, for any tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from ravnest.errors import WeightsError
from ravnest.graph import split, trace
from ravnest.pipeline.optimizers import (
    SGD,
    Adam,
    AdamW,
    LRSchedule,
    Muon,
    NAdam,
    Optimizer,
    Stepper,
    constant,
    cosine,
    embeddings,
    linear,
    state_bytes_per_parameter,
)

Params = dict[str, Tensor]
Make = Callable[[Sequence[Tensor]], Any]  # a torch optimizer, or an object with its step()

SHAPES = {"matrix": (6, 4), "tall": (9, 3), "bias": (5,), "kernel": (2, 3, 2, 2), "scale": ()}
EQUAL: list[tuple[Optimizer, Make]] = [
    (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    (
        SGD(0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    (Adam(), lambda p: torch.optim.Adam(p)),
    (AdamW(), lambda p: torch.optim.AdamW(p)),
    (AdamW(3e-3, betas=(0.8, 0.95)), lambda p: torch.optim.AdamW(p, 3e-3, betas=(0.8, 0.95))),
    (NAdam(), lambda p: torch.optim.NAdam(p)),
    (
        NAdam(betas=(0.99, 0.999), weight_decay=0.1),
        lambda p: torch.optim.NAdam(p, betas=(0.99, 0.999), weight_decay=0.1, decoupled_weight_decay=True),
    ),
    (Optimizer(name="AdamW", lr=1e-3), lambda p: torch.optim.AdamW(p)),
    (
        Optimizer(name="Adam", lr=1e-3, settings={"amsgrad": True}),
        lambda p: torch.optim.Adam(p, amsgrad=True),
    ),
]


def learning_rate(optimizer: Optimizer, step: int) -> float:
    return optimizer.lr * optimizer.schedule.ratio(step)


def state_bytes(stepper: Stepper) -> int:
    return sum(tensor.nbytes for tensor in stepper.state_dict().values())


def tensors(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def plain(
    make: Make, start: Params, steps: int, before: Callable[[list[nn.Parameter]], Any] = lambda p: None
) -> Params:
    """The result of a plain torch loop."""
    parameters = {name: nn.Parameter(t.clone()) for name, t in start.items()}
    optimizer = make(list(parameters.values()))
    for step in range(steps):
        for name, gradient in tensors(100 + step, {n: tuple(t.shape) for n, t in start.items()}).items():
            parameters[name].grad = gradient
        before(list(parameters.values()))
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def stepped(stepper: Stepper, weights: Params, steps: Sequence[int], *, swap: bool = False) -> Params:
    for step in steps:
        if swap:  # other memory for each step, the old one invalidated
            old, weights = weights, {name: t.clone() for name, t in weights.items()}
            for tensor in old.values():
                tensor.fill_(math.nan)
        stepper.step(weights, tensors(100 + step, {n: tuple(t.shape) for n, t in weights.items()}), step)
    return weights


def same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("swap", [False, True], ids=["same storage", "swapped storages"])
@pytest.mark.parametrize(("optimizer", "make"), EQUAL, ids=lambda x: x.name if isinstance(x, Optimizer) else "")
def test_bit_identical_to_torch(optimizer: Optimizer, make: Make, swap: bool) -> None:
    start = tensors(0)
    ours = stepped(Stepper(optimizer, start), {n: t.clone() for n, t in start.items()}, range(6), swap=swap)
    assert same(ours, plain(make, start, 6))


@pytest.mark.parametrize("swap", [False, True], ids=["same storage", "swapped storages"])
def test_muon_updates_matrices_and_its_fallback_the_rest(swap: bool) -> None:
    start = tensors(0, {**SHAPES, "tokens": (7, 4), "lm_head.weight": (7, 4)})
    muon = ("matrix", "tall")
    optimizer = Muon(0.02, match_rms=False, fallback=AdamW(1e-3))
    stepper = Stepper(optimizer, start, fallback_names={"tokens"})
    ours = stepped(stepper, {n: t.clone() for n, t in start.items()}, range(5), swap=swap)

    class Both:
        def __init__(self, parameters: Sequence[Tensor]) -> None:
            named = dict(zip(start, parameters, strict=True))
            self.parts = [
                torch.optim.Muon([p for n, p in named.items() if n in muon], 0.02),
                torch.optim.AdamW([p for n, p in named.items() if n not in muon], 1e-3),
            ]

        def step(self) -> None:
            for part in self.parts:
                part.step()

    assert same(ours, plain(Both, start, 5))


def test_match_rms_is_torchs() -> None:
    start = tensors(0, {"matrix": (6, 4)})
    ours = stepped(Stepper(Muon(1e-3), start), {n: t.clone() for n, t in start.items()}, range(4))
    assert same(ours, plain(lambda p: torch.optim.Muon(p, 1e-3, adjust_lr_fn="match_rms_adamw"), start, 4))


def test_schedule_and_clipping_are_torchs() -> None:
    start = tensors(0)
    optimizer = AdamW(1e-2, schedule=cosine(10, warmup_steps=3, final_ratio=0.1), clip_norm=0.5)
    ours = stepped(Stepper(optimizer, start), {n: t.clone() for n, t in start.items()}, range(8))

    class Scheduled(torch.optim.AdamW):
        steps = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["lr"] = learning_rate(optimizer, self.steps)
            self.steps += 1
            super().step()

    assert same(ours, plain(Scheduled, start, 8, before=lambda p: torch.nn.utils.clip_grad_norm_(p, 0.5)))


def test_clipping_by_the_norm_of_the_whole_model() -> None:
    weights, gradients = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
    Stepper(SGD(1.0, clip_norm=1.0), weights).step(weights, gradients, 0, norm=10.0)
    assert torch.allclose(weights["w"], torch.tensor([-0.3, -0.4]), atol=1e-5)


def test_learning_rate_factor() -> None:
    weights = {"w": torch.zeros(1)}
    Stepper(SGD(1.0), weights).step(weights, {"w": torch.ones(1)}, 0, lr_factor=0.25)
    assert weights["w"].item() == -0.25


def test_a_parameter_without_gradient_does_not_change() -> None:
    start = tensors(0, {"a": (2,), "b": (2,)})
    weights = {n: t.clone() for n, t in start.items()}
    stepper = Stepper(AdamW(), weights)
    stepper.step(weights, {"a": torch.ones(2)}, 0)
    assert torch.equal(weights["b"], start["b"])
    assert not torch.equal(weights["a"], start["a"])
    assert not any(name.startswith("b/") for name in stepper.state_dict())


def test_tensors_of_the_caller_are_not_kept() -> None:
    weights = tensors(0, {"w": (4,)})
    stepper = Stepper(SGD(0.1), weights)
    stepper.step(weights, {"w": torch.ones(4)}, 0)
    assert all(slot.numel() == 0 and slot.grad is None for slot in stepper._slots.values())


def test_learning_rates() -> None:
    assert [learning_rate(SGD(2.0), step) for step in (0, 1, 10**6)] == [2.0] * 3
    warm = SGD(1.0, schedule=constant(warmup_steps=4))
    assert [learning_rate(warm, step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    line = SGD(1.0, schedule=linear(12, warmup_steps=2, final_ratio=0.5))
    assert [learning_rate(line, step) for step in (1, 2, 7, 12, 99)] == [1, 1, 0.75, 0.5, 0.5]
    curve = SGD(1.0, schedule=cosine(10))
    assert learning_rate(curve, 0) == 1
    assert learning_rate(curve, 5) == pytest.approx(0.5)
    assert learning_rate(curve, 10) == 0
    assert all(learning_rate(curve, s) > learning_rate(curve, s + 1) for s in range(10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Optimizer(name="Lion", lr=1e-3), "must be one of SGD"),  # type: ignore[arg-type]
        (lambda: AdamW(-1.0), "lr must be"),
        (lambda: AdamW(math.nan), "lr must be"),
        (lambda: AdamW(betas=(1.0, 0.999)), "beta1 must be < 1"),
        (lambda: AdamW(weight_decay=-0.1), "weight_decay must be"),
        (lambda: AdamW(clip_norm=0.0), "clip_norm must be"),
        (lambda: Optimizer(name="SGD", lr=0.1, settings={"beta1": 0.9}), "its settings are momentum"),
        (lambda: Optimizer(name="SGD", lr=0.1, settings={"nesterov": 1.0}), "must be True or False"),
        (lambda: Optimizer(name="SGD", lr=0.1, settings={"momentum": True}), "must be a number"),
        (lambda: SGD(0.1, nesterov=True), "nesterov requires momentum"),
        (lambda: Muon(0.02, match_rms=False), "requires a fallback"),
        (lambda: Optimizer(name="Muon", lr=0.02), "Muon needs a fallback"),
        (lambda: Muon(fallback=Muon()), "fallback must be SGD"),
        (lambda: Muon(fallback=AdamW(clip_norm=1.0)), "set them on Muon"),
        (
            lambda: Optimizer(name="Muon", lr=0.02, settings={"ns_steps": 99}, fallback=AdamW()),
            "ns_steps must be",
        ),
        (lambda: LRSchedule(kind="cosine"), "total_steps must be"),
        (lambda: cosine(10, warmup_steps=10), "total_steps must be"),
        (lambda: cosine(10, final_ratio=2.0), "final_ratio must be"),
        (lambda: LRSchedule(total_steps=5), "no total_steps"),
    ],
)
def test_an_invalid_setting_is_rejected(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_serialization() -> None:
    for optimizer in (SGD(0.1), NAdam(clip_norm=1.0), Muon(schedule=cosine(9, warmup_steps=1))):
        packed = msgspec.msgpack.encode(optimizer)
        assert msgspec.msgpack.decode(packed, type=Optimizer) == optimizer
    for bad in (b'{"name":"SGD","lr":1,"code":"x"}', b'{"name":"SGD","lr":-1}', b'{"name":"exec","lr":1}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(bad, type=Optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1), SGD(0.1, momentum=0.9), AdamW(), NAdam(), Muon()],
    ids=lambda o: f"{o.name} {o.settings.get('momentum', '')}",
)
def test_training_continues_bit_for_bit_from_a_state_file(optimizer: Optimizer) -> None:
    start = tensors(0)
    whole = stepped(Stepper(optimizer, start), {n: t.clone() for n, t in start.items()}, range(6))

    first = Stepper(optimizer, start)
    weights = stepped(first, {n: t.clone() for n, t in start.items()}, range(3))
    file = save({name: t.clone() for name, t in first.state_dict().items()})
    second = Stepper(optimizer, start)
    second.load_state_dict(load(file))
    assert state_bytes(second) == state_bytes(first)
    assert same(stepped(second, weights, range(3, 6)), whole)


def test_loaded_state_is_not_copied() -> None:
    weights = tensors(0, {"w": (2,)})
    stepper = Stepper(AdamW(), weights)
    stepper.step(weights, {"w": torch.ones(2)}, 0)
    state = {name: t.clone() for name, t in stepper.state_dict().items()}
    other = Stepper(AdamW(), weights)
    other.load_state_dict(state)
    assert {n: t.data_ptr() for n, t in other.state_dict().items()} == {n: t.data_ptr() for n, t in state.items()}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"v/exp_avg": torch.zeros(2)}, "no parameter"),
        ({"exp_avg": torch.zeros(2)}, "no parameter"),
        ({"w/exp_avg": torch.zeros(2)}, "must have step"),
        (
            {"w/step": torch.tensor(1.0), "w/exp_avg": torch.zeros(3), "w/exp_avg_sq": torch.zeros(2)},
            "must be torch.float32 of shape",
        ),
        (
            {"w/step": torch.ones(2), "w/exp_avg": torch.zeros(2), "w/exp_avg_sq": torch.zeros(2)},
            "must be torch.float32 of shape",
        ),
        (
            {"w/step": torch.tensor(1.0), "w/exp_avg": torch.zeros(2).half(), "w/exp_avg_sq": torch.zeros(2)},
            "must be torch.float32 of shape",
        ),
    ],
)
def test_state_that_does_not_fit_is_rejected(state: Params, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        Stepper(AdamW(), {"w": torch.zeros(2)}).load_state_dict(state)


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [(SGD(0.1), 0), (SGD(0.1, momentum=0.9), 4), (Adam(), 8), (AdamW(), 8), (NAdam(), 8), (Muon(), 4)],
    ids=lambda x: x.name if isinstance(x, Optimizer) else str(x),
)
def test_bytes_of_state(optimizer: Optimizer, bytes_each: int) -> None:
    assert state_bytes_per_parameter(optimizer) == bytes_each
    weights = {"w": torch.zeros(8, 16)}
    stepper = Stepper(optimizer, weights)
    assert state_bytes(stepper) == 0
    stepper.step(weights, {"w": torch.ones(8, 16)}, 0)
    assert bytes_each * 128 <= state_bytes(stepper) <= bytes_each * 128 + 8


def test_bytes_of_muons_fallback() -> None:
    assert state_bytes_per_parameter(Muon(), matrix=False) == 8
    assert state_bytes_per_parameter(Muon(fallback=SGD(0.1)), matrix=False) == 0


def test_embeddings_of_a_stage() -> None:
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3))
    program = trace(model, lambda y, t: (y.sum(1) - t).square().mean(), (torch.arange(6).view(2, 3), torch.ones(2, 3)))
    assert embeddings(split(program, [])[0]) == {"0.weight"}


@pytest.mark.parametrize("optimizer", [Adam(1e-3), AdamW(1e-3)], ids=lambda o: o.name)
def test_fused_kernels_are_equal_but_for_rounding(optimizer: Optimizer) -> None:
    generator = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(8, 8, generator=generator), "b": torch.randn(8, generator=generator)}
    results = []
    for fused in (False, True):
        weights = {name: tensor.clone() for name, tensor in start.items()}
        stepper = Stepper(optimizer, weights, fused=fused)
        for step in range(5):
            stepper.step(weights, {name: tensor.cos() for name, tensor in weights.items()}, step)
        results.append((weights, stepper.state_dict()))
    for name, tensor in results[0][0].items():
        torch.testing.assert_close(results[1][0][name], tensor, rtol=1e-5, atol=1e-6)
    assert results[0][1].keys() == results[1][1].keys()
