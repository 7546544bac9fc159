"""Optimizers and learning-rate schedules as plain data, and the `Stepper` that applies them in a stage.

    settings:  AdamW(lr=3e-4, schedule=cosine(1000, warmup_steps=50), clip_norm=1.0)
    rate:      lr(step) = lr * ratio(step), a pure function
    update:    W <- torch.optim.X(W, g, lr(step)), in place, on the tensors that the caller passes

The arithmetic is that of `torch.optim`, bit for bit; no update is computed here. Weights have several versions, so a
stepper owns its state (moments, counters) but no weights: the tensors to change are passed to each step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from ravnest.core.config import Record, require
from ravnest.errors import WeightsError
from ravnest.graph import Stage
from ravnest.pipeline.packing import PACKED_BYTES, unpack_state

__all__ = [
    "Optimizer",
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "Muon",
    "LRSchedule",
    "constant",
    "cosine",
    "linear",
    "Stepper",
    "check_keys",
    "embeddings",
    "is_counter",
    "optimizer_of",
    "state_by_parameter",
    "state_bytes_per_parameter",
    "state_keys",
    "torch_optimizer",
]

Number = bool | float

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "Muon": torch.optim.Muon,
}
_ADAM = {"beta1": float, "beta2": float, "eps": float, "weight_decay": float}
_SETTINGS: dict[str, dict[str, type]] = {
    "SGD": {"momentum": float, "dampening": float, "weight_decay": float, "nesterov": bool},
    "Adam": {**_ADAM, "amsgrad": bool},
    "AdamW": {**_ADAM, "amsgrad": bool},
    "NAdam": {**_ADAM, "momentum_decay": float, "decoupled_weight_decay": bool},
    "Muon": {
        "momentum": float, "nesterov": bool, "weight_decay": float, "eps": float, "ns_steps": int, "match_rms": bool,
    },
}  # fmt: skip
_BELOW_ONE = ("beta1", "beta2", "momentum", "dampening")
_MAX_NS_STEPS = 20


class LRSchedule(Record, frozen=True, kw_only=True):
    """The learning rate over steps: a linear warm-up, then `kind` down to `final_ratio` at `total_steps`."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    final_ratio: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.kind in ("constant", "linear", "cosine"), f"kind must be constant, linear or cosine, got {self.kind!r}"
        )
        require(self.warmup_steps >= 0, f"warmup_steps must be >= 0, got {self.warmup_steps}")
        require(0 <= self.final_ratio <= 1, f"final_ratio must be between 0 and 1, got {self.final_ratio}")
        if self.kind == "constant":
            require(self.total_steps == 0, f"a constant schedule has no total_steps, got {self.total_steps}")
        else:
            require(
                self.total_steps > self.warmup_steps,
                f"total_steps must be > warmup_steps ({self.warmup_steps}), got {self.total_steps}",
            )

    def ratio(self, step: int) -> float:
        """The factor on the learning rate of update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        decay = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_ratio + (1.0 - self.final_ratio) * decay


CONSTANT = LRSchedule()


def constant(*, warmup_steps: int = 0) -> LRSchedule:
    """A constant learning rate after a linear warm-up.

    Args:
        warmup_steps: Optimizer steps over which the rate rises to `lr`. Default 0.

    Returns:
        The schedule, for the `schedule` argument of an optimizer.

    Raises:
        ValueError: `warmup_steps` is negative.
    """
    return LRSchedule(warmup_steps=warmup_steps)


def linear(total_steps: int, *, warmup_steps: int = 0, final_ratio: float = 0.0) -> LRSchedule:
    """A linear warm-up, then a linear decay.

    Args:
        total_steps: Optimizer step at which the decay ends, counted from the start of training.
        warmup_steps: Optimizer steps over which the rate rises to `lr`. Default 0.
        final_ratio: Learning rate from `total_steps` on, as a fraction of `lr` (0 to 1). Default 0.

    Returns:
        The schedule, for the `schedule` argument of an optimizer.

    Raises:
        ValueError: A number is out of range, or `total_steps` is not greater than `warmup_steps`.
    """
    return LRSchedule(kind="linear", warmup_steps=warmup_steps, total_steps=total_steps, final_ratio=final_ratio)


def cosine(total_steps: int, *, warmup_steps: int = 0, final_ratio: float = 0.0) -> LRSchedule:
    """A linear warm-up, then a decay along half a cosine.

    Args:
        total_steps: Optimizer step at which the decay ends, counted from the start of training.
        warmup_steps: Optimizer steps over which the rate rises to `lr`. Default 0.
        final_ratio: Learning rate from `total_steps` on, as a fraction of `lr` (0 to 1). Default 0.

    Returns:
        The schedule, for the `schedule` argument of an optimizer.

    Raises:
        ValueError: A number is out of range, or `total_steps` is not greater than `warmup_steps`.
    """
    return LRSchedule(kind="cosine", warmup_steps=warmup_steps, total_steps=total_steps, final_ratio=final_ratio)


class Optimizer(Record, frozen=True, kw_only=True):
    """An optimizer and its settings, as plain data. Make one with `SGD`, `Adam`, `AdamW`, `NAdam` or `Muon`.

    Args:
        name: `SGD`, `Adam`, `AdamW`, `NAdam` or `Muon`.
        lr: Learning rate.
        settings: Further arguments of the `torch.optim` class of that name; betas are `beta1` and `beta2`.
        schedule: Learning rate over steps. Default: constant.
        clip_norm: Largest norm of the whole model's gradient. Default None, no clipping.
        fallback: Muon only: the optimizer of parameters that are not matrices.
        fallback_names: Muon only: name patterns (`*head.weight`) of matrices that the fallback updates too.

    Raises:
        ValueError: A setting is unknown or out of range.
    """

    name: Literal["SGD", "Adam", "AdamW", "NAdam", "Muon"]
    lr: float
    settings: dict[str, Number] = msgspec.field(default_factory=dict)
    schedule: LRSchedule = CONSTANT
    clip_norm: float | None = None
    fallback: Optimizer | None = None
    fallback_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.name in _SETTINGS, f"name must be one of {', '.join(_SETTINGS)}, got {self.name!r}")
        require(math.isfinite(self.lr) and self.lr >= 0, f"lr must be a finite number >= 0, got {self.lr}")
        _check_settings(self.name, self.settings)
        if self.clip_norm is not None:
            valid = math.isfinite(self.clip_norm) and self.clip_norm > 0
            require(valid, f"clip_norm must be > 0 or None, got {self.clip_norm}")
        require(
            (self.fallback is not None) == (self.name == "Muon"),
            f"Muon needs a fallback, and only Muon has one; the optimizer is {self.name}",
        )
        if self.fallback is not None:
            require(self.fallback.name != "Muon", "fallback must be SGD, Adam, AdamW or NAdam, got Muon")
            require(
                self.fallback.schedule == CONSTANT and self.fallback.clip_norm is None,
                "fallback must not have a schedule or clip_norm: set them on Muon, they apply to the fallback too",
            )
        require(
            not self.fallback_names or self.name == "Muon",
            f"only Muon has fallback_names; the optimizer is {self.name}",
        )


def _check_settings(name: str, settings: Mapping[str, Number]) -> None:
    known = _SETTINGS[name]
    for key, value in settings.items():
        require(key in known, f"{name} has no setting {key!r}; its settings are {', '.join(known)}")
        if known[key] is bool:
            require(isinstance(value, bool), f"{key} must be True or False, got {value!r}")
            continue
        require(
            not isinstance(value, bool) and isinstance(value, int | float), f"{key} must be a number, got {value!r}"
        )
        require(math.isfinite(value) and value >= 0, f"{key} must be a finite number >= 0, got {value}")
        require(key not in _BELOW_ONE or value < 1, f"{key} must be < 1, got {value}")
    if name == "SGD" and settings.get("nesterov"):
        require(
            settings.get("momentum", 0) > 0 and settings.get("dampening", 0) == 0,
            "nesterov requires momentum > 0 and dampening = 0",
        )
    if "ns_steps" in settings:
        steps = settings["ns_steps"]
        require(
            steps == int(steps) and 1 <= steps <= _MAX_NS_STEPS, f"ns_steps must be 1 to {_MAX_NS_STEPS}, got {steps}"
        )


def SGD(  # noqa: N802  (named as torch names it)
    lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
    schedule: LRSchedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """Stochastic gradient descent. State: 4 bytes per parameter with momentum, 0 without.

    Args:
        lr: Learning rate.
        momentum: Momentum factor in [0, 1). Default 0.
        weight_decay: L2 penalty added to the gradient. Default 0.
        nesterov: Whether to use Nesterov momentum; requires `momentum`. Default False.
        schedule: Learning rate over steps, from `ravnest.lr`. Default: constant.
        clip_norm: Largest norm of the whole model's gradient; larger ones are scaled down. Default None, no clipping.

    Returns:
        The optimizer, for `Job(optimizer=...)`.

    Raises:
        ValueError: A number is out of range.
    """
    settings: dict[str, Number] = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    return Optimizer(name="SGD", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm)


def Adam(  # noqa: N802
    lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    schedule: LRSchedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """Adam. State: 8 bytes per parameter.

    Args:
        lr: Learning rate. Default 1e-3.
        betas: Decay rates of the first and second moment per step, each in [0, 1). Default (0.9, 0.999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: L2 penalty added to the gradient. Default 0.
        schedule: Learning rate over steps, from `ravnest.lr`. Default: constant.
        clip_norm: Largest norm of the whole model's gradient; larger ones are scaled down. Default None, no clipping.

    Returns:
        The optimizer, for `Job(optimizer=...)`.

    Raises:
        ValueError: A number is out of range.
    """
    settings = _adam(betas, eps, weight_decay)
    return Optimizer(name="Adam", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm)


def AdamW(  # noqa: N802
    lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
    schedule: LRSchedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """Adam with decoupled weight decay, the usual choice. State: 8 bytes per parameter.

    Args:
        lr: Learning rate. Default 1e-3.
        betas: Decay rates of the first and second moment per step, each in [0, 1). Default (0.9, 0.999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Decoupled weight decay. Default 0.01.
        schedule: Learning rate over steps, from `ravnest.lr`. Default: constant.
        clip_norm: Largest norm of the whole model's gradient; larger ones are scaled down. Default None, no clipping.

    Returns:
        The optimizer, for `Job(optimizer=...)`.

    Raises:
        ValueError: A number is out of range.
    """
    settings = _adam(betas, eps, weight_decay)
    return Optimizer(name="AdamW", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm)


def NAdam(  # noqa: N802
    lr: float = 2e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    momentum_decay: float = 4e-3, schedule: LRSchedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """Adam with Nesterov momentum and decoupled weight decay. State: 8 bytes per parameter.

    With `betas=(0.99, 0.999)` it tolerates long delays better than Adam.

    Args:
        lr: Learning rate. Default 2e-3.
        betas: Decay rates of the first and second moment per step, each in [0, 1). Default (0.9, 0.999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Decoupled weight decay. Default 0.
        momentum_decay: Decay of the momentum over steps. Default 4e-3.
        schedule: Learning rate over steps, from `ravnest.lr`. Default: constant.
        clip_norm: Largest norm of the whole model's gradient; larger ones are scaled down. Default None, no clipping.

    Returns:
        The optimizer, for `Job(optimizer=...)`.

    Raises:
        ValueError: A number is out of range.
    """
    settings = {**_adam(betas, eps, weight_decay), "momentum_decay": momentum_decay, "decoupled_weight_decay": True}
    return Optimizer(name="NAdam", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm)


def Muon(  # noqa: N802
    lr: float = 1e-3, *, momentum: float = 0.95, weight_decay: float = 0.1, match_rms: bool = True,
    fallback: Optimizer | None = None, fallback_names: Iterable[str] = ("*head.weight",),
    schedule: LRSchedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """Muon: orthogonalized momentum for the matrices inside a model. State: 4 bytes per matrix element.

    `fallback` updates vectors, convolutions, embeddings and the matrices that `fallback_names` matches.

    Args:
        lr: Learning rate. Default 1e-3, which suits `match_rms`; without it about 0.02 is usual.
        momentum: Momentum factor in [0, 1). Default 0.95.
        weight_decay: Decoupled weight decay. Default 0.1.
        match_rms: Whether to scale updates to the size of AdamW's, so that one learning rate suits both. Default True.
        fallback: Optimizer of all other parameters. Default: AdamW with the same `lr` and `weight_decay`; required
            if `match_rms` is False.
        fallback_names: Name patterns of matrices that the fallback updates too. Default `("*head.weight",)`.
        schedule: Learning rate over steps, from `ravnest.lr`. Default: constant.
        clip_norm: Largest norm of the whole model's gradient; larger ones are scaled down. Default None, no clipping.

    Returns:
        The optimizer, for `Job(optimizer=...)`.

    Raises:
        ValueError: A number is out of range.
    """
    if fallback is None:
        require(match_rms, "match_rms=False requires a fallback: Muon's learning rate does not suit another optimizer")
        fallback = AdamW(lr, weight_decay=weight_decay)
    settings: dict[str, Number] = {"momentum": momentum, "weight_decay": weight_decay, "match_rms": match_rms}
    return Optimizer(
        name="Muon", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm,
        fallback=fallback, fallback_names=tuple(fallback_names),
    )  # fmt: skip


def _adam(betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Number]:
    return {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}


def state_bytes_per_parameter(optimizer: Optimizer, *, matrix: bool = True, packed: bool = False) -> float:
    """Bytes of optimizer state per float32 parameter. `matrix` matters for Muon, whose fallback updates the rest."""
    if optimizer.fallback is not None and not matrix:
        return state_bytes_per_parameter(optimizer.fallback, packed=packed)
    return (PACKED_BYTES if packed else 4) * sum(not is_counter(key) for key in state_keys(optimizer))


def embeddings(stage: Stage) -> frozenset[str]:
    """Names of the stage's embedding tables: matrices that Muon must not update."""
    looked_up = {op.args[0] for op in stage.ops if op.op.startswith("aten.embedding")}
    return frozenset(s.target for s in stage.parameters if f"%{s.name}" in looked_up)


class Stepper:
    """Applies gradients to parameters, and keeps the optimizer state by parameter name.

    `fallback_names` are further parameters (`embeddings(stage)`) that Muon must not update. `fused` uses torch's
    fused kernels where they exist: several times faster, with different rounding.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        fallback_names: Collection[str] = (),
        *,
        fused: bool = False,
    ) -> None:
        self.optimizer = optimizer
        # .data, not .detach(): a slot must not share the version counter of the caller's tensor
        self._slots = {name: nn.Parameter(tensor.data) for name, tensor in parameters.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self._optimizers: dict[str, Optimizer] = {
            name: optimizer_of(optimizer, name, slot.ndim, fallback_names) for name, slot in self._slots.items()
        }
        self._torch = [
            (part, torch_optimizer(part, slots, fused=fused))
            for part in (optimizer, optimizer.fallback)
            if part is not None and (slots := [s for n, s in self._slots.items() if self._optimizers[n] is part])
        ]
        self._owner = {n: t for n, part in self._optimizers.items() for other, t in self._torch if other is part}
        self._release()

    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], step: int,
        *, lr_factor: float = 1.0, norm: Tensor | float | None = None,
    ) -> None:  # fmt: skip
        """Apply update number `step` to `parameters` in place. A parameter without a gradient does not change.

        Clipping scales the gradients in place, by the norm of these gradients, or by `norm`, that of the whole model.
        No tensor is copied or kept.
        """
        if self.optimizer.clip_norm is not None and gradients:
            grads = [gradients[name] for name in self._slots if name in gradients]
            total = torch.nn.utils.get_total_norm(grads) if norm is None else torch.as_tensor(norm)
            for gradient in grads:
                gradient.mul_(torch.clamp(self.optimizer.clip_norm / (total + 1e-6), max=1.0))
        for name, slot in self._slots.items():
            slot.data = parameters[name].detach()
            slot.grad = gradients.get(name)
        ratio = self.optimizer.schedule.ratio(step) * lr_factor
        try:
            for part, own in self._torch:
                for group in own.param_groups:
                    group["lr"] = part.lr * ratio
                own.step()
        finally:
            self._release()

    def state_dict(self) -> dict[str, Tensor]:
        """The state as tensors named `parameter/key`: no copies, later steps change them."""
        return {
            f"{name}/{key}": tensor
            for name, slot in self._slots.items()
            for key, tensor in sorted(self._owner[name].state.get(slot, {}).items())
            if isinstance(tensor, Tensor)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Use the tensors of a `state_dict`, without a copy. A parameter without state starts from zero."""
        loaded = {name: unpack_state(entries) for name, entries in state_by_parameter(state, self._slots).items()}
        for name, entries in loaded.items():
            self._check_state(name, entries)
        for name, slot in self._slots.items():
            self._owner[name].state.pop(slot, None)
            if name in loaded:
                self._owner[name].state[slot] = {key: tensor.detach() for key, tensor in loaded[name].items()}

    def _check_state(self, name: str, entries: Mapping[str, Tensor]) -> None:
        check_keys(name, self._optimizers[name], entries)
        for key, tensor in entries.items():
            shape, dtype = ((), torch.float32) if is_counter(key) else (self._shapes[name], self._slots[name].dtype)
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
                raise WeightsError(
                    f"{name}/{key} must be {dtype} of shape {list(shape)}, got {tensor.dtype} of {list(tensor.shape)}"
                )

    def _release(self) -> None:
        """Drop the references to the caller's tensors."""
        for slot in self._slots.values():
            slot.data = slot.data.new_empty(0)
            slot.grad = None


def state_by_parameter(state: Mapping[str, Tensor], names: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a `state_dict` by parameter and key. Raises `WeightsError` for a parameter not in `names`."""
    result: dict[str, dict[str, Tensor]] = {}
    for entry, tensor in state.items():
        name, _, key = entry.rpartition("/")
        if name not in names:
            raise WeightsError(f"optimizer state {entry!r} belongs to no parameter of this stage")
        result.setdefault(name, {})[key] = tensor
    return result


def check_keys(name: str, optimizer: Optimizer, entries: Collection[str]) -> None:
    """Reject the state of another optimizer."""
    keys = state_keys(optimizer)
    if set(entries) != set(keys):
        raise WeightsError(f"optimizer state of {name} must have {', '.join(keys)}, got {', '.join(sorted(entries))}")


def optimizer_of(optimizer: Optimizer, name: str, ndim: int, fallback_names: Collection[str]) -> Optimizer:
    """The optimizer of a parameter: itself, or for Muon its fallback."""
    if optimizer.fallback is None:
        return optimizer
    is_excluded = name in fallback_names or any(fnmatchcase(name, p) for p in optimizer.fallback_names)
    return optimizer.fallback if ndim != 2 or is_excluded else optimizer


def torch_optimizer(optimizer: Optimizer, slots: list[nn.Parameter], *, fused: bool) -> torch.optim.Optimizer:
    """The `torch.optim` object that updates these parameters."""
    settings: dict[str, Any] = {k: _SETTINGS[optimizer.name][k](v) for k, v in optimizer.settings.items()}
    if "beta1" in settings or "beta2" in settings:
        settings["betas"] = (settings.pop("beta1", 0.9), settings.pop("beta2", 0.999))
    if settings.pop("match_rms", False):
        settings["adjust_lr_fn"] = "match_rms_adamw"
    if fused and optimizer.name in ("Adam", "AdamW"):
        settings["fused"] = True
    return _CLASSES[optimizer.name](slots, lr=optimizer.lr, **settings)  # type: ignore[call-arg]


def state_keys(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of the state that `torch.optim` keeps for a parameter."""
    match optimizer.name:
        case "SGD":
            return ("momentum_buffer",) if optimizer.settings.get("momentum") else ()
        case "Muon":
            return ("momentum_buffer",)
        case "NAdam":
            return ("step", "mu_product", "exp_avg", "exp_avg_sq")
    return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if optimizer.settings.get("amsgrad") else ()))


def is_counter(key: str) -> bool:
    """Whether a state is one number per parameter, not one per element."""
    return key in ("step", "mu_product")
