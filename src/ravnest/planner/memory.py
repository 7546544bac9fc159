"""Computes the memory of a stage on its node, from plain numbers.

    total       = base + weights + fixed + gradients + optimizer + activations + work + links + rings
    weights     = (parameters + borrowed) * versions + parameters * copies of the staleness correction
    versions    = 1 + delay
    delay       = 0 if synchronous, 1 if accumulate >= depth, else ceil((depth - 1) / accumulate)
    gradients   = (parameters + borrowed) * gradient copies
    optimizer   = parameters * optimizer bytes per parameter byte, of which bases (SOAP) are never packed
    activations = saved * depth                           or, if recomputed: inputs * depth + saved
    links       = (bytes received + bytes sent, forward and backward) * link buffers
    rings       = parameters * ring copies                a snapshot and the average, where clusters average

`depth` is the number of microbatches in flight at the stage, `saved` the bytes that each keeps until its backward,
`work` the most temporary memory of one op (the gradients of its result and weights), `fixed` the bytes with one copy
and no gradient: buffers and frozen weights. A borrowed parameter is owned and updated by another stage (tied weights).

Bytes per float32 parameter that the stage owns, with AdamW, the default correction and a delay of one update:

    mode       versions   correction   gradient   waiting gradient   optimizer      sum
    exact             8            8          4                  4           8       28 (32)
    compact           8          2.0          4                  2         2.0     16.1 (18.1)
    small             4            -          2                  -         2.0      8.0

A gradient waits where it is clipped or tied. Packed tensors take one byte per element and a float32 scale per 256. In
mode `small` there is no delay. Without a delay, mode `compact` is `exact`: 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from ravnest.core.config import config, require
from ravnest.core.units import format_bytes

__all__ = ["MemoryModel", "StageShare", "StageMemory", "stage_memory"]

# Resident memory of a worker without a stage, with torch 2.13: 38 MB less than the 355 to 365 MB that
# `benchmarks.planner.prediction` measured before workers did without torch's compiler (`benchmarks.local_runs`).
_BASE_BYTES = 322_000_000


_PACKED = 0.25 + 1 / 256  # of a float32 tensor: a byte per element, and a float32 scale per 256 elements


@config
class MemoryModel:
    """The memory settings of a run. `accumulate` is in microbatches per optimizer step; 0: at least the depth.

    `optimizer_ratio` is the optimizer's state in bytes per byte of parameters: 0 for plain SGD, 1 with momentum,
    2 for Adam; `basis_ratio` is that of covariances and bases (SOAP), an upper bound for any stage, never packed.
    `correction_copies` are sets of weights that a staleness correction keeps besides the versions: the master, and the
    last update. `gradient_copies` is 2 where a step's gradient waits (clipping, tied weights) while the next one
    accumulates. These are numbers of float32 tensors; `mode` may pack them. `ring_copies` are those of averaging with
    other clusters: the snapshot and the average, the residual of a lossy codec, the reference and its momentum.
    """

    mode: str = "exact"
    synchronous: bool = False
    accumulate: int = 0
    correction_copies: int = 2
    optimizer_ratio: float = 2.0
    basis_ratio: float = 0.0
    gradient_copies: int = 1
    recompute: bool = False
    link_buffers: int = 2
    ring_copies: int = 0
    base_bytes: int = _BASE_BYTES

    def __post_init__(self) -> None:
        require(self.mode in ("exact", "compact", "small"), f"mode must be exact, compact or small, got {self.mode!r}")
        require(self.mode != "small" or self.synchronous, "mode small must be synchronous")
        require(self.accumulate >= 0, f"accumulate must be >= 0, got {self.accumulate}")
        require(0 <= self.optimizer_ratio < 100, f"optimizer_ratio must be >= 0 and < 100, got {self.optimizer_ratio}")
        require(0 <= self.basis_ratio < 100, f"basis_ratio must be >= 0 and < 100, got {self.basis_ratio}")
        require(self.correction_copies >= 0, f"correction_copies must be >= 0, got {self.correction_copies}")
        require(self.gradient_copies >= 1, f"gradient_copies must be >= 1, got {self.gradient_copies}")
        require(self.link_buffers >= 0, f"link_buffers must be >= 0, got {self.link_buffers}")
        require(self.ring_copies >= 0, f"ring_copies must be >= 0, got {self.ring_copies}")
        require(self.base_bytes >= 0, f"base_bytes must be >= 0, got {self.base_bytes}")

    def delay(self, depth: int) -> int:
        """Optimizer steps between the weights that a gradient was computed on and those that it changes."""
        if self.synchronous:
            return 0
        return 1 if not 0 < self.accumulate < depth else ceil((depth - 1) / self.accumulate)

    def in_mode(self, mode: str) -> MemoryModel:
        """The same training in another mode; `small` is synchronous and recomputes activations."""
        is_small = mode == "small"
        return replace(self, mode=mode, synchronous=self.synchronous or is_small, recompute=self.recompute or is_small)

    def weight_copies(self, depth: int) -> float:
        """Sets of weights in memory at once, in units of float32 ones, with those of the staleness correction."""
        delay = self.delay(depth)
        each = _PACKED if self.mode == "compact" else 1.0
        return 1 + delay + (self.correction_copies * each if delay else 0)

    @property
    def held_gradients(self) -> float:
        """Sets of gradients in memory at once, in units of float32 ones."""
        if self.mode == "small":
            return 0.5
        return 1 + (self.gradient_copies - 1) * (0.5 if self.mode == "compact" else 1.0)

    @property
    def optimizer_copies(self) -> float:
        """Optimizer state in bytes per byte of parameters."""
        is_packed = self.mode == "small" or (self.mode == "compact" and not self.synchronous)
        return self.optimizer_ratio * (_PACKED if is_packed else 1.0) + self.basis_ratio


class StageShare(NamedTuple):
    """The bytes of a stage; activations and messages of one microbatch."""

    parameter_bytes: int = 0
    borrowed_bytes: int = 0
    fixed_bytes: int = 0
    saved_bytes: int = 0
    work_bytes: int = 0
    input_bytes: int = 0
    link_bytes: int = 0


@dataclass(frozen=True)
class StageMemory:
    """The memory of a stage by purpose, in bytes."""

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


def stage_memory(share: StageShare, depth: int, model: MemoryModel) -> StageMemory:
    """Memory of a stage with `depth` microbatches in flight."""
    require(depth >= 1, f"depth must be >= 1, got {depth}")
    borrowed = share.borrowed_bytes
    saved = share.input_bytes * depth + share.saved_bytes if model.recompute else share.saved_bytes * depth
    return StageMemory(
        base=model.base_bytes,
        weights=ceil(share.parameter_bytes * model.weight_copies(depth)) + borrowed * (1 + model.delay(depth)),
        fixed=share.fixed_bytes,
        gradients=ceil(share.parameter_bytes * model.held_gradients) + borrowed * model.gradient_copies,
        optimizer=ceil(share.parameter_bytes * model.optimizer_copies),
        activations=saved,
        work=share.work_bytes,
        links=share.link_bytes * model.link_buffers,
        rings=share.parameter_bytes * model.ring_copies,
    )
