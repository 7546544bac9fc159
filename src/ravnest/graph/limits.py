"""Limits on the size of a stage. The defaults suit a PC; each node can set its own."""

from __future__ import annotations

from ravnest.core.config import config, require

__all__ = ["StageLimits"]


@config
class StageLimits:
    text_bytes: int = 16 * 2**20  # of the stage file
    ops: int = 100_000
    state: int = 100_000  # number of parameters and buffers
    ports: int = 4096  # number of inputs, and of outputs
    batch: int = 64  # microbatch size at which sizes are computed
    value_bytes: int = 4 * 2**30  # of one value
    state_bytes: int = 64 * 2**30  # of all parameters and buffers
    total_bytes: int = 256 * 2**30  # of all values computed for a microbatch

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(isinstance(value, int) and value > 0, f"{name} must be an integer > 0, got {value!r}")
