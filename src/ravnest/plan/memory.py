"""What a stage needs of a node's memory, from plain numbers.

    total       = base + weights + fixed + gradients + optimizer + activations + work + links + rings
    weights     = (parameters + borrowed) * versions      versions = 1 + delay + what the correction keeps
    delay       = 0 if synchronous, 1 if accumulate >= depth, else ceil((depth - 1) / accumulate)
    gradients   = (parameters + borrowed) * gradient copies
    optimizer   = parameters * optimizer bytes per parameter byte
    activations = saved * depth                           or, if recomputed: inputs * depth + saved
    links       = (what comes in + what goes out, both ways) * link buffers
    rings       = parameters * ring copies                a snapshot and the average, where clusters average

`depth` is the number of microbatches in flight at the stage, `saved` what one of them keeps until its backward,
`work` the most that one op needs besides (its result's gradient, say), `fixed` what has one copy and no gradient:
buffers and frozen weights. A borrowed parameter is one that another stage owns and updates (tied weights).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from ..core.config import config, format_bytes, require

__all__ = ["MemoryModel", "Share", "StageMemory", "stage_memory"]

# What a worker has resident besides the rest: 355 to 365 MB with torch 2.13, by `benchmarks.prediction`.
_BASE_BYTES = 360_000_000


@config
class MemoryModel:
    """How a run uses memory. `accumulate` is in microbatches per update; 0 means at least the depth.

    `optimizer_ratio` is the optimizer's state in bytes per byte of parameters: 0 for plain SGD, 1 with momentum,
    2 for Adam. `correction_copies` are sets of weights that a correction for delays keeps besides the versions: the
    master, and the last update. `gradient_copies` is 2 where a window's gradient waits (clipping, tied weights) as
    the next one gathers. `ring_copies` are those that averaging with other clusters takes: the snapshot and the
    average, what a codec owes, the reference and its momentum.
    """

    synchronous: bool = False
    accumulate: int = 0
    correction_copies: int = 2
    optimizer_ratio: float = 2.0
    gradient_copies: int = 1
    recompute: bool = False
    link_buffers: int = 2
    ring_copies: int = 0
    base_bytes: int = _BASE_BYTES

    def __post_init__(self) -> None:
        require(self.accumulate >= 0, f"accumulate must be 0 or more, not {self.accumulate}")
        require(0 <= self.optimizer_ratio < 100, f"optimizer_ratio must be from 0 to 100, not {self.optimizer_ratio}")
        require(self.correction_copies >= 0, f"correction_copies must be 0 or more, not {self.correction_copies}")
        require(self.gradient_copies >= 1, f"gradient_copies must be at least 1, not {self.gradient_copies}")
        require(self.link_buffers >= 0, f"link_buffers must be 0 or more, not {self.link_buffers}")
        require(self.ring_copies >= 0, f"ring_copies must be 0 or more, not {self.ring_copies}")
        require(self.base_bytes >= 0, f"base_bytes must be 0 or more, not {self.base_bytes}")

    def delay(self, depth: int) -> int:
        """Updates between the weights that a gradient was computed on and those that it changes."""
        if self.synchronous:
            return 0
        return 1 if not 0 < self.accumulate < depth else ceil((depth - 1) / self.accumulate)

    def versions(self, depth: int) -> int:
        """Sets of weights that live at once."""
        delay = self.delay(depth)
        return 1 + delay + (self.correction_copies if delay else 0)


class Share(NamedTuple):
    """What a stage consists of, in bytes; activations and messages of one microbatch."""

    parameter_bytes: int = 0
    borrowed_bytes: int = 0
    fixed_bytes: int = 0
    saved_bytes: int = 0
    work_bytes: int = 0
    input_bytes: int = 0
    link_bytes: int = 0


@dataclass(frozen=True)
class StageMemory:
    """The parts of a stage's memory, in bytes."""

    base: int
    weights: int
    fixed: int
    gradients: int
    optimizer: int
    activations: int
    work: int
    links: int
    rings: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __str__(self) -> str:
        """`"1.2 GB: weights 400.0 MB, optimizer 400.0 MB, ..."`, the largest first."""
        parts = sorted(vars(self).items(), key=lambda part: -part[1])
        return f"{format_bytes(self.total)}: " + ", ".join(
            f"{name} {format_bytes(size)}" for name, size in parts if size
        )


def stage_memory(share: Share, depth: int, model: MemoryModel) -> StageMemory:
    """Memory of a stage with `depth` microbatches in flight."""
    require(depth >= 1, f"depth must be at least 1, not {depth}")
    held = share.parameter_bytes + share.borrowed_bytes
    saved = share.input_bytes * depth + share.saved_bytes if model.recompute else share.saved_bytes * depth
    return StageMemory(
        base=model.base_bytes,
        weights=held * model.versions(depth),
        fixed=share.fixed_bytes,
        gradients=held * model.gradient_copies,
        optimizer=ceil(share.parameter_bytes * model.optimizer_ratio),
        activations=saved,
        work=share.work_bytes,
        links=share.link_bytes * model.link_buffers,
        rings=share.parameter_bytes * model.ring_copies,
    )
