"""Weights by version: each is a set of leaf tensors of its own, so that a backward finds what its forward used.

Version u + 1 is made from u by an update. Version v dies when window v + delay is done, which is just before the
update that needs memory for a new one, so its buffers are used again: `delay + 1` sets of weights in all, no others.
A correction that runs on other weights than it updates (look-ahead) keeps the updated ones, the master, apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .corrections import Corrector

__all__ = ["Tensors", "Versions"]

Tensors = dict[str, Tensor]


class Versions:
    """The trainable parameters of a stage, after `updates` updates.

    `ran_on` is what windows ran on so many updates ago. A version that is not known is the next younger one; the
    youngest is the master.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        corrector: Corrector,
        *,
        updates: int = 0,
        ran_on: Mapping[int, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.delay = corrector.delay
        self.corrector = corrector
        self.newest = updates
        self.master: Tensors = {name: tensor.detach() for name, tensor in weights.items()}
        self._has_master = corrector.needs_buffer
        self._live: dict[int, Tensors] = {}
        self._begin(ran_on or {})
        self._spare: list[Tensors] = []
        self._shift: Tensors = {}

    def _begin(self, ran_on: Mapping[int, Mapping[str, Tensor]]) -> None:
        """The versions that the next windows run on, each in memory of its own."""
        tensors = self.master
        for age in range(min(self.delay, self.newest) + 1):
            known = ran_on.get(age, {})
            if age or self._has_master:
                tensors = {n: known[n].detach() if n in known else t.clone() for n, t in tensors.items()}
            self._live[self.newest - age] = _leaves(tensors)

    def __getitem__(self, version: int) -> Tensors:
        """The leaf tensors that microbatches of that version run on."""
        return self._live[version]

    @property
    def live(self) -> list[int]:
        return sorted(self._live)

    def ran_on(self) -> dict[int, Tensors]:
        """What windows ran on, by age in updates; without the newest where it is the master."""
        youngest = 0 if self._has_master else 1
        return {self.newest - v: self._live[v] for v in self.live if self.newest - v >= youngest}

    @property
    def coming_shift(self) -> Tensors:
        """What the next update will move the weights by."""
        return dict(self._shift)

    def shift(self, by: Mapping[str, Tensor]) -> None:
        """Move the weights: with the next update, because microbatches in flight still need those they ran on."""
        for name, tensor in by.items():
            self._shift[name] = self._shift[name] + tensor if name in self._shift else tensor

    def shift_now(self) -> None:
        """The same without waiting; nothing may be in flight."""
        for tensors in (self.master, *([self._live[self.newest]] if self._has_master else [])):
            self._shift_tensors(tensors)
        self._shift = {}

    def _shift_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, by in self._shift.items():
                tensors[name].detach().add_(by)

    def update(self, apply: Callable[[Tensors], None]) -> None:
        """Make the next version: `apply` steps the tensors it is given, in place."""
        self._retire()
        if self._has_master:
            buffer = self._buffer()
            _copy(self.master, buffer)  # the old master, until the line after next
            apply(self.master)
            buffer = self.corrector.compute_weights(self.master, buffer)
        elif self.delay == 0:
            buffer = self.master
            self._live.clear()
            apply(buffer)
        else:
            buffer = self._buffer()
            _copy(self.master, buffer)
            apply(buffer)
            self.master = buffer
        self.newest += 1
        self._live[self.newest] = _leaves(buffer)
        if self._shift:
            self.shift_now()

    def _retire(self) -> None:
        """Take back the versions that no window from the next on will use."""
        for version in [v for v in self._live if v < self.newest + 1 - self.delay]:
            leaves = self._live.pop(version)
            if self.delay:
                self._spare.append({name: leaf.detach() for name, leaf in leaves.items()})

    def _buffer(self) -> Tensors:
        return self._spare.pop() if self._spare else {n: torch.empty_like(t) for n, t in self.master.items()}


def _leaves(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)
