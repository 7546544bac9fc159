"""An optimizer as data that travels, and the stepper that a stage makes of it.

    settings:  AdamW(lr=3e-4, schedule=cosine(1000, warmup_steps=50), clip_norm=1.0)
    rate:      lr(step) = lr * ratio(step), a pure function
    update:    W <- torch.optim.X(W, g, lr(step)), in place, on whatever tensors the caller hands in

The arithmetic is that of `torch.optim`, bit for bit; nothing here computes an update itself. Weights are double-
buffered, so a stepper owns its state (moments, counters) but no weights: each step names the tensors to be changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from ravnest.core.config import require
from ravnest.core.errors import WeightsError
from ravnest.graph import Stage

__all__ = [
    "Optimizer", "SGD", "Adam", "AdamW", "NAdam", "Muon",
    "Schedule", "constant", "cosine", "linear", "learning_rate",
    "Stepper", "build", "embeddings", "state_bytes_per_parameter",
]  # fmt: skip

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


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A strict record: immutable, no unknown fields."""


class Schedule(_Data, frozen=True):
    """The learning rate over time: a linear warm-up, then `kind` down to `final_ratio` at `total_steps`."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    final_ratio: float = 0.0

    def __post_init__(self) -> None:
        require(self.kind in ("constant", "linear", "cosine"), "a schedule is constant, linear or cosine")
        require(self.warmup_steps >= 0, "warmup_steps must be 0 or more")
        require(0 <= self.final_ratio <= 1, "final_ratio must be between 0 and 1")
        if self.kind == "constant":
            require(self.total_steps == 0, "a constant schedule has no total_steps")
        else:
            require(self.total_steps > self.warmup_steps, "total_steps must be more than warmup_steps")

    def ratio(self, step: int) -> float:
        """What the learning rate is multiplied with for update number `step` (from 0)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.final_ratio + (1.0 - self.final_ratio) * left


CONSTANT = Schedule()


def constant(*, warmup_steps: int = 0) -> Schedule:
    """The same learning rate throughout, after a linear warm-up."""
    return Schedule(warmup_steps=warmup_steps)


def linear(total_steps: int, *, warmup_steps: int = 0, final_ratio: float = 0.0) -> Schedule:
    """Warm up, then fall in a straight line."""
    return Schedule(kind="linear", warmup_steps=warmup_steps, total_steps=total_steps, final_ratio=final_ratio)


def cosine(total_steps: int, *, warmup_steps: int = 0, final_ratio: float = 0.0) -> Schedule:
    """Warm up, then fall along half a cosine."""
    return Schedule(kind="cosine", warmup_steps=warmup_steps, total_steps=total_steps, final_ratio=final_ratio)


class Optimizer(_Data, frozen=True):
    """Which optimizer, with what settings. Plain data: make one with `AdamW(...)`, `SGD(...)`, and so on.

    `fallback` and `fallback_names` are Muon's: what steps the parameters that are not matrices, and patterns of
    names (`*head.weight`) of matrices that it shall step too.
    """

    name: Literal["SGD", "Adam", "AdamW", "NAdam", "Muon"]
    lr: float
    settings: dict[str, Number] = {}
    schedule: Schedule = CONSTANT
    clip_norm: float | None = None
    fallback: Optimizer | None = None
    fallback_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.name in _SETTINGS, f"no optimizer {self.name!r}: choose one of {', '.join(_SETTINGS)}")
        require(math.isfinite(self.lr) and self.lr >= 0, f"lr must be a finite number of 0 or more, not {self.lr}")
        _check_settings(self.name, self.settings)
        if self.clip_norm is not None:
            require(math.isfinite(self.clip_norm) and self.clip_norm > 0, "clip_norm must be more than 0, or None")
        require((self.fallback is not None) == (self.name == "Muon"), "Muon needs a fallback, and only Muon has one")
        if self.fallback is not None:
            require(self.fallback.name != "Muon", "the fallback must step any tensor: SGD, Adam, AdamW or NAdam")
            require(
                self.fallback.schedule == CONSTANT and self.fallback.clip_norm is None,
                "schedule and clip_norm belong to Muon and hold for its fallback too",
            )
        require(not self.fallback_names or self.name == "Muon", "only Muon has fallback_names")


def _check_settings(name: str, settings: Mapping[str, Number]) -> None:
    known = _SETTINGS[name]
    for key, value in settings.items():
        require(key in known, f"{name} has no setting {key!r}: it has {', '.join(known)}")
        if known[key] is bool:
            require(isinstance(value, bool), f"{key} must be True or False, not {value!r}")
            continue
        require(not isinstance(value, bool) and isinstance(value, int | float), f"{key} must be a number")
        require(math.isfinite(value) and value >= 0, f"{key} must be a finite number of 0 or more, not {value}")
        require(key not in _BELOW_ONE or value < 1, f"{key} must be less than 1, not {value}")
    if name == "SGD" and settings.get("nesterov"):
        require(
            settings.get("momentum", 0) > 0 and settings.get("dampening", 0) == 0,
            "nesterov needs a momentum and no dampening",
        )
    if "ns_steps" in settings:
        steps = settings["ns_steps"]
        require(steps == int(steps) and 1 <= steps <= _MAX_NS_STEPS, f"ns_steps must be 1 to {_MAX_NS_STEPS}")


def SGD(  # noqa: N802  (named as torch names it)
    lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
    schedule: Schedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """Stochastic gradient descent; with momentum it keeps 4 bytes per parameter, else none."""
    settings: dict[str, Number] = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    return Optimizer(name="SGD", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm)


def Adam(  # noqa: N802
    lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    schedule: Schedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """Adam; its weight decay is added to the gradient. 8 bytes per parameter."""
    settings = _adam(betas, eps, weight_decay)
    return Optimizer(name="Adam", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm)


def AdamW(  # noqa: N802
    lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
    schedule: Schedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """Adam whose weight decay is apart from the gradient: the usual choice. 8 bytes per parameter."""
    settings = _adam(betas, eps, weight_decay)
    return Optimizer(name="AdamW", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm)


def NAdam(  # noqa: N802
    lr: float = 2e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    momentum_decay: float = 4e-3, schedule: Schedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """Adam with Nesterov's momentum; its weight decay is apart from the gradient, as AdamW's. 8 bytes per parameter.

    With `betas=(0.99, 0.999)` it tolerates long delays better than Adam.
    """
    settings = {**_adam(betas, eps, weight_decay), "momentum_decay": momentum_decay, "decoupled_weight_decay": True}
    return Optimizer(name="NAdam", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm)


def Muon(  # noqa: N802
    lr: float = 1e-3, *, momentum: float = 0.95, weight_decay: float = 0.1, match_rms: bool = True,
    fallback: Optimizer | None = None, fallback_names: Iterable[str] = ("*head.weight",),
    schedule: Schedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """Muon: momentum whose matrices are made orthogonal before each step. 4 bytes per element of a matrix.

    It is for the matrices inside a model. Vectors, convolutions, embeddings (see `embeddings`) and what
    `fallback_names` matches are stepped by `fallback`, if not given AdamW at the same learning rate: `match_rms`
    scales Muon's updates to the size of AdamW's, so that one learning rate suits both. Without `match_rms` the
    rate is Muon's own (about 0.02) and the fallback must be given.
    """
    if fallback is None:
        require(match_rms, "without match_rms, Muon's learning rate suits no other optimizer: give a fallback")
        fallback = AdamW(lr, weight_decay=weight_decay)
    settings: dict[str, Number] = {"momentum": momentum, "weight_decay": weight_decay, "match_rms": match_rms}
    return Optimizer(
        name="Muon", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm,
        fallback=fallback, fallback_names=tuple(fallback_names),
    )  # fmt: skip


def _adam(betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Number]:
    return {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """The learning rate of update number `step`, counted from 0."""
    return optimizer.lr * optimizer.schedule.ratio(step)


def state_bytes_per_parameter(optimizer: Optimizer, *, matrix: bool = True) -> int:
    """Bytes of state kept for each float32 parameter; `matrix` matters to Muon, whose fallback steps the rest."""
    if optimizer.fallback is not None and not matrix:
        return state_bytes_per_parameter(optimizer.fallback)
    return 4 * sum(not _is_counter(key) for key in _state_keys(optimizer))


def embeddings(stage: Stage) -> frozenset[str]:
    """Names of the parameters that the stage looks rows up in: matrices to store, not to multiply with."""
    looked_up = {op.args[0] for op in stage.ops if op.op.startswith("aten.embedding")}
    return frozenset(s.target for s in stage.parameters if f"%{s.name}" in looked_up)


def build(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], *, fallback_names: Collection[str] = (), fused: bool = False
) -> Stepper:
    """The stepper for these parameters. `fallback_names` are further names (`embeddings(stage)`) not for Muon.

    `fused` uses torch's fused kernels where it has them: several times faster, and rounded otherwise than its default.
    """
    return Stepper(optimizer, parameters, fallback_names, fused=fused)


class Stepper:
    """Applies gradients to parameters, and keeps the optimizer's state by the parameters' names."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        fallback_names: Collection[str] = (),
        *,
        fused: bool = False,
    ) -> None:
        self.optimizer = optimizer
        # .data, not .detach(): a slot that shared the caller's version counter would count our steps as writes to it
        self._slots = {name: nn.Parameter(tensor.data) for name, tensor in parameters.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self._of: dict[str, Optimizer] = {
            name: _who_steps(optimizer, name, slot, fallback_names) for name, slot in self._slots.items()
        }
        self._torch = [
            (part, _torch_optimizer(part, slots, fused=fused))
            for part in (optimizer, optimizer.fallback)
            if part is not None and (slots := [s for n, s in self._slots.items() if self._of[n] is part])
        ]
        self._owner = {n: t for n, part in self._of.items() for other, t in self._torch if other is part}
        self._release()

    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], step: int,
        *, lr_factor: float = 1.0, norm: Tensor | float | None = None,
    ) -> None:  # fmt: skip
        """Update number `step`: change `parameters` in place. One without a gradient stays as it is.

        `clip_norm` scales the gradients in place by their total norm: of these, or `norm` if the whole model's is
        known. No tensor is copied and none is kept.
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
            for part, stepping in self._torch:
                for group in stepping.param_groups:
                    group["lr"] = part.lr * ratio
                stepping.step()
        finally:
            self._release()

    def state_dict(self) -> dict[str, Tensor]:
        """The state as tensors named `parameter/key`: the tensors themselves, which later steps will change."""
        return {
            f"{name}/{key}": tensor
            for name, slot in self._slots.items()
            for key, tensor in sorted(self._owner[name].state.get(slot, {}).items())
            if isinstance(tensor, Tensor)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, itself or copied. A parameter without state starts afresh."""
        found: dict[str, dict[str, Tensor]] = {}
        for entry, tensor in state.items():
            name, _, key = entry.rpartition("/")
            if name not in self._slots:
                raise WeightsError(f"optimizer state {entry!r} is of no parameter here")
            found.setdefault(name, {})[key] = tensor
        for name, entries in found.items():
            self._check_state(name, entries)
        for name, slot in self._slots.items():
            self._owner[name].state.pop(slot, None)
            if name in found:
                self._owner[name].state[slot] = {key: tensor.detach() for key, tensor in found[name].items()}

    def _check_state(self, name: str, entries: Mapping[str, Tensor]) -> None:
        keys = _state_keys(self._of[name])
        if set(entries) != set(keys):
            raise WeightsError(f"the state of {name} must have {', '.join(keys)}; it has {', '.join(sorted(entries))}")
        for key, tensor in entries.items():
            shape, dtype = ((), torch.float32) if _is_counter(key) else (self._shapes[name], self._slots[name].dtype)
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
                raise WeightsError(
                    f"{name}/{key} must be {dtype} of shape {list(shape)}, not {tensor.dtype} of {list(tensor.shape)}"
                )

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    def _release(self) -> None:
        """Let go of the caller's tensors."""
        for slot in self._slots.values():
            slot.data = slot.data.new_empty(0)
            slot.grad = None


def _who_steps(optimizer: Optimizer, name: str, tensor: Tensor, fallback_names: Collection[str]) -> Optimizer:
    if optimizer.fallback is None:
        return optimizer
    kept = tensor.ndim != 2 or name in fallback_names
    return optimizer.fallback if kept or any(fnmatchcase(name, p) for p in optimizer.fallback_names) else optimizer


def _torch_optimizer(optimizer: Optimizer, slots: list[nn.Parameter], *, fused: bool) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {k: _SETTINGS[optimizer.name][k](v) for k, v in optimizer.settings.items()}
    if "beta1" in settings or "beta2" in settings:
        settings["betas"] = (settings.pop("beta1", 0.9), settings.pop("beta2", 0.999))
    if settings.pop("match_rms", False):
        settings["adjust_lr_fn"] = "match_rms_adamw"
    if fused and optimizer.name in ("Adam", "AdamW"):
        settings["fused"] = True
    return _CLASSES[optimizer.name](slots, lr=optimizer.lr, **settings)  # type: ignore[call-arg]


def _state_keys(optimizer: Optimizer) -> tuple[str, ...]:
    match optimizer.name:
        case "SGD":
            return ("momentum_buffer",) if optimizer.settings.get("momentum") else ()
        case "Muon":
            return ("momentum_buffer",)
        case "NAdam":
            return ("step", "mu_product", "exp_avg", "exp_avg_sq")
    return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if optimizer.settings.get("amsgrad") else ()))


def _is_counter(key: str) -> bool:
    return key in ("step", "mu_product")
