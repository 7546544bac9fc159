"""How much a stage may ask for. The defaults suit a PC; a lender gives its own."""

from __future__ import annotations

from ..core.config import config, require

__all__ = ["Limits"]


@config
class Limits:
    text_bytes: int = 16 * 2**20  # of the stage file
    ops: int = 100_000
    state: int = 100_000  # number of parameters and buffers
    ports: int = 4096  # number of inputs, and of outputs
    batch: int = 64  # the microbatch size that sizes are computed for
    value_bytes: int = 4 * 2**30  # of one value
    state_bytes: int = 64 * 2**30  # of all parameters and buffers
    total_bytes: int = 256 * 2**30  # of all values a microbatch makes, one after another

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(isinstance(value, int) and value > 0, f"limit {name} must be a positive number, not {value!r}")
