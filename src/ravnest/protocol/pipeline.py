"""Messages between the stages of a pipeline: frozen tagged structs. Tensors follow them as raw buffers.

Forward along the pipeline go `Forward`, `Evaluate`, `Lend` and `Norm`; back come `Backward`, `Return` and `Norm`.
Microbatches are numbered from 0; step s is the microbatches s * accumulate to (s + 1) * accumulate - 1.
"""

from __future__ import annotations

from ravnest.core.config import TaggedRecord

__all__ = ["feed_purpose", "Backward", "Data", "Evaluate", "Forward", "Lend", "Norm", "Return"]


class Forward(TaggedRecord, frozen=True):
    """The outputs of a stage for a microbatch of `batch` samples. `share` is the weight of its loss in the step.

    `sizes` are the sizes that vary with the length of the data, in the order of the values; so in all messages.
    """

    microbatch: int
    batch: int
    share: float = 1.0
    sizes: tuple[int, ...] = ()


class Evaluate(TaggedRecord, frozen=True):
    """Like `Forward`, for an evaluation: no backward follows. `fresh`: on the newest weights.

    With `positions`, one per sample, the last stage predicts the token that follows each position; else it computes the
    loss.
    """

    evaluation: int
    batch: int
    fresh: bool = False
    positions: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class Backward(TaggedRecord, frozen=True):
    """The gradients of the values that the microbatch's `Forward` carried."""

    microbatch: int
    batch: int
    sizes: tuple[int, ...] = ()


class Lend(TaggedRecord, frozen=True):
    """A version of tied parameters, from stage `owner` to the stages up to `until` that use them."""

    version: int
    owner: int
    until: int
    names: tuple[str, ...]


class Return(TaggedRecord, frozen=True):
    """The gradients of tied parameters for one step, from the stage that borrowed them to their owner."""

    step: int
    owner: int
    borrower: int
    names: tuple[str, ...]


class Norm(TaggedRecord, frozen=True):
    """The squared gradient norm of a step: towards the first stage a partial sum, towards the last the total."""

    step: int
    squares: float


Data = Forward | Evaluate | Backward | Lend | Return | Norm


def feed_purpose(cluster: str) -> str:
    """Return the purpose with which both ends of a cluster's feed introduce themselves."""
    return f"feed {cluster}"
