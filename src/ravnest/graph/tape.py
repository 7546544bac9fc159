"""One microbatch on its way through a stage: the forward pass, kept until its gradients come back.

Inputs are cut off from whatever made them, so each stage has a graph of its own. With `recompute` nothing but
the inputs is kept: the backward pass runs the forward pass again, with the random numbers and buffers it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .run import Runner

__all__ = ["Tape"]

_RngState = tuple[Tensor, Tensor | None]


class Tape:
    """`Tape(...)` runs the forward pass; `outputs` are to be sent on; `backward` gives the inputs' gradients.

    Gradients of parameters are added to the `.grad` of the tensors that were passed in.
    """

    def __init__(
        self, runner: Runner, state: Mapping[str, Tensor], inputs: Sequence[Any], *, recompute: bool = False
    ) -> None:
        self._runner = runner
        self._state: Mapping[str, Tensor] = state
        self._inputs = [_leaf(given, value.grad) for given, value in zip(inputs, runner.stage.inputs, strict=True)]
        self._kept: tuple[Any, ...] | None = None
        self._rng: _RngState | None = None
        if recompute:
            self._rng = _rng_state(runner.device)
            before = {s.target: state[s.target].clone() for s in runner.stage.state if s.mutated}
            with torch.no_grad():
                outputs = runner(state, self._inputs)
            self._state = {**state, **before}
        else:
            outputs = self._kept = runner(state, self._inputs)
        self.outputs = tuple(o.detach() if isinstance(o, Tensor) else o for o in outputs)

    def backward(self, gradients: Sequence[Tensor | None] | None = None) -> list[Tensor | None]:
        """Gradients of the inputs, given those of the outputs (of a loss: none). Frees the graph."""
        outputs = self._kept if self._kept is not None else self._again()
        if gradients is None:
            gradients = [torch.ones_like(o) if i == 0 else None for i, o in enumerate(self.outputs)]
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and isinstance(output, Tensor) and output.requires_grad
        ]
        self._kept = None
        del outputs
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return [x.grad if isinstance(x, Tensor) and x.requires_grad else None for x in self._inputs]

    def _again(self) -> tuple[Any, ...]:
        """The forward pass once more, exactly as it was."""
        if self._rng is None:
            raise AssertionError("backward was called twice")
        devices = [] if self._runner.device.type == "cpu" else [self._runner.device]
        with torch.random.fork_rng(devices, device_type=self._runner.device.type if devices else "cuda"):
            _set_rng_state(self._runner.device, self._rng)
            self._rng = None
            return self._runner(self._state, self._inputs)


def _leaf(given: Any, grad: bool) -> Any:
    return given.detach().requires_grad_(grad) if isinstance(given, Tensor) else given


def _rng_state(device: torch.device) -> _RngState:
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return torch.get_rng_state(), own


def _set_rng_state(device: torch.device, state: _RngState) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)
