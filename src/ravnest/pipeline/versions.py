"""Versions of a stage's weights: each has leaf tensors of its own, so that a backward uses the weights of its forward.

An update makes version u + 1 from u. Version v is released when step v + delay is done, just before the update that
needs memory for a new version, so its buffers are reused: `delay + 1` sets of weights in all. A correction that
computes on other weights than it updates (look-ahead) keeps the updated ones, the master weights, separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ravnest.pipeline.staleness import Corrector

__all__ = ["Tensors", "Versions"]

Tensors = dict[str, Tensor]


class Versions:
    """The trainable parameters of a stage, after `updates` updates.

    `by_age` are the compute weights of earlier steps, by their age in updates. A missing version is replaced by the
    next newer one, the newest by the master weights.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        corrector: Corrector,
        *,
        updates: int = 0,
        by_age: Mapping[int, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.delay = corrector.delay
        self.corrector = corrector
        self.newest = updates
        self.master: Tensors = {name: tensor.detach() for name, tensor in weights.items()}
        self._has_master = corrector.needs_buffer
        self._live: dict[int, Tensors] = {}
        self._restore(by_age or {})
        self._spare: list[Tensors] = []
        self._shift: Tensors = {}

    def _restore(self, by_age: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Make the versions of the next steps, each in memory of its own."""
        tensors = self.master
        for age in range(min(self.delay, self.newest) + 1):
            known = by_age.get(age, {})
            if age or self._has_master:
                tensors = {n: known[n].detach() if n in known else t.clone() for n, t in tensors.items()}
            self._live[self.newest - age] = _leaves(tensors)

    def __getitem__(self, version: int) -> Tensors:
        """The leaf tensors of a version."""
        return self._live[version]

    @property
    def live(self) -> list[int]:
        return sorted(self._live)

    def by_age(self) -> dict[int, Tensors]:
        """The compute weights by age in updates; without the newest version where it is the master."""
        lowest = 0 if self._has_master else 1
        return {self.newest - v: self._live[v] for v in self.live if self.newest - v >= lowest}

    @property
    def pending_shift(self) -> Tensors:
        """The offset that the next update will add to the weights."""
        return dict(self._shift)

    def shift(self, by: Mapping[str, Tensor]) -> None:
        """Add an offset to the weights with the next update: microbatches in flight still need the present ones."""
        for name, tensor in by.items():
            self._shift[name] = self._shift[name] + tensor if name in self._shift else tensor

    def shift_now(self) -> None:
        """Apply the pending shift immediately; no microbatch may be in flight."""
        for tensors in (self.master, *([self._live[self.newest]] if self._has_master else [])):
            self._add_shift(tensors)
        self._shift = {}

    def _add_shift(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, by in self._shift.items():
                tensors[name].detach().add_(by)

    def update(self, apply: Callable[[Tensors], None]) -> None:
        """Make the next version: `apply` updates the tensors passed to it in place."""
        self._retire()
        if self._has_master:
            buffer = self._buffer()
            _copy(self.master, buffer)  # the old master, which compute_weights needs
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
        """Release the versions that no later step uses, and keep their buffers."""
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
