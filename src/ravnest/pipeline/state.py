"""The state of a stage after a number of updates, as named tensors, and its safetensors file.

    weights/NAME           parameters (the master weights) and buffers
    optimizer/KEY/NAME     optimizer state of a parameter: exp_avg, momentum_buffer, its own count of steps;
                           for SOAP also covariances and bases: left, left_basis, right, right_basis
    version-AGE/NAME       compute weights of AGE updates ago; age 0 only where they are not the master weights
    last-step/NAME         the last update, where a correction needs it
    offset/NAME            compute weights minus master weights, where the master weights are not kept
    shift/NAME             the offset that the next update will add to the weights

The first two kinds are a light state, enough to resume. All of them are a whole state, which resumes bit for bit.
Frozen parameters and constant buffers are as training found them: only a state that a node keeps for itself, or that
another node requests by name, has them.
A packed tensor (`ravnest.pipeline.packing`) has its codes under its name, and its scales under `last-step-scale/NAME`,
`offset-scale/NAME` or `optimizer/KEY_scale/NAME`.
Every tensor belongs to one parameter or buffer, so a state also fits stages with other cuts. Files appear under their
name only when complete; a reader loads only the tensors it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ravnest.errors import WeightsError
from ravnest.graph import Stage, StateSpec, write_weights
from ravnest.graph.program import dtype_name
from ravnest.graph.weights import WeightsFile, open_weights
from ravnest.pipeline.lazy_tensors import LazyTensor, LazyTensors
from ravnest.pipeline.optimizers import state_shape
from ravnest.pipeline.packing import SCALE, PackedTensor, num_blocks, pack

__all__ = [
    "StageState",
    "join",
    "kind_and_name",
    "owned",
    "trained",
    "read_state",
    "select",
    "updates_in",
    "write_state",
]

_OPTIMIZER = "optimizer"
_VERSION = "version-"
_KINDS = re.compile(r"weights|optimizer/\w+|version-\d{1,4}|(last-step|offset)(-scale)?|shift")


@dataclass(frozen=True)
class StageState:
    """Tensors by entry name, after `updates` updates; the next step has this number."""

    updates: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.of_kind("weights")

    @property
    def optimizer(self) -> dict[str, Tensor]:
        """The optimizer state as `Stepper` names it: `NAME/KEY`."""
        return {
            f"{name}/{kind.removeprefix(_OPTIMIZER + '/')}": tensor
            for entry, tensor in self.tensors.items()
            for kind, name in [kind_and_name(entry)]
            if kind.startswith(_OPTIMIZER)
        }

    @property
    def versions(self) -> dict[int, dict[str, Tensor]]:
        """The compute weights of earlier steps, by age in updates."""
        kinds = {kind_and_name(entry)[0] for entry in self.tensors}
        return {int(k.removeprefix(_VERSION)): self.of_kind(k) for k in sorted(kinds) if k.startswith(_VERSION)}

    def of_kind(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one kind, by parameter."""
        return {
            name: tensor
            for entry, tensor in self.tensors.items()
            for its_kind, name in [kind_and_name(entry)]
            if its_kind == kind
        }

    def packed(self, kind: str) -> dict[str, PackedTensor]:
        """The tensors of a kind that is packed, or packed here if they were saved as float32."""
        scales = self.of_kind(f"{kind}-scale")
        return {
            n: PackedTensor("linear", tuple(t.shape), t, scales[n]) if n in scales else pack("linear", t)
            for n, t in self.of_kind(kind).items()
        }

    def unpacked(self, kind: str) -> dict[str, Tensor]:
        """The tensors of a kind as float32."""
        scales = self.of_kind(f"{kind}-scale")
        return {
            n: PackedTensor("linear", tuple(t.shape), t, scales[n]).unpacked() if n in scales else t
            for n, t in self.of_kind(kind).items()
        }

    def only(self, names: Collection[str]) -> StageState:
        """The entries of these parameters and buffers."""
        return StageState(self.updates, {e: t for e, t in self.tensors.items() if kind_and_name(e)[1] in names})

    def for_stage(self, stage: Stage) -> StageState:
        """The entries of this stage. Raises `WeightsError` if a shape or dtype differs."""
        own = owned(stage)
        result = self.only(own)
        for entry, tensor in result.tensors.items():
            check_entry(entry, own, dtype_name(tensor.dtype), tuple(tensor.shape))
        return result

    def to(self, device: torch.device) -> StageState:
        """The state on a device; the steppers move counters themselves. On the processor, this state."""
        if device.type == "cpu":
            return self
        moved = {e: t if t.dim() == 0 and e.startswith(_OPTIMIZER) else t.to(device) for e, t in self.tensors.items()}
        return StageState(self.updates, moved)

    @staticmethod
    def build(
        updates: int,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        others: Mapping[str, Mapping[str, Tensor]],
        *,
        copies: bool = True,
    ) -> StageState:
        """A state of `optimizer` entries by `NAME/KEY` and `others` by kind and name.

        With `copies` it is independent; without, its tensors are read from the given ones when they are needed.
        """
        items: dict[str, Tensor | LazyTensor] = {}
        for kind, named in {"weights": weights, **others}.items():
            items |= {f"{kind}/{name}": item for name, item in LazyTensors.items_of(named).items()}
        for entry, tensor in optimizer.items():
            name, _, key = entry.rpartition("/")
            items[f"{_OPTIMIZER}/{key}/{name}"] = tensor
        tensors = LazyTensors(items)
        return StageState(updates, {entry: _copy(t) for entry, t in tensors.items()} if copies else tensors)


def join(states: Iterable[StageState]) -> StageState:
    """The states of several stages as one. A tensor that several have is taken from the first."""
    parts = list(states)
    tensors: dict[str, Tensor] = {}
    for state in reversed(parts):
        tensors |= state.tensors
    return StageState(min(state.updates for state in parts), tensors)


def kind_and_name(entry: str) -> tuple[str, str]:
    """`optimizer/exp_avg/layer.weight` -> (`optimizer/exp_avg`, `layer.weight`); a name may contain slashes."""
    kind, _, name = entry.partition("/")
    if kind == _OPTIMIZER:
        key, _, name = name.partition("/")
        kind = f"{kind}/{key}"
    return kind, name


def owned(stage: Stage) -> dict[str, StateSpec]:
    """The parameters and buffers that a stage owns, by their names in the model."""
    return {s.target: s for s in stage.state if s.owner == stage.index}


def trained(stage: Stage) -> dict[str, StateSpec]:
    """Those that a stage owns and training changes."""
    return {name: item for name, item in owned(stage).items() if not item.is_frozen}


def check_entry(entry: str, own: Mapping[str, StateSpec], dtype: str, shape: tuple[int, ...]) -> None:
    """Reject a tensor that does not fit its parameter. The exact form of optimizer state is checked by `Stepper`."""
    kind, name = kind_and_name(entry)
    if _KINDS.fullmatch(kind) is None:
        raise WeightsError(f"{entry!r} is not an entry of a stage state")
    item = own[name]
    is_optimizer = kind.startswith(_OPTIMIZER)
    same_shape = shape == item.shape
    if is_optimizer:
        same_shape |= shape in ((), state_shape(kind.removeprefix(_OPTIMIZER + "/"), item.shape))
    same_dtype = dtype == item.dtype or is_optimizer or kind == "shift"
    if kind.endswith(("-scale", SCALE)):
        same_shape, same_dtype = shape == (num_blocks(prod(item.shape)),), dtype == "float32"
    elif kind in ("last-step", "offset"):
        same_dtype |= dtype == "int8"
    if not (same_shape and same_dtype):
        raise WeightsError(f"{entry!r} must be {item.dtype} {list(item.shape)}, got {dtype} {list(shape)}")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


FORMAT = "ravnest-state/2"


def write_state(state: StageState, path: Path | str, *, on_read: Callable[[], None] = lambda: None) -> None:
    """Write a state file, a tensor or a part of one at a time; it appears under its name when it is complete.

    `on_read` is called when all tensors have been read.
    """
    items = LazyTensors.items_of(state.tensors)
    contents = [StateSpec(e, e, dtype_name(t.dtype), tuple(t.shape)) for e, t in items.items()]
    with write_weights(path, contents, {"format": FORMAT, "updates": str(state.updates)}) as writer:
        for entry, item in items.items():
            if isinstance(item, LazyTensor):
                writer.write_parts(entry, item.parts())
            else:
                writer.write(entry, item)
        on_read()


def read_state(stage: Stage, paths: Iterable[Path | str]) -> StageState:
    """Read the entries of a stage from state files, which may be of stages with other cuts.

    Shapes and dtypes are checked before a tensor is read. An entry of several files is taken from the first. If the
    files have different numbers of updates, the smallest is used.
    """
    return join([_read(stage, path) for path in paths])


def _read(stage: Stage, path: Path | str) -> StageState:
    own = owned(stage)
    with open_weights(path) as file:
        updates = updates_in(file, path)
        needed = sorted(entry for entry in file.names if kind_and_name(entry)[1] in own)
        for entry in needed:
            try:
                check_entry(entry, own, *file.spec_of(entry))
            except WeightsError as error:
                raise WeightsError(f"{path}: {error}") from None
        return StageState(updates, {entry: _in_memory(file, entry) for entry in needed})


def select(source: Path | str, target: Path | str, names: Collection[str]) -> None:
    """Copy the entries of these parameters and buffers to another state file, one tensor at a time."""
    with open_weights(source) as file:
        updates_in(file, source)  # raises if it is not a state file
        contents = [StateSpec(e, e, *file.spec_of(e)) for e in sorted(file.names) if kind_and_name(e)[1] in names]
        with write_weights(target, contents, file.metadata) as writer:
            for item in contents:
                writer.write(item.target, file.read(item.target))


def updates_in(file: WeightsFile, path: Path | str) -> int:
    """The number of updates after which a state file was written."""
    name, updates = file.metadata.get("format"), file.metadata.get("updates", "")
    if name != FORMAT or not updates.isdecimal():
        raise WeightsError(f"{path} is not a state of format {FORMAT}: format is {name!r}, updates {updates!r}")
    return int(updates)


def _in_memory(file: WeightsFile, entry: str) -> Tensor:
    """A copy: tensors in the mapped file have another alignment, which can change the last bits of results."""
    return file.read(entry).clone()
