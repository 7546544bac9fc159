"""Versions of a stage's weights with the master weights and the last update in one byte per parameter each.

The compute weights C of the live versions are float32, and are used as they are. The master weights W are not kept:
they are the newest compute weights without the correction's offset, which is packed (`ravnest.pipeline.packing`):

    o = packed(C_u - W_u)      C_u = W_u + o  and  W_u = C_u - o, up to one float32 rounding
    d = packed(W_u - W_{u-1})  the last update, for the correction's second-order term

An update works on a chunk of a parameter at a time, so that float32 values besides the versions are few:

    W <- C_u - o,   W' <- optimizer(W, g),   d' = W' - W,   o' <- packed(a*d' + c*(d' - d)),   C_{u+1} <- W' + o'

Memory per parameter with a delay of one update: 8 bytes for two versions, 1 for the offset, 1 for the last update.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ravnest.pipeline.lazy_tensors import LazyTensor, LazyTensors
from ravnest.pipeline.packed_stepper import PackedStepper
from ravnest.pipeline.packing import PackedTensor, pack, scratch
from ravnest.pipeline.staleness import Corrector
from ravnest.pipeline.state import StageState
from ravnest.pipeline.versions import VersionBuffers

__all__ = ["CompactVersions"]


class CompactVersions(VersionBuffers):
    """The trainable float32 parameters of a stage, after the updates of `state`; `corrector` must have a delay.

    `state` may have the compute weights of earlier steps. A missing version is replaced by the next newer one, the
    newest by the master weights.
    """

    def __init__(self, weights: Mapping[str, Tensor], corrector: Corrector, state: StageState) -> None:
        super().__init__(corrector.delay, state.updates)
        self.corrector = corrector
        self._last_steps = state.packed("last-step") if corrector.curvature else {}
        self._offsets = state.packed("offset") if corrector.needs_buffer else {}
        newest, by_age = {name: tensor.detach().contiguous() for name, tensor in weights.items()}, state.versions
        if corrector.needs_buffer:
            newest = {n: self._with_offset(n, tensor, by_age.get(0, {}).get(n)) for n, tensor in newest.items()}
        self._restore(newest, by_age)
        for _ in range(len(self._live), self.delay + 1):  # now, so that later tensors cannot fragment the heap
            self._spare.append({name: torch.empty_like(tensor) for name, tensor in newest.items()})

    def _with_offset(self, name: str, master: Tensor, compute: Tensor | None) -> Tensor:
        """The newest compute weights of a parameter; sets its offset if the state had none."""
        if compute is None:
            self._offsets[name] = PackedTensor("linear", tuple(master.shape), device=master.device)
            return master
        compute = compute.detach().contiguous()
        if name not in self._offsets:  # saved with float32 master weights
            self._offsets[name] = pack("linear", compute.sub_(master))
            compute.copy_(self._offsets[name].unpacked()).add_(master)
        return compute

    @property
    def master(self) -> Mapping[str, Tensor]:
        """The master weights, made when they are read."""
        leaves = self._live[self.newest]
        return LazyTensors({name: self._master_of(leaf.detach(), name) for name, leaf in leaves.items()})

    def _master_of(self, compute: Tensor, name: str) -> Tensor | LazyTensor:
        if name not in self._offsets:
            return compute
        read = partial(_difference, compute.view(-1), self._offsets[name])
        return LazyTensor(compute.shape, compute.dtype, read, compute.device)

    def entries(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors of a whole state besides the master weights, by kind."""
        result: dict[str, Mapping[str, Tensor]] = {}
        for kind, packed in (("offset", self._offsets), ("last-step", self._last_steps)):
            if packed:
                result[kind] = {name: tensor.values for name, tensor in packed.items()}
                result[f"{kind}-scale"] = {name: tensor.scales for name, tensor in packed.items()}
        return {**self._live_by_age(lowest=0 if self._offsets else 1), **result}

    def shift_now(self) -> None:
        """Apply the pending shift immediately; no microbatch may be in flight."""
        self._add_shift(self._live[self.newest])
        self._shift = {}

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters to exactly these values, in every version."""
        self._copy_into_live(values)
        for name in self._offsets.keys() & values.keys():
            self._offsets[name].fill_zero()

    def advance(
        self,
        stepper: PackedStepper,
        gradients: Mapping[str, Tensor],
        step: int,
        *,
        lr_factor: float,
        norm: float | None,
    ) -> None:
        """Make the next version with update number `step`."""
        self._retire()
        stepper.begin(step, lr_factor=lr_factor, norm=norm)
        current, target = self._live[self.newest], self._buffer()
        for name, leaf in current.items():
            self._advance_parameter(name, leaf.detach().view(-1), target[name].view(-1), stepper, gradients.get(name))
        self._add_version(target)
        if self._shift:
            self.shift_now()

    def _advance_parameter(
        self, name: str, current: Tensor, target: Tensor, stepper: PackedStepper, gradient: Tensor | None
    ) -> None:
        offset, last = self._offsets.get(name), self._last_steps.get(name)
        flat = None if gradient is None else gradient.reshape(-1)
        if self.corrector.curvature and last is None:
            self._last_steps[name] = PackedTensor(
                "linear", tuple(self._live[self.newest][name].shape), device=current.device
            )
        for lo, hi in stepper.chunks(name):
            new = target[lo:hi].copy_(current[lo:hi])
            if offset is not None:
                new.sub_(offset.read(lo, hi, into=1))
                old = scratch(2, hi - lo, new.device).copy_(new)
            if flat is not None:
                stepper.update(name, lo, hi, new, flat[lo:hi])
            if offset is None:
                continue
            moved = torch.sub(new, old, out=old)
            factor = self.corrector.ahead + (self.corrector.curvature if last is not None else 0.0)
            ahead = torch.mul(moved, factor, out=scratch(1, hi - lo, new.device))
            if last is not None:
                ahead.sub_(last.read(lo, hi, into=3), alpha=self.corrector.curvature)
            if self.corrector.curvature:
                self._last_steps[name].write(lo, hi, moved)
            offset.write(lo, hi, ahead)
            new.add_(offset.read(lo, hi, into=1))
        if flat is not None:
            stepper.finish(name)


def _difference(flat: Tensor, packed: PackedTensor, lo: int, hi: int) -> Tensor:
    return flat[lo:hi] - packed.read(lo, hi)
