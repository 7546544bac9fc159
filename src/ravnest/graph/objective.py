"""Model and loss as one module, and the tensors it is made of under the names the user knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..core.errors import TraceError
from .batch import unflatten
from .export import Flat
from .program import State, dtype_name, refs

__all__ = ["Loss", "Objective", "Owned", "collect", "training"]

Loss = Callable[..., Any]


class Objective(nn.Module):
    """`loss(model(inputs), targets)` over the batch's flat tensors; tells `on_labels` the names of what it returns."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | nn.Module | None,
        structure: Any,
        on_labels: Callable[[tuple[str, ...]], None],
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.structure = structure
        self.on_labels = on_labels

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        batch = unflatten(self.structure, leaves)
        inputs = batch["inputs"]
        if isinstance(inputs, dict):
            output = self.model(**inputs)
        else:
            output = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
        result = _own_loss(output) if self.loss is None else self.loss(output, batch["targets"])
        scalar, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        self._check(scalar, metrics)
        self.on_labels(("loss", *metrics))
        return (scalar, *(metric.detach() for metric in metrics.values()))

    def _check(self, scalar: Any, metrics: Any) -> None:
        if not isinstance(scalar, Tensor) or scalar.dim() != 0 or not scalar.is_floating_point():
            what = f"a {type(scalar).__name__}"
            if isinstance(scalar, Tensor):
                what = f"a {dtype_name(scalar.dtype)} tensor with {scalar.dim()} dimensions"
            raise TraceError(f"the loss is {what}; it must be one number: reduce it, for example with .mean()")
        if not isinstance(metrics, dict) or not all(isinstance(m, Tensor) for m in metrics.values()):
            raise TraceError("the second thing the loss function returns must be a dict of tensors to report")


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise TraceError("loss=None, but the model returns neither a scalar nor an output with a loss")
    return loss


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Training mode everywhere, and afterwards each module's own mode again."""
    before = [(m, m.training) for m in module.modules()]
    module.train()
    try:
        yield
    finally:
        for m, mode in before:
            m.training = mode


@dataclass
class Owned:
    """The objective's tensors. `same` maps a value of the exported graph to the one that stands for it."""

    state: list[State]
    idle: list[State]  # parameters and buffers that the forward pass never reads
    ties: dict[str, str]
    tensors: dict[str, Tensor]
    same: dict[str, str]


def collect(objective: Objective, flat: Flat) -> Owned:
    """Find every parameter, buffer and constant once, under its public name."""
    parameters = dict(objective.named_parameters(remove_duplicate=False))
    buffers = dict(objective.named_buffers(remove_duplicate=False))
    everything: dict[str, Tensor] = {**parameters, **buffers, **flat.constants}
    persistent = set(objective.state_dict(keep_vars=True))
    public = _public_names(everything, set(flat.constants))
    owned = Owned([], [], {}, {}, {})
    first: dict[int, str] = {}
    for name, tensor in everything.items():
        if id(tensor) in first:
            owned.ties[public[name]] = public[first[id(tensor)]]
        else:
            first[id(tensor)] = name
            owned.tensors[public[name]] = tensor
    value_of: dict[str, str] = {}
    for value, name in flat.state.items():
        original = first[id(everything[name])]
        owned.same[value] = value_of.setdefault(original, value)
    read = {owned.same.get(name, name) for op in flat.ops for name in refs(op)}
    for name in first.values():
        value = value_of.get(name, "")
        kind = "parameter" if name in parameters else "buffer"
        item = _state(value, public[name], everything[name], kind, name in persistent)
        (owned.state if value in read else owned.idle).append(item)
    return owned


def _state(value: str, target: str, tensor: Tensor, kind: str, persistent: bool) -> State:
    shape = tuple(int(d) for d in tensor.shape)
    trainable = kind == "parameter" and tensor.requires_grad
    return State(value, target, dtype_name(tensor.dtype), shape, kind, trainable, persistent)


def _public_names(everything: Mapping[str, Tensor], constants: set[str]) -> dict[str, str]:
    """The model's own names; the loss's begin with `loss.`, constants with `constant.`."""
    names = {name: f"constant.{name}" if name in constants else name.removeprefix("model.") for name in everything}
    if len(set(names.values())) < len(names):
        raise TraceError("the model has a submodule called 'loss' or 'constant', as our own names for them: rename it")
    return names
