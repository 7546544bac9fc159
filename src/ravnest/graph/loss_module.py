"""Model and loss as one module, and its parameters and buffers under the user's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ravnest.errors import TraceError
from ravnest.graph.batch import unflatten
from ravnest.graph.export import FlatGraph
from ravnest.graph.program import StateSpec, dtype_name, refs

__all__ = ["Loss", "LossModule", "ModuleState", "collect_state", "training_mode"]

Loss = Callable[..., Any]


class LossModule(nn.Module):
    """`loss(model(inputs), targets)` over the batch's flat tensors; calls `on_labels` with the names of its outputs."""

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
        result = _loss_of_output(output) if self.loss is None else self.loss(output, batch["targets"])
        scalar, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        self._check(scalar, metrics)
        self.on_labels(("loss", *metrics))
        return (scalar, *(metric.detach() for metric in metrics.values()))

    def _check(self, scalar: Any, metrics: Any) -> None:
        if not isinstance(scalar, Tensor) or scalar.dim() != 0 or not scalar.is_floating_point():
            what = f"a {type(scalar).__name__}"
            if isinstance(scalar, Tensor):
                what = f"a {dtype_name(scalar.dtype)} tensor with {scalar.dim()} dimensions"
            raise TraceError(f"the loss is {what}; it must be a scalar: reduce it, for example with .mean()")
        if not isinstance(metrics, dict) or not all(isinstance(m, Tensor) for m in metrics.values()):
            raise TraceError("the second return value of the loss function must be a dict of tensors to report")


def _loss_of_output(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise TraceError("loss=None, but the model returns neither a scalar nor an output with a loss")
    return loss


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Put all submodules into training mode, and restore each one's mode afterwards."""
    before = [(m, m.training) for m in module.modules()]
    module.train()
    try:
        yield
    finally:
        for m, mode in before:
            m.training = mode


@dataclass
class ModuleState:
    """State of a traced module. `canonical` maps a value of the exported graph to the first one of the same tensor."""

    state: list[StateSpec]
    idle: list[StateSpec]  # parameters and buffers that the forward pass never reads
    ties: dict[str, str]
    tensors: dict[str, Tensor]
    canonical: dict[str, str]


def collect_state(module: LossModule, flat: FlatGraph) -> ModuleState:
    """Collect every parameter, buffer and constant once, under its public name."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    tensors_by_name: dict[str, Tensor] = {**parameters, **buffers, **flat.constants}
    persistent = set(module.state_dict(keep_vars=True))
    public = _public_names(tensors_by_name, set(flat.constants))
    collected = ModuleState([], [], {}, {}, {})
    first: dict[int, str] = {}
    for name, tensor in tensors_by_name.items():
        if id(tensor) in first:
            collected.ties[public[name]] = public[first[id(tensor)]]
        else:
            first[id(tensor)] = name
            collected.tensors[public[name]] = tensor
    value_of: dict[str, str] = {}
    for value, name in flat.state.items():
        original = first[id(tensors_by_name[name])]
        collected.canonical[value] = value_of.setdefault(original, value)
    read = {collected.canonical.get(name, name) for op in flat.ops for name in refs(op)}
    for name in first.values():
        value = value_of.get(name, "")
        kind = "parameter" if name in parameters else "buffer"
        item = _state(value, public[name], tensors_by_name[name], kind, name in persistent)
        (collected.state if value in read else collected.idle).append(item)
    return collected


def _state(value: str, target: str, tensor: Tensor, kind: str, persistent: bool) -> StateSpec:
    shape = tuple(int(d) for d in tensor.shape)
    trainable = kind == "parameter" and tensor.requires_grad
    return StateSpec(value, target, dtype_name(tensor.dtype), shape, kind, trainable, persistent)


def _public_names(tensors_by_name: Mapping[str, Tensor], constants: set[str]) -> dict[str, str]:
    """Names as in the model; those of the loss start with `loss.`, of constants with `constant.`."""
    names = {name: f"constant.{name}" if name in constants else name.removeprefix("model.") for name in tensors_by_name}
    if len(set(names.values())) < len(names):
        raise TraceError("the model has a submodule named 'loss' or 'constant', which are reserved names: rename it")
    return names
