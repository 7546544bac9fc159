"""All that a stage has learnt after so many updates, as tensors by name: to be written, sent, or cut anew.

    weights/NAME           parameters (the master weights) and buffers
    optimizer/KEY/NAME     what the optimizer keeps of a parameter: exp_avg, momentum_buffer, its own count of steps
    version-AGE/NAME       what windows ran on AGE updates ago; age 0 only where it is not the master
    last-step/NAME         the last update, where a correction needs it
    shift/NAME             what the next update will move the weights by

The first two are a light state: enough to go on from. All of them are a whole one: to go on bit for bit. Every tensor
belongs to one parameter or buffer, so a state fits stages that were cut elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.errors import WeightsError
from ..graph import Stage, State
from ..graph.program import dtype_name

__all__ = ["StageState", "check_entry", "join", "kind_and_name", "owned"]

_OPTIMIZER = "optimizer"
_VERSION = "version-"
_KINDS = re.compile(r"weights|optimizer/\w+|version-\d{1,4}|last-step|shift")


@dataclass(frozen=True)
class StageState:
    """`updates` is how many there have been: the number of the next window."""

    updates: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.of("weights")

    @property
    def optimizer(self) -> dict[str, Tensor]:
        """As a stepper names them: `NAME/KEY`."""
        return {
            f"{name}/{kind.removeprefix(_OPTIMIZER + '/')}": tensor
            for entry, tensor in self.tensors.items()
            for kind, name in [kind_and_name(entry)]
            if kind.startswith(_OPTIMIZER)
        }

    @property
    def versions(self) -> dict[int, dict[str, Tensor]]:
        """By age."""
        kinds = {kind_and_name(entry)[0] for entry in self.tensors}
        return {int(k.removeprefix(_VERSION)): self.of(k) for k in sorted(kinds) if k.startswith(_VERSION)}

    def of(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one kind, by parameter."""
        there = {kind_and_name(entry): tensor for entry, tensor in self.tensors.items()}
        return {name: tensor for (its, name), tensor in there.items() if its == kind}

    def only(self, names: Collection[str]) -> StageState:
        """What belongs to these parameters and buffers."""
        return StageState(self.updates, {e: t for e, t in self.tensors.items() if kind_and_name(e)[1] in names})

    def of_stage(self, stage: Stage) -> StageState:
        """What belongs to this stage; refused if its shapes or dtypes are others."""
        own = owned(stage)
        mine = self.only(own)
        for entry, tensor in mine.tensors.items():
            check_entry(entry, own, dtype_name(tensor.dtype), tuple(tensor.shape))
        return mine

    @staticmethod
    def made_of(
        updates: int,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        others: Mapping[str, Mapping[str, Tensor]],
        *,
        copies: bool = True,
    ) -> StageState:
        """`optimizer` is by `NAME/KEY`, `others` by kind and name. Copies are in memory that nobody else changes."""
        tensors = {f"weights/{name}": tensor for name, tensor in weights.items()}
        for entry, tensor in optimizer.items():
            name, _, key = entry.rpartition("/")
            tensors[f"{_OPTIMIZER}/{key}/{name}"] = tensor
        tensors |= {f"{kind}/{name}": tensor for kind, of in others.items() for name, tensor in of.items()}
        take = _copy if copies else Tensor.detach
        return StageState(updates, {entry: take(tensor) for entry, tensor in tensors.items()})


def join(states: Iterable[StageState]) -> StageState:
    """Several stages' states as one. A buffer that several have is taken from the first."""
    there = list(states)
    tensors: dict[str, Tensor] = {}
    for state in reversed(there):
        tensors |= state.tensors
    return StageState(min(state.updates for state in there), tensors)


def kind_and_name(entry: str) -> tuple[str, str]:
    """`optimizer/exp_avg/layer.weight` -> (`optimizer/exp_avg`, `layer.weight`); a name may have slashes of its own."""
    kind, _, name = entry.partition("/")
    if kind == _OPTIMIZER:
        key, _, name = name.partition("/")
        kind = f"{kind}/{key}"
    return kind, name


def owned(stage: Stage) -> dict[str, State]:
    """The parameters and buffers that a stage keeps, by their names in the model."""
    return {s.target: s for s in stage.state if s.owner == stage.index}


def check_entry(entry: str, own: Mapping[str, State], dtype: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that does not fit the parameter it is of. What an optimizer keeps, its stepper knows better."""
    kind, name = kind_and_name(entry)
    if _KINDS.fullmatch(kind) is None:
        raise WeightsError(f"{entry!r} is nothing that a stage learns")
    item = own[name]
    same_shape = shape == item.shape or (shape == () and kind.startswith(_OPTIMIZER))
    same_dtype = dtype == item.dtype or kind.startswith(_OPTIMIZER) or kind == "shift"
    if not (same_shape and same_dtype):
        raise WeightsError(f"{entry!r} is {dtype} {list(shape)}, the stage needs {item.dtype} {list(item.shape)}")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
