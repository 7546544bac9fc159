"""Applies an optimizer to the parameters of a stage: `W <- X(W, g, lr(step))`, in place, on the caller's tensors.

Weights have several versions, so a stepper owns its state (moments, counters) but no weights: the tensors to change
are passed to each step. The arithmetic is that of `torch.optim`, bit for bit, and of `SOAP` and `LAMB` in this package.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from ravnest.errors import WeightsError
from ravnest.pipeline.optimizers.arithmetic import (
    check_keys,
    is_counter,
    on_device,
    optimizer_of,
    state_by_parameter,
    state_shape,
    torch_optimizer,
)
from ravnest.pipeline.optimizers.settings import Optimizer
from ravnest.pipeline.packing import unpack_state

__all__ = ["Stepper"]


class Stepper:
    """Applies gradients to parameters, and keeps the optimizer state by parameter name.

    `fallback_names` are further parameters (`embeddings(stage)`) that Muon and SOAP must not update. `fused` uses
    torch's fused kernels where they exist: several times faster, with different rounding.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        fallback_names: Collection[str] = (),
        *,
        fused: bool = False,
    ) -> None:
        self.optimizer = optimizer
        # .data, not .detach(): a slot must not share the version counter of the caller's tensor
        self._slots = {name: nn.Parameter(tensor.data) for name, tensor in parameters.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self._optimizers: dict[str, Optimizer] = {
            name: optimizer_of(optimizer, name, slot.ndim, fallback_names) for name, slot in self._slots.items()
        }
        self._torch = [
            (part, torch_optimizer(part, slots, fused=fused))
            for part in (optimizer, optimizer.fallback)
            if part is not None and (slots := [s for n, s in self._slots.items() if self._optimizers[n] is part])
        ]
        self._owner = {n: t for n, part in self._optimizers.items() for other, t in self._torch if other is part}
        self._release()

    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], step: int,
        *, lr_factor: float = 1.0, norm: Tensor | float | None = None,
    ) -> None:  # fmt: skip
        """Apply update number `step` to `parameters` in place. A parameter without a gradient does not change.

        Clipping scales the gradients in place, by the norm of these gradients, or by `norm`, that of the whole model.
        No tensor is copied or kept.
        """
        if self.optimizer.clip_norm is not None and gradients:
            grads = [gradients[name] for name in self._slots if name in gradients]
            total = torch.nn.utils.get_total_norm(grads) if norm is None else torch.as_tensor(norm)
            for gradient in grads:
                gradient.mul_(torch.clamp(self.optimizer.clip_norm / (total + 1e-6), max=1.0))
        for name, slot in self._slots.items():
            slot.data = parameters[name].detach()
            slot.grad = gradients.get(name)
        ratio = self.optimizer.schedule.ratio(step) * lr_factor
        try:
            for part, own in self._torch:
                for group in own.param_groups:
                    group["lr"] = part.lr * ratio
                own.step()
        finally:
            self._release()

    def state_dict(self) -> dict[str, Tensor]:
        """The state as tensors named `parameter/key`: no copies, later steps change them."""
        return {
            f"{name}/{key}": tensor
            for name, slot in self._slots.items()
            for key, tensor in sorted(self._owner[name].state.get(slot, {}).items())
            if isinstance(tensor, Tensor)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Use the tensors of a `state_dict`, without a copy. A parameter without state starts from zero."""
        loaded = {
            name: unpack_state(on_device(entries, self._slots[name].device, self._owner[name]))
            for name, entries in state_by_parameter(state, self._slots).items()
        }
        for name, entries in loaded.items():
            self._check_state(name, entries)
        for name, slot in self._slots.items():
            self._owner[name].state.pop(slot, None)
            if name in loaded:
                self._owner[name].state[slot] = {key: tensor.detach() for key, tensor in loaded[name].items()}

    def _check_state(self, name: str, entries: Mapping[str, Tensor]) -> None:
        check_keys(name, self._optimizers[name], self._shapes[name], entries)
        for key, tensor in entries.items():
            shape = state_shape(key, self._shapes[name])
            dtype = torch.float32 if is_counter(key) else self._slots[name].dtype
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise WeightsError(
                    f"{name}/{key} must be {dtype} of shape {list(shape)}, got {tensor.dtype} of {list(tensor.shape)}"
                )

    def _release(self) -> None:
        """Drop the references to the caller's tensors."""
        for slot in self._slots.values():
            slot.data = slot.data.new_empty(0)
            slot.grad = None
