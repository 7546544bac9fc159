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
    LAMB,
    SGD,
    SOAP,
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
    most_basis_bytes,
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


def reference_soap(start: Tensor, gradients: Sequence[Tensor], lr: float, decay: float, every: int) -> Tensor:
    """The weights after these gradients, by the formulas in double precision, with both sides rotated."""
    w, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    g = gradients[0].double()
    left, right = 0.05 * g @ g.T, 0.05 * g.T @ g
    (u, _, _), (x, _, _) = torch.linalg.svd(left), torch.linalg.svd(right)
    for t, gradient in enumerate(gradients[1:], start=1):
        g = gradient.double()
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * (u.T @ g @ x) ** 2
        adam = (u.T @ m @ x) / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        w = w - lr * decay * w - lr * u @ adam @ x.T
        left, right = 0.95 * left + 0.05 * g @ g.T, 0.95 * right + 0.05 * g.T @ g
        if t % every == 0:
            rows = torch.tensor(sorted(range(len(u)), key=lambda i: -float(u[:, i] @ left @ u[:, i])))
            columns = torch.tensor(sorted(range(len(x)), key=lambda i: -float(x[:, i] @ right @ x[:, i])))
            v = v[rows][:, columns]
            u, x = torch.linalg.qr(left @ u[:, rows]).Q, torch.linalg.qr(right @ x[:, columns]).Q
    return w.float()


def test_soap_follows_its_formulas() -> None:
    shape: dict[str, tuple[int, ...]] = {"w": (5, 5)}  # the bases are unique but for signs
    start = tensors(0, shape)
    optimizer = SOAP(0.02, betas=(0.9, 0.95), weight_decay=0.1, basis_every=3)
    ours = stepped(Stepper(optimizer, start), {n: t.clone() for n, t in start.items()}, range(12))
    gradients = [tensors(100 + step, shape)["w"] for step in range(12)]
    torch.testing.assert_close(ours["w"], reference_soap(start["w"], gradients, 0.02, 0.1, 3), rtol=1e-3, atol=1e-4)


def test_soap_without_rotated_sides_is_adam_one_step_later() -> None:
    start = tensors(0, {"w": (9, 9)})
    ours = stepped(Stepper(SOAP(0.02, max_dim=4), start), {n: t.clone() for n, t in start.items()}, range(6))
    adam = stepped(
        Stepper(AdamW(0.02, betas=(0.95, 0.95)), start), {n: t.clone() for n, t in start.items()}, range(1, 6)
    )
    torch.testing.assert_close(ours["w"], adam["w"])


def test_soap_leaves_vectors_and_embeddings_to_its_fallback() -> None:
    start = tensors(0, {**SHAPES, "tokens": (7, 4), "lm_head.weight": (7, 4)})
    fallback = AdamW(1e-3)
    ours = stepped(
        Stepper(SOAP(fallback=fallback), start, {"tokens"}), {n: t.clone() for n, t in start.items()}, range(3)
    )
    adam = stepped(Stepper(fallback, start), {n: t.clone() for n, t in start.items()}, range(3))
    assert {name for name in start if torch.equal(ours[name], adam[name])} == start.keys() - {"matrix", "tall"}


def test_lamb_follows_its_formulas() -> None:
    """A matrix moves by `lr` times its length; a bias that starts at 0, and a scale, as by Adam."""
    start = {**tensors(0, {"w": (4, 6), "scale": (5,)}), "zero": torch.zeros(3, 2)}
    optimizer = LAMB(0.02, weight_decay=0.1)
    ours = stepped(Stepper(optimizer, start), {n: t.clone() for n, t in start.items()}, range(5))
    for name, first in start.items():
        w, m, v = first.double(), torch.zeros_like(first).double(), torch.zeros_like(first).double()
        for t in range(1, 6):
            g = tensors(99 + t, {n: tuple(x.shape) for n, x in start.items()})[name].double()
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            update = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
            if name != "scale":
                update = update + 0.1 * w
                if w.norm() > 0:
                    update = update * w.norm() / update.norm()
                    assert 0.02 * update.norm() == pytest.approx(0.02 * float(w.norm()))
            w = w - 0.02 * update
        torch.testing.assert_close(ours[name], w.float(), rtol=1e-4, atol=1e-6)


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
        (lambda: Optimizer(name="Muon", lr=0.02), "Muon and SOAP need a fallback"),
        (lambda: Muon(fallback=Muon()), "fallback must be one of SGD"),
        (lambda: SOAP(fallback=LAMB()), "fallback must be one of SGD"),
        (lambda: SOAP(fallback=AdamW(clip_norm=1.0)), "set them on SOAP"),
        (lambda: SOAP(basis_every=0), "basis_every must be 1 to"),
        (lambda: LAMB(betas=(0.9, 1.0)), "beta2 must be < 1"),
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
    for optimizer in (SGD(0.1), NAdam(clip_norm=1.0), Muon(schedule=cosine(9, warmup_steps=1)), SOAP(), LAMB()):
        packed = msgspec.msgpack.encode(optimizer)
        assert msgspec.msgpack.decode(packed, type=Optimizer) == optimizer
    for bad in (b'{"name":"SGD","lr":1,"code":"x"}', b'{"name":"SGD","lr":-1}', b'{"name":"exec","lr":1}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(bad, type=Optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1), SGD(0.1, momentum=0.9), AdamW(), NAdam(), Muon(), SOAP(basis_every=2), LAMB()],
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


@pytest.mark.parametrize(("shape", "rotated"), [((8, 16), 8**2 + 16**2), ((4, 32), 4**2), ((64, 64), 0)], ids=str)
def test_bytes_of_bases(shape: tuple[int, int], rotated: int) -> None:
    """State of the matrix's own shape, a covariance and a basis of each rotated side, and a counter."""
    optimizer, weights = SOAP(max_dim=48), {"w": torch.zeros(shape)}
    stepper = Stepper(optimizer, weights)
    stepper.step(weights, {"w": torch.ones(shape)}, 0)
    own, size = state_bytes_per_parameter(optimizer) * math.prod(shape), 2 * 4 * rotated
    assert state_bytes(stepper) == own + size + 4
    assert most_basis_bytes(optimizer, {"w": shape, "b": (5,), "x.head.weight": (9, 9)}) * math.prod(shape) == size
    assert most_basis_bytes(AdamW(), {"w": shape}) == 0


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
