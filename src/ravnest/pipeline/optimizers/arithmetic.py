"""The `torch.optim` object of an optimizer, which parameters it updates, and names and shapes of its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ravnest.errors import WeightsError
from ravnest.graph import Stage
from ravnest.pipeline.optimizers.lamb import LayerwiseAdam
from ravnest.pipeline.optimizers.settings import SETTINGS, Optimizer
from ravnest.pipeline.optimizers.soap import MAX_DIM, RotatedAdam, rotated_sides
from ravnest.pipeline.packing import PACKED_BYTES

__all__ = [
    "check_keys",
    "embeddings",
    "is_counter",
    "is_elementwise",
    "most_basis_bytes",
    "on_device",
    "optimizer_of",
    "state_by_parameter",
    "state_bytes_per_parameter",
    "state_keys",
    "state_shape",
    "torch_optimizer",
]

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "Muon": torch.optim.Muon,
    "SOAP": RotatedAdam,
    "LAMB": LayerwiseAdam,
}


def state_bytes_per_parameter(optimizer: Optimizer, *, matrix: bool = True, packed: bool = False) -> float:
    """Bytes of optimizer state of the parameter's own shape, per float32 parameter.

    `matrix` matters for Muon and SOAP, whose fallback updates the rest.
    """
    if optimizer.fallback is not None and not matrix:
        return state_bytes_per_parameter(optimizer.fallback, packed=packed)
    own = [key for key in state_keys(optimizer) if not is_counter(key)]
    return (PACKED_BYTES if packed else 4) * len(own)


def most_basis_bytes(optimizer: Optimizer, shapes: Mapping[str, Sequence[int]]) -> float:
    """The most bytes of covariances and bases per element that a parameter has; they are float32 in every mode."""
    if optimizer.name != "SOAP":
        return 0.0
    sizes = [0.0]
    for name, shape in shapes.items():
        if optimizer_of(optimizer, name, len(shape), ()) is optimizer:
            keys = [key for key in state_keys(optimizer, shape) if key.partition("_")[0] in ("left", "right")]
            sizes.append(4 * sum(prod(state_shape(key, shape)) for key in keys) / max(1, prod(shape)))
    return max(sizes)


def embeddings(stage: Stage) -> frozenset[str]:
    """Names of the stage's embedding tables: matrices that Muon and SOAP must not update."""
    looked_up = {op.args[0] for op in stage.ops if op.op.startswith("aten.embedding")}
    return frozenset(s.target for s in stage.parameters if f"%{s.name}" in looked_up)


def state_by_parameter(state: Mapping[str, Tensor], names: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a `state_dict` by parameter and key. Raises `WeightsError` for a parameter not in `names`."""
    result: dict[str, dict[str, Tensor]] = {}
    for entry, tensor in state.items():
        name, _, key = entry.rpartition("/")
        if name not in names:
            raise WeightsError(f"optimizer state {entry!r} belongs to no parameter of this stage")
        result.setdefault(name, {})[key] = tensor
    return result


def on_device(
    entries: Mapping[str, Tensor], device: torch.device, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """The optimizer state of a parameter on its device; torch keeps counters on the CPU unless it is fused."""
    is_fused = bool(optimizer.defaults.get("fused"))
    return {key: t if is_counter(key) and not is_fused else t.to(device) for key, t in entries.items()}


def check_keys(name: str, optimizer: Optimizer, shape: Sequence[int], entries: Collection[str]) -> None:
    """Reject the state of another optimizer."""
    keys = state_keys(optimizer, shape)
    if set(entries) != set(keys):
        raise WeightsError(f"optimizer state of {name} must have {', '.join(keys)}, got {', '.join(sorted(entries))}")


def optimizer_of(optimizer: Optimizer, name: str, ndim: int, fallback_names: Collection[str]) -> Optimizer:
    """The optimizer of a parameter: itself, or its fallback."""
    if optimizer.fallback is None:
        return optimizer
    is_excluded = name in fallback_names or any(fnmatchcase(name, p) for p in optimizer.fallback_names)
    return optimizer.fallback if ndim != 2 or is_excluded else optimizer


def torch_optimizer(optimizer: Optimizer, slots: list[nn.Parameter], *, fused: bool) -> torch.optim.Optimizer:
    """The `torch.optim` object that updates these parameters."""
    settings: dict[str, Any] = {k: SETTINGS[optimizer.name][k](v) for k, v in optimizer.settings.items()}
    if "beta1" in settings or "beta2" in settings:
        settings["betas"] = (settings.pop("beta1", 0.9), settings.pop("beta2", 0.999))
    if settings.pop("match_rms", False):
        settings["adjust_lr_fn"] = "match_rms_adamw"
    if fused and optimizer.name in ("Adam", "AdamW"):
        settings["fused"] = True
    return _CLASSES[optimizer.name](slots, lr=optimizer.lr, **settings)  # type: ignore[call-arg]


def state_keys(optimizer: Optimizer, shape: Sequence[int] = ()) -> tuple[str, ...]:
    """Names of the state that is kept for a parameter of this shape."""
    match optimizer.name:
        case "SGD":
            return ("momentum_buffer",) if optimizer.settings.get("momentum") else ()
        case "Muon":
            return ("momentum_buffer",)
        case "NAdam":
            return ("step", "mu_product", "exp_avg", "exp_avg_sq")
        case "SOAP":
            sides = rotated_sides(shape, int(optimizer.settings.get("max_dim", MAX_DIM))) if len(shape) == 2 else {}
            return ("step", "exp_avg", "exp_avg_sq", *(key for side in sides for key in (side, f"{side}_basis")))
    return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if optimizer.settings.get("amsgrad") else ()))


def state_shape(key: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a state of a parameter: its own, of one number, or of a covariance or basis of one of its sides."""
    if is_counter(key):
        return ()
    side = key.removesuffix("_basis")
    if side in ("left", "right") and len(shape) == 2:
        return (shape[side == "right"],) * 2
    return tuple(shape)


def is_counter(key: str) -> bool:
    """Whether a state is one number per parameter, not one per element."""
    return key in ("step", "mu_product")


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether each element is updated by itself, so that a parameter can be updated a part at a time."""
    return optimizer.name not in ("Muon", "SOAP", "LAMB")
