"""What stages say to each other, as frozen tagged structs. The tensors travel behind them as raw buffers.

Forward along the pipe go `Forward`, `Evaluate`, `Lend` and `Norm`; back come `Backward`, `Return` and `Norm`. A
microbatch has a number that rises from 0; window w is the microbatches w * accumulate to (w + 1) * accumulate - 1.
"""

from __future__ import annotations

import msgspec

__all__ = ["Backward", "Data", "Evaluate", "Forward", "Lend", "Norm", "Return"]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """A strict record with its name in it."""


class Forward(_Message, frozen=True):
    """A microbatch of `batch` samples goes on: the stage's outputs follow. `share` is its part of its window."""

    microbatch: int
    batch: int
    share: float = 1.0


class Evaluate(_Message, frozen=True):
    """As `Forward`, but nothing is learned from it and nothing comes back. `fresh`: on the newest weights."""

    evaluation: int
    batch: int
    fresh: bool = False


class Backward(_Message, frozen=True):
    """A microbatch comes back: gradients of what its `Forward` carried follow."""

    microbatch: int
    batch: int


class Lend(_Message, frozen=True):
    """A version of tied parameters, for stages up to `until` that use them."""

    version: int
    owner: int
    until: int
    names: tuple[str, ...]


class Return(_Message, frozen=True):
    """Gradients of tied parameters from the stage that borrowed them, for one window."""

    window: int
    owner: int
    borrower: int
    names: tuple[str, ...]


class Norm(_Message, frozen=True):
    """The squared gradient norm of a window: on its way back the sum so far, on its way forward the total."""

    window: int
    squares: float


Data = Forward | Evaluate | Backward | Lend | Return | Norm
