"""Optimizers as plain data: `AdamW(lr=3e-4, schedule=cosine(1000, warmup_steps=50), clip_norm=1.0)`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from ravnest.core.config import Record, require
from ravnest.pipeline.optimizers.schedule import CONSTANT, LRSchedule

__all__ = ["SETTINGS", "Optimizer", "SGD", "Adam", "AdamW", "NAdam", "Muon", "SOAP", "LAMB"]

Number = bool | float

_ADAM = {"beta1": float, "beta2": float, "eps": float, "weight_decay": float}
SETTINGS: dict[str, dict[str, type]] = {
    "SGD": {"momentum": float, "dampening": float, "weight_decay": float, "nesterov": bool},
    "Adam": {**_ADAM, "amsgrad": bool},
    "AdamW": {**_ADAM, "amsgrad": bool},
    "NAdam": {**_ADAM, "momentum_decay": float, "decoupled_weight_decay": bool},
    "Muon": {
        "momentum": float, "nesterov": bool, "weight_decay": float, "eps": float, "ns_steps": int, "match_rms": bool,
    },
    "SOAP": {**_ADAM, "basis_every": int, "max_dim": int},
    "LAMB": {**_ADAM},
}  # fmt: skip
_BELOW_ONE = ("beta1", "beta2", "momentum", "dampening")
_COUNTS = {"ns_steps": 20, "basis_every": 10_000, "max_dim": 100_000}  # whole numbers from 1, and the largest
_FOR_MATRICES = ("Muon", "SOAP")
_FALLBACKS = ("SGD", "Adam", "AdamW", "NAdam")


class Optimizer(Record, frozen=True, kw_only=True):
    """An optimizer and its settings, as plain data. Make one with the function of its name.

    Args:
        name: `SGD`, `Adam`, `AdamW`, `NAdam`, `Muon`, `SOAP` or `LAMB`.
        lr: Learning rate.
        settings: Further arguments of the class of that name; betas are `beta1` and `beta2`.
        schedule: Learning rate over steps. Default: constant.
        clip_norm: Largest norm of the whole model's gradient. Default None, no clipping.
        fallback: Muon and SOAP only: the optimizer of parameters that are not matrices.
        fallback_names: Muon and SOAP only: name patterns (`*head.weight`) of matrices that the fallback updates too.

    Raises:
        ValueError: A setting is unknown or out of range.
    """

    name: Literal["SGD", "Adam", "AdamW", "NAdam", "Muon", "SOAP", "LAMB"]
    lr: float
    settings: dict[str, Number] = msgspec.field(default_factory=dict)
    schedule: LRSchedule = CONSTANT
    clip_norm: float | None = None
    fallback: Optimizer | None = None
    fallback_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.name in SETTINGS, f"name must be one of {', '.join(SETTINGS)}, got {self.name!r}")
        require(math.isfinite(self.lr) and self.lr >= 0, f"lr must be a finite number >= 0, got {self.lr}")
        _check_settings(self.name, self.settings)
        if self.clip_norm is not None:
            valid = math.isfinite(self.clip_norm) and self.clip_norm > 0
            require(valid, f"clip_norm must be > 0 or None, got {self.clip_norm}")
        require(
            (self.fallback is not None) == (self.name in _FOR_MATRICES),
            f"Muon and SOAP need a fallback, and only they have one; the optimizer is {self.name}",
        )
        if self.fallback is not None:
            require(
                self.fallback.name in _FALLBACKS,
                f"fallback must be one of {', '.join(_FALLBACKS)}, got {self.fallback.name}",
            )
            require(
                self.fallback.schedule == CONSTANT and self.fallback.clip_norm is None,
                "fallback must not have a schedule or clip_norm: "
                f"set them on {self.name}, they apply to the fallback too",
            )
        require(
            not self.fallback_names or self.name in _FOR_MATRICES,
            f"only Muon and SOAP have fallback_names; the optimizer is {self.name}",
        )


def _check_settings(name: str, settings: Mapping[str, Number]) -> None:
    known = SETTINGS[name]
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
    for key, largest in _COUNTS.items():
        if key in settings:
            count = settings[key]
            require(count == int(count) and 1 <= count <= largest, f"{key} must be 1 to {largest}, got {count}")


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


def SOAP(  # noqa: N802
    lr: float = 3e-3, *, betas: tuple[float, float] = (0.95, 0.95), eps: float = 1e-8, weight_decay: float = 0.01,
    basis_every: int = 10, max_dim: int = 2048, fallback: Optimizer | None = None,
    fallback_names: Iterable[str] = ("*head.weight",), schedule: LRSchedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """SOAP: Adam in the eigenbasis of the gradients' covariance, for the matrices inside a model.

    `fallback` updates vectors, convolutions, embeddings and the matrices that `fallback_names` matches. State of an
    m x n matrix: 8 m n bytes, and 8 m^2 and 8 n^2 for the sides that are rotated. A side is not rotated if it is
    longer than `max_dim`, or than four times the other. The first update only computes the bases.

    Args:
        lr: Learning rate. Default 3e-3.
        betas: Decay rates of the first moment, and of the second moment and the covariances, per step, each in
            [0, 1). Default (0.95, 0.95).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Decoupled weight decay. Default 0.01.
        basis_every: Steps between two updates of the bases. Default 10.
        max_dim: Longest side that is rotated. Default 2048.
        fallback: Optimizer of all other parameters. Default: AdamW with the same `lr`, `betas` and `weight_decay`.
        fallback_names: Name patterns of matrices that the fallback updates too. Default `("*head.weight",)`.
        schedule: Learning rate over steps, from `ravnest.lr`. Default: constant.
        clip_norm: Largest norm of the whole model's gradient; larger ones are scaled down. Default None, no clipping.

    Returns:
        The optimizer, for `Job(optimizer=...)`.

    Raises:
        ValueError: A number is out of range.
    """
    settings = {**_adam(betas, eps, weight_decay), "basis_every": basis_every, "max_dim": max_dim}
    return Optimizer(
        name="SOAP", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm,
        fallback=fallback or AdamW(lr, betas=betas, weight_decay=weight_decay), fallback_names=tuple(fallback_names),
    )  # fmt: skip


def LAMB(  # noqa: N802
    lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
    schedule: LRSchedule = CONSTANT, clip_norm: float | None = None,
) -> Optimizer:  # fmt: skip
    """LAMB: Adam whose update of each parameter is as long as a fixed share of the parameter, for large batches.

    Vectors (biases, norms) are updated as by Adam, without weight decay. State: 8 bytes per parameter.

    Args:
        lr: Learning rate: the length of an update as a share of the parameter's. Default 1e-3.
        betas: Decay rates of the first and second moment per step, each in [0, 1). Default (0.9, 0.999).
        eps: Added to the denominator. Default 1e-6.
        weight_decay: Decoupled weight decay, part of the update whose length is set. Default 0.01.
        schedule: Learning rate over steps, from `ravnest.lr`. Default: constant.
        clip_norm: Largest norm of the whole model's gradient; larger ones are scaled down. Default None, no clipping.

    Returns:
        The optimizer, for `Job(optimizer=...)`.

    Raises:
        ValueError: A number is out of range.
    """
    settings = _adam(betas, eps, weight_decay)
    return Optimizer(name="LAMB", lr=lr, settings=settings, schedule=schedule, clip_norm=clip_norm)


def _adam(betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Number]:
    return {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
