"""Versions of a stage's weights: each has leaf tensors of its own, so that a backward uses the weights of its forward.

An update makes version u + 1 from u. Version v is released when step v + delay is done, just before the update that
needs memory for a new version, so its buffers are reused: `delay + 1` sets of weights in all. A correction that
computes on other weights than it updates (look-ahead) keeps the updated ones, the master weights, separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ravnest.pipeline.optimizers import Stepper
from ravnest.pipeline.packed_stepper import PackedStepper
from ravnest.pipeline.staleness import Corrector

__all__ = ["Tensors", "VersionBuffers", "Versions"]

Tensors = dict[str, Tensor]


class VersionBuffers:
    """The compute weights of the live versions, after `newest` updates, and a shift for the next update."""

    def __init__(self, delay: int, updates: int) -> None:
        self.delay, self.newest = delay, updates
        self._live: dict[int, Tensors] = {}
        self._spare: list[Tensors] = []
        self._shift: Tensors = {}

    def __getitem__(self, version: int) -> Tensors:
        """The leaf tensors of a version."""
        return self._live[version]

    def __contains__(self, name: str) -> bool:
        """Whether a parameter is one of these."""
        return name in self._live[self.newest]

    @property
    def live(self) -> list[int]:
        return sorted(self._live)

    @property
    def pending_shift(self) -> Tensors:
        """The offset that the next update will add to the weights."""
        return dict(self._shift)

    def shift(self, by: Mapping[str, Tensor]) -> None:
        """Add an offset to the weights with the next update: microbatches in flight still need the present ones."""
        for name, tensor in by.items():
            self._shift[name] = self._shift[name] + tensor if name in self._shift else tensor

    def _restore(self, tensors: Tensors, by_age: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Make the versions of the next steps from the newest, each in memory of its own."""
        for age in range(min(self.delay, self.newest) + 1):
            if age:
                known = by_age.get(age, {})
                tensors = {n: known[n].detach().contiguous() if n in known else t.clone() for n, t in tensors.items()}
            self._live[self.newest - age] = _leaves(tensors)

    def _live_by_age(self, *, lowest: int) -> dict[str, Mapping[str, Tensor]]:
        """The compute weights that are at least `lowest` updates old, as entries of a state."""
        return {f"version-{self.newest - v}": self._live[v] for v in self.live if self.newest - v >= lowest}

    def _add_version(self, tensors: Tensors) -> None:
        self.newest += 1
        self._live[self.newest] = _leaves(tensors)

    def _add_shift(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, by in self._shift.items():
                tensors[name].detach().add_(by)

    def _copy_into_live(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for weights in self._live.values():
                for name in weights.keys() & values.keys():
                    weights[name].detach().copy_(values[name])

    def _retire(self) -> None:
        """Release the versions that no later step uses, and keep their buffers."""
        for version in [v for v in self._live if v < self.newest + 1 - self.delay]:
            leaves = self._live.pop(version)
            if self.delay:
                self._spare.append({name: leaf.detach() for name, leaf in leaves.items()})

    def _buffer(self) -> Tensors:
        if self._spare:
            return self._spare.pop()
        return {name: torch.empty_like(leaf.detach()) for name, leaf in self._live[self.newest].items()}


class Versions(VersionBuffers):
    """The trainable parameters of a stage, after `updates` updates, with float32 master weights.

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
        super().__init__(corrector.delay, updates)
        self.corrector = corrector
        self.master: Tensors = {name: tensor.detach() for name, tensor in weights.items()}
        self._has_master = corrector.needs_buffer
        newest, known = self.master, (by_age or {}).get(0, {})
        if self._has_master:
            newest = {n: known[n].detach() if n in known else t.clone() for n, t in self.master.items()}
        self._restore(newest, by_age or {})

    def entries(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors of a whole state besides the master weights, by kind."""
        return {**self._live_by_age(lowest=0 if self._has_master else 1), "last-step": self.corrector.last_steps}

    def shift_now(self) -> None:
        """Apply the pending shift immediately; no microbatch may be in flight."""
        for tensors in (self.master, *([self._live[self.newest]] if self._has_master else [])):
            self._add_shift(tensors)
        self._shift = {}

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters to exactly these values, in every version."""
        self._copy_into_live(values)
        for name in self.master.keys() & values.keys():
            self.master[name].copy_(values[name])

    def advance(
        self,
        stepper: Stepper | PackedStepper,
        gradients: Mapping[str, Tensor],
        step: int,
        *,
        lr_factor: float,
        norm: float | None,
    ) -> None:
        """Make the next version with update number `step`."""
        self.update(lambda weights: stepper.step(weights, gradients, step, lr_factor=lr_factor, norm=norm))

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
        self._add_version(buffer)
        if self._shift:
            self.shift_now()


def _leaves(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)
