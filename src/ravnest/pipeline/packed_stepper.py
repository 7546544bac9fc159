"""Applies gradients with optimizer state in one byte per element.

A chunk of a parameter at a time, its state is unpacked, `torch.optim` updates the chunk, and the state is packed again:

    m, v <- unpacked state      W <- torch.optim.X(W, g, m, v, lr(step))      packed state <- m, v

Most optimizers update each element by itself, so a chunk is a parameter to them. Muon, SOAP and LAMB get whole
parameters. Covariances and bases of SOAP are not packed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from ravnest.errors import WeightsError
from ravnest.graph.device import CPU
from ravnest.pipeline.optimizers import (
    Optimizer,
    check_keys,
    is_counter,
    is_elementwise,
    on_device,
    optimizer_of,
    state_by_parameter,
    state_keys,
    state_shape,
    torch_optimizer,
)
from ravnest.pipeline.packing import FORMS, SCALE, PackedTensor, chunks, noise, pack, packed_state

__all__ = ["PackedStepper"]

_STATE = 4  # the first scratch buffer of optimizer state; compact versions use those below
_State = dict[str, PackedTensor | Tensor]


class PackedStepper:
    """As `Stepper`, for float32 parameters, with packed state.

    An update is `begin`, then for each parameter `update` for all its `chunks`, and `finish`; or `step` for all of it.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, Tensor], fallback_names: Collection[str] = ()
    ) -> None:
        self.optimizer = optimizer
        self._shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self._device = next((tensor.device for tensor in parameters.values()), CPU)
        self._optimizers = {
            name: optimizer_of(optimizer, name, len(shape), fallback_names) for name, shape in self._shapes.items()
        }
        self._slots = {
            part.name: nn.Parameter(torch.empty(0, 0, device=self._device))
            for part in (optimizer, optimizer.fallback)
            if part is not None
        }
        self._torch = {
            part.name: torch_optimizer(part, [self._slots[part.name]], fused=True)
            for part in (optimizer, optimizer.fallback)
            if part is not None
        }
        self._state: dict[str, _State] = {}
        self._new: dict[str, dict[str, PackedTensor]] = {}  # memory for the state of parameters that have none yet
        self._next: _State = {}  # of the parameter that is being updated
        self._number = 0
        self._gradient_factor: Tensor | None = None

    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], step: int,
        *, lr_factor: float = 1.0, norm: Tensor | float | None = None,
    ) -> None:  # fmt: skip
        """Apply update number `step` to `parameters` in place. A parameter without a gradient does not change."""
        self.begin(step, lr_factor=lr_factor, norm=norm)
        for name in [name for name in self._shapes if name in gradients]:
            weight, gradient = parameters[name].detach().view(-1), gradients[name].reshape(-1)
            for lo, hi in self.chunks(name):
                self.update(name, lo, hi, weight[lo:hi], gradient[lo:hi])
            self.finish(name)

    def begin(self, step: int, *, lr_factor: float = 1.0, norm: Tensor | float | None = None) -> None:
        """Set the learning rate of update number `step`; clipping needs `norm`, that of the whole model."""
        self._number = step
        ratio = self.optimizer.schedule.ratio(step) * lr_factor
        for part in (self.optimizer, self.optimizer.fallback):
            if part is not None:
                for group in self._torch[part.name].param_groups:
                    group["lr"] = part.lr * ratio
        self._gradient_factor = None
        if self.optimizer.clip_norm is not None:
            assert norm is not None, "clipping needs the norm of the whole model"
            self._gradient_factor = torch.clamp(self.optimizer.clip_norm / (torch.as_tensor(norm) + 1e-6), max=1.0)

    def chunks(self, name: str) -> Iterable[tuple[int, int]]:
        """The ranges of a flat parameter to update one after the other."""
        numel = torch.Size(self._shapes[name]).numel()
        return chunks(numel) if is_elementwise(self._optimizers[name]) else [(0, numel)]

    def update(self, name: str, lo: int, hi: int, weight: Tensor, gradient: Tensor) -> None:
        """Update the flat elements `lo` to `hi` of a parameter, which are `weight`, in place."""
        part = self._optimizers[name]
        slot, torch_part, known = self._slots[part.name], self._torch[part.name], self._state.get(name)
        gradient = gradient.float() if self._gradient_factor is None else gradient * self._gradient_factor
        shape = (hi - lo,) if is_elementwise(part) else self._shapes[name]
        slot.data, slot.grad = weight.view(shape), gradient.float().view(shape)
        if known is not None:
            torch_part.state[slot] = {
                key: t.read(lo, hi, _STATE + i).view(shape) if isinstance(t, PackedTensor) else _own(key, t)
                for i, (key, t) in enumerate(known.items())
            }
        try:
            torch_part.step()
            for key, tensor in torch_part.state.pop(slot, {}).items():
                if tensor is not None:
                    self._keep(name, lo, hi, key, tensor)
        finally:
            slot.data, slot.grad = torch.empty(0, device=self._device), None

    def _keep(self, name: str, lo: int, hi: int, key: str, tensor: Tensor) -> None:
        if key not in FORMS:
            self._next[key] = tensor
            return
        packed = self._state.get(name, self._new.get(name, {})).get(key) or self._next.get(key)
        packed = (
            packed
            if isinstance(packed, PackedTensor)
            else PackedTensor(FORMS[key], self._shapes[name], device=self._device)
        )
        self._next[key] = packed
        flat = tensor.reshape(-1)
        for start, end in chunks(hi - lo):  # of a parameter that is updated as a whole
            is_random = FORMS[key] == "positive"
            random = noise(f"{name}/{key}", self._number, lo + start, self._device) if is_random else None
            packed.write(lo + start, lo + end, flat[start:end], random)

    def finish(self, name: str) -> None:
        """Complete the update of a parameter, after all its chunks."""
        if self._next:
            self._state[name], self._next = self._next, {}
            self._new.pop(name, None)

    def state_dict(self) -> dict[str, Tensor]:
        """The state as tensors named `parameter/key`: no copies, later steps change them."""
        result: dict[str, Tensor] = {}
        for name, state in self._state.items():
            for key, tensor in sorted(state.items()):
                if isinstance(tensor, PackedTensor):
                    result[f"{name}/{key}"], result[f"{name}/{key}{SCALE}"] = tensor.values, tensor.scales
                else:
                    result[f"{name}/{key}"] = tensor
        return result

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Use the tensors of a `state_dict`, without a copy where they are packed. Others start from zero."""
        loaded = {
            name: packed_state(on_device(entries, self._device, self._torch[self._optimizers[name].name]))
            for name, entries in state_by_parameter(state, self._shapes).items()
        }
        for name, entries in loaded.items():
            check_keys(name, self._optimizers[name], self._shapes[name], entries)
            for key, tensor in entries.items():
                self._check(name, key, tensor)
        for entries in loaded.values():
            for key, tensor in entries.items():
                if key in FORMS and isinstance(tensor, Tensor):
                    entries[key] = pack(FORMS[key], tensor)
        self._state = loaded
        self._new = {
            name: {
                key: PackedTensor(FORMS[key], shape, device=self._device)
                for key in state_keys(self._optimizers[name], shape)
                if key in FORMS
            }
            for name, shape in self._shapes.items()
            if name not in loaded
        }

    def _check(self, name: str, key: str, tensor: PackedTensor | Tensor) -> None:
        shape = state_shape(key, self._shapes[name])
        dtype = tensor.dtype if isinstance(tensor, Tensor) else torch.float32
        if tuple(tensor.shape) != shape or dtype != torch.float32:
            raise WeightsError(
                f"{name}/{key} must be float32 of shape {list(shape)}, got {dtype} of {list(tensor.shape)}"
            )


def _own(key: str, tensor: Tensor) -> Tensor:
    """A state that is not packed, for the update of one chunk: each counts the step by itself."""
    return tensor.clone() if is_counter(key) else tensor
