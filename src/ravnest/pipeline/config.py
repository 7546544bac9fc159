"""Configuration of a stage: its training settings, and the tied parameters that it shares with other stages.

All of it is plain data that is sent to every worker. The owner of a tied parameter *lends* each version of it to the
stages that use it; these *borrow* it and return its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from ravnest.core.config import require
from ravnest.core.schedule import StageSchedule
from ravnest.graph import Stage, StateSpec
from ravnest.pipeline.optimizers import Optimizer
from ravnest.pipeline.staleness import Correction
from ravnest.protocol.commands import EndAfter, SaveState, StopStage

__all__ = ["MEMORY_MODES", "StageRole", "TrainerConfig", "memory_mode", "roles", "StageConfig"]

MEMORY_MODES = ("compact", "small", "exact")


def memory_mode(chosen: str, dtypes: Iterable[torch.dtype], delay: int) -> str:
    """The memory mode of a stage with parameters of these types, whose gradients are `delay` updates late.

    `exact`: weights, gradients and optimizer state as `torch.optim` has them, and float32 master weights.
    `compact`: packed optimizer state and correction. Without a delay it is `exact`: the results of plain PyTorch.
    `small`: packed optimizer state, bfloat16 gradients, recomputed activations.
    Parameters that are not float32 are trained in mode `exact`.
    """
    if any(dtype != torch.float32 for dtype in dtypes):
        return "exact"
    return "exact" if chosen == "compact" and delay == 0 else chosen


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Training settings of all stages of a job.

    `compression` applies to activations and their gradients on links, `autocast` to arithmetic, `memory` to weights,
    gradients and optimizer state (`memory_mode`).
    """

    optimizer: Optimizer
    correction: Correction
    seed: int = 0
    recompute: bool = False
    memory: str = "compact"
    autocast: str = "none"
    compression: str = "none"
    device: str = "cpu"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.memory not in MEMORY_MODES:
            raise ValueError(f"memory must be one of {', '.join(MEMORY_MODES)}, got {self.memory!r}")
        if self.autocast not in ("none", "bf16", "fp16"):
            raise ValueError(f"autocast must be none, bf16 or fp16, got {self.autocast!r}")
        if self.compression not in ("none", "bf16", "int8"):
            raise ValueError(f"compression must be none, bf16 or int8, got {self.compression!r}")


@dataclass(frozen=True)
class StageRole:
    """The delays of all stages, and the tied parameters that this one lends."""

    delays: tuple[int, ...]
    lends: tuple[str, ...] = ()  # own parameters that later stages borrow
    until: int = -1  # the last stage that borrows them
    borrowers: frozenset[int] = frozenset()
    tied: tuple[StateSpec, ...] = ()  # every tied parameter of the model: any of them may pass through this stage


def roles(stages: Sequence[Stage], delays: Sequence[int]) -> list[StageRole]:
    """The role of each stage: which parameters it lends to which stages."""
    result = []
    borrowed = {b.target for stage in stages for b in stage.borrowed}
    tied = tuple(s for stage in stages for s in stage.parameters if s.owner == stage.index and s.target in borrowed)
    for stage in stages:
        borrowers = [s.index for s in stages if any(b.owner == stage.index for b in s.borrowed)]
        lends = tuple(
            s.target
            for s in stage.parameters
            if s.owner == stage.index and any(b.target == s.target for i in borrowers for b in stages[i].borrowed)
        )
        result.append(StageRole(tuple(delays), lends, max(borrowers, default=-1), frozenset(borrowers), tied))
    return result


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """Configures a worker for a stage. The stage's file follows as a buffer.

    `weights` is the path of its initial weights; without one they are drawn from the seed. Training starts after
    `first_update` updates, with the weights and optimizer state in the files `state`; a tensor that is in none of them
    starts from its initial value.
    """

    settings: TrainerConfig
    rule: StageSchedule
    role: StageRole
    max_batch: int
    threads: int
    core: int = -1  # CPU core to run on, where the system supports pinning; -1 for any
    weights: str = ""
    first_update: int = 0
    state: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.first_update >= 0, f"first_update must be >= 0, got {self.first_update}")


Orders = StageConfig | EndAfter | SaveState | StopStage
