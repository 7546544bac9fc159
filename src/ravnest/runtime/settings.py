"""How a job is trained, as plain data that travels to every worker."""

from __future__ import annotations

import msgspec

from .corrections import Correction
from .optimizers import Optimizer

__all__ = ["Settings"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`compression` is of activations and their gradients on links, `autocast` of arithmetic."""

    optimizer: Optimizer
    correction: Correction
    seed: int = 0
    recompute: bool = False
    autocast: str = "none"
    compression: str = "none"
    device: str = "cpu"
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        if self.autocast not in ("none", "bf16"):
            raise ValueError(f"autocast is none or bf16, not {self.autocast!r}")
        if self.compression not in ("none", "bf16", "int8"):
            raise ValueError(f"compression is none, bf16 or int8, not {self.compression!r}")
