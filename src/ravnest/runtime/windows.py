"""Windows on their way to an update: gradients that wait for what other stages have to add.

A tied parameter's gradient is whole when every stage that borrowed it has returned its part. Clipping needs the norm
over all stages: squared norms are summed from the leaf to the root, and the total comes back. Neither stops the
pipe: the next window's gradients gather meanwhile.

    leaf  --squares-->  ...  --squares-->  root:  norm = sqrt(sum)   --total-->  ...  --total-->  leaf
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Pending", "Windows"]


@dataclass
class Pending:
    """One window's state."""

    own: dict[str, Tensor] | None = None
    returned: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)  # by the stage that borrowed
    squares_below: float | None = None
    total: float | None = None
    is_told: bool = False


class Windows:
    """`borrowers` are the stages that return gradients to this one; `clips` if the norm is needed."""

    def __init__(
        self,
        *,
        is_root: bool,
        is_leaf: bool,
        clips: bool,
        borrowers: frozenset[int],
        squares: Callable[[Mapping[str, Tensor]], float],
    ) -> None:
        self.is_root, self.is_leaf, self.clips, self.borrowers = is_root, is_leaf, clips, borrowers
        self._squares = squares
        self._pending: dict[int, Pending] = {}

    @property
    def needs_permission(self) -> bool:
        return self.clips or bool(self.borrowers)

    def __getitem__(self, window: int) -> Pending:
        return self._pending.setdefault(window, Pending())

    def complete(self, window: int) -> bool:
        """Whether the gradient of this stage is whole; adds up what was returned, in the order of the stages."""
        pending = self[window]
        if pending.own is None or pending.returned.keys() != self.borrowers:
            return False
        for borrower in sorted(pending.returned, reverse=True):
            for name, gradient in pending.returned[borrower].items():
                mine = pending.own.get(name)
                pending.own[name] = gradient if mine is None else mine.add_(gradient)
        pending.returned = {borrower: {} for borrower in self.borrowers}
        return True

    def squares_to_send(self, window: int) -> float | None:
        """The squared norm of this stage and all behind it, once, when all of it is known."""
        pending = self[window]
        if pending.is_told or not self.complete(window):
            return None
        below = 0.0 if self.is_leaf else pending.squares_below
        if below is None:
            return None
        pending.is_told = True
        assert pending.own is not None
        return below + self._squares(pending.own)

    def take(self, window: int) -> tuple[dict[str, Tensor], float | None]:
        """The window's gradient and the squared norm of the whole model's (if it clips); forgets the window."""
        pending = self._pending.pop(window)
        assert pending.own is not None
        return pending.own, pending.total
