"""Converts a user's batch to the flat list of named tensors that a program takes.

A batch is `(inputs, targets)`: a pair, or a mapping or dataclass with both (`split_batch`). `inputs` is a tensor, a
tuple (positional arguments), a mapping (keyword arguments) or a dataclass (one argument); `targets` is passed to the
loss. Without a loss a batch is the inputs alone. Everything in it that is not a tensor or an array is a constant of the
program and must be the same in every batch.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ravnest.graph.program import DTYPES, Value, dtype_name, resolve_dim

__all__ = ["BatchLayout", "flatten", "unflatten"]

Leaves = Sequence[tuple[str, Tensor]]

_TARGET_NAMES = ("targets", "target", "labels", "label", "label_ids")
_PAIR = (
    "a batch must be a pair (inputs, targets), or a mapping with 'labels' or 'targets' beside the inputs; "
    "with loss=None it is the inputs alone and the model returns the loss"
)


@dataclass(frozen=True)
class _Slot:
    """Placeholder of the n-th tensor in a batch's structure."""

    index: int


@dataclass(frozen=True)
class _Node:
    """A container in a batch's structure: its type, its keys (numbers for a sequence) and what it holds."""

    kind: type
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]


def flatten(batch: Any, path: str) -> tuple[Any, list[tuple[str, Tensor]]]:
    """Split a batch into its structure with numbered slots and its tensors with their paths, in order."""
    leaves: list[tuple[str, Tensor]] = []

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, np.generic):
            node = node.item()
        if isinstance(node, Tensor | np.ndarray):
            leaves.append((path, _tensor(node, path)))
            return _Slot(len(leaves) - 1)
        if node is None or isinstance(node, bool | int | float | str):
            return node
        items = _items(node)
        if items is None:
            raise ValueError(
                f"{path} of the batch is a {type(node).__name__}: a batch contains tensors, NumPy arrays, constants, "
                "and tuples, lists, mappings and dataclasses of them; leave it out in the collator, or convert it"
            )
        return _Node(type(node), tuple(items), tuple(walk(value, f"{path}.{key}") for key, value in items.items()))

    return walk(batch, path), leaves


def _items(node: Any) -> dict[Any, Any] | None:
    """The items of a container by key; None for any other object."""
    if isinstance(node, Mapping):
        return dict(node.items())
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return None


def _tensor(node: Tensor | np.ndarray[Any, Any], path: str) -> Tensor:
    """An array as a tensor, and a tensor on the CPU; `ValueError` if it cannot be sent to a worker."""
    if isinstance(node, np.ndarray):
        try:
            return torch.from_numpy(np.array(node))
        except TypeError:
            raise ValueError(
                f"{path} of the batch is a NumPy array of {node.dtype}, which cannot be a tensor: leave it out in the "
                "collator, or convert it"
            ) from None
    if node.requires_grad:
        raise ValueError(
            f"{path} of the batch requires gradients, and data get none: detach it in the data loader, or make it a "
            "parameter of the model"
        )
    if node.layout is not torch.strided or node.is_nested or node.is_quantized:
        raise ValueError(f"{path} of the batch is not a dense tensor: convert it, for example with .to_dense()")
    if node.is_meta:
        raise ValueError(f"{path} of the batch is on the meta device and has no values: make it on the CPU")
    if node.dtype not in DTYPES.values():
        raise ValueError(f"{path} of the batch is {dtype_name(node.dtype)}: convert it to one of {', '.join(DTYPES)}")
    return node.detach().cpu().resolve_conj().resolve_neg()


def unflatten(structure: Any, leaves: Sequence[Tensor]) -> Any:
    """Put tensors into the slots of a structure."""
    if isinstance(structure, _Slot):
        return leaves[structure.index]
    if isinstance(structure, _Node):
        return _container(structure.kind, structure.keys, [unflatten(part, leaves) for part in structure.parts])
    return structure


def _container(kind: type, keys: Sequence[Any], parts: list[Any]) -> Any:
    """A container like that of the user: models may use attributes of named tuples, encodings and dataclasses."""
    if issubclass(kind, list):
        return parts
    if issubclass(kind, tuple):
        return kind._make(parts) if hasattr(kind, "_make") else tuple(parts)
    items = dict(zip(keys, parts, strict=True))
    if issubclass(kind, Mapping):
        return kind(items) if issubclass(kind, UserDict | OrderedDict) else items
    made = object.__new__(kind)
    for name, part in items.items():
        object.__setattr__(made, name, part)
    return made


def structure_difference(first: Any, other: Any, path: str) -> str:
    """Describe the first difference between two structures, with its path; an empty text if they are equal."""
    if isinstance(first, _Node) and isinstance(other, _Node):
        if first.kind is not other.kind:
            return f"{path} is a {other.kind.__name__}, it was a {first.kind.__name__} in the first batch"
        if first.keys != other.keys:
            if issubclass(first.kind, list | tuple):
                return f"{path} has {len(other.keys)} items, it had {len(first.keys)} in the first batch"
            changed = sorted(map(str, {*first.keys} ^ {*other.keys})) or list(map(str, other.keys))
            return f"{path} has other keys than in the first batch, or another order of them: {', '.join(changed)}"
        pairs = [
            (a, b, f"{path}.{key}") for key, a, b in zip(first.keys, first.parts, other.parts, strict=True)
        ]  # fmt: skip
    elif first == other and type(first) is type(other):
        return ""
    else:
        return (
            f"{path} is {_shown(other)}, it was {_shown(first)} in the first batch: what is not a tensor is a constant "
            "of the traced program. Pass a number as a tensor, and leave out text in the collator"
        )
    return next(filter(None, (structure_difference(*pair) for pair in pairs)), "")


def _shown(part: Any) -> str:
    if isinstance(part, _Slot):
        return "a tensor"
    return f"a {part.kind.__name__}" if isinstance(part, _Node) else f"{part!r:.40}"


@dataclass(frozen=True)
class Length:
    """A size that varies from batch to batch, from `shortest` to `longest`.

    `places` are the dimensions that have it: the number of the tensor, the dimension, and what is added to the length.
    """

    places: tuple[tuple[int, int, int], ...]
    shortest: int
    longest: int


@dataclass(frozen=True)
class BatchLayout:
    """Turns the user's batches into the program's inputs, and rejects those it was not traced for."""

    structure: Any
    has_targets: bool
    values: tuple[Value, ...] = ()
    lengths: tuple[Length, ...] = ()

    def batch_size(self, leaves: Leaves) -> int:
        for (_, tensor), value in zip(leaves, self.values, strict=True):
            if tensor.dim() and value.shape and isinstance(value.shape[0], tuple):
                scale, offset = value.shape[0]
                return (tensor.shape[0] - offset) // scale
        return 1

    def size_of(self, leaves: Sequence[Tensor]) -> int:
        """The number of samples of a batch in the program's order."""
        return self.batch_size([("", leaf) for leaf in leaves])

    def slice(self, leaves: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """The samples from `start` to `stop`; tensors without a batch dimension are whole."""
        return [
            leaf[start:stop] if value.shape and isinstance(value.shape[0], tuple) else leaf
            for leaf, value in zip(leaves, self.values, strict=True)
        ]

    def restore(self, leaves: Sequence[Tensor]) -> Any:
        """The batch with these tensors: a pair of inputs and targets, or the inputs alone."""
        batch = unflatten(self.structure, leaves)
        return (batch["inputs"], batch["targets"]) if self.has_targets else batch["inputs"]

    def __call__(self, batch: Any) -> list[Tensor]:
        """The batch's tensors in the program's order; `ValueError` if they do not match."""
        structure, leaves = flatten(split_batch(batch, self.has_targets), "batch")
        if difference := structure_difference(self.structure, structure, "batch"):
            raise ValueError(difference)
        if problems := [*self._problems(leaves), *self._length_problems(leaves)]:
            raise ValueError("; ".join(problems))
        return [tensor for _, tensor in leaves]

    def _problems(self, leaves: Leaves) -> Iterator[str]:
        batch = self.batch_size(leaves)
        for (path, tensor), value in zip(leaves, self.values, strict=True):
            expected = tuple(resolve_dim(d, batch) for d in value.shape)
            varying = set(value.varying)
            if len(expected) != tensor.dim() or any(
                size != wanted for d, (size, wanted) in enumerate(zip(tensor.shape, expected, strict=True))
                if d not in varying
            ):  # fmt: skip
                yield (
                    f"{path} has shape {tuple(tensor.shape)}, the program was traced for {expected}: only the batch "
                    "size may vary, and lengths up to max_length (--max-length). Pad or crop it in the collator"
                )
            if dtype_name(tensor.dtype) != value.dtype:
                yield f"{path} is {dtype_name(tensor.dtype)}, the program was traced for {value.dtype}"

    def _length_problems(self, leaves: Leaves) -> Iterator[str]:
        for length in self.lengths:
            sizes = {
                f"dimension {d} of {leaves[i][0]}": leaves[i][1].shape[d] - offset
                for i, d, offset in length.places
                if leaves[i][1].dim() > d
            }
            for place, size in sizes.items():
                if not length.shortest <= size <= length.longest:
                    yield (
                        f"{place} is {size}, the program was traced for {length.shortest} to {length.longest}: pad or "
                        "crop it in the collator, or change max_length (--max-length)"
                    )
            if len(set(sizes.values())) > 1:
                yield f"{' and '.join(sizes)} must vary together, as in the first batches: pad them to one length"


def split_batch(batch: Any, has_targets: bool) -> dict[str, Any]:
    """A batch as `{"inputs": ..., "targets": ...}`."""
    items = _items(batch)
    is_sequence = isinstance(batch, list | tuple)
    if is_sequence and _is_samples(batch, has_targets):
        raise ValueError(
            f"the batch is a list of {len(batch)} samples, not a batch of tensors: stack them in the collator "
            "(collate_fn), for example with torch.utils.data.default_collate"
        )
    if not has_targets:
        return {"inputs": batch}
    if items is None or (is_sequence and len(batch) != 2):
        what = f"{len(batch)} items" if is_sequence else f"a {type(batch).__name__}"
        raise ValueError(f"{_PAIR}; got {what}")
    values = list(items.values())
    if is_sequence or (set(items) == {"inputs", "targets"}):
        return {"inputs": items.get("inputs", values[0]), "targets": items.get("targets", values[-1])}
    named = [key for key in items if key in _TARGET_NAMES]
    if len(named) == 1:
        return {"inputs": {k: v for k, v in items.items() if k != named[0]}, "targets": items[named[0]]}
    if len(values) == 2 and not isinstance(batch, Mapping):  # a dataclass
        return {"inputs": values[0], "targets": values[1]}
    raise ValueError(f"{_PAIR}; got a {type(batch).__name__} with {', '.join(map(str, items)) or 'nothing'}")


def _is_samples(batch: Sequence[Any], has_targets: bool) -> bool:
    """Whether a sequence holds samples, as a loader gives them without a collator."""
    if not isinstance(batch, list) or not batch or (has_targets and len(batch) == 2):
        return False
    kinds = {type(item) for item in batch}
    return len(kinds) == 1 and _items(batch[0]) is not None and (has_targets or not isinstance(batch[0], list))


def input_name(path: str, taken: set[str]) -> str:
    """`batch.inputs.input_ids` -> `inputs.input_ids`, restricted to safe characters and made unique."""
    name = "".join(c if (c.isalnum() and c.isascii()) or c in "._" else "_" for c in path.removeprefix("batch."))
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def example_tensors(leaves: Leaves, values: Sequence[Value], batch: int) -> list[Tensor]:
    """Empty tensors like the batch's, with `batch` samples where the first dimension is the batch size.

    A length of 1 becomes 2, because torch would take it for a constant.
    """

    def shape(tensor: Tensor, value: Value) -> list[int]:
        return [
            batch if isinstance(dim, tuple) else max(2, size) if d in value.varying else size
            for d, (size, dim) in enumerate(zip(tensor.shape, value.shape, strict=True))
        ]

    return [torch.empty(shape(t, v), dtype=t.dtype) for (_, t), v in zip(leaves, values, strict=True)]


def batch_size_of(leaves: Leaves) -> int:
    """The batch size is the first dimension of the first tensor that has one."""
    for _, tensor in leaves:
        if tensor.dim():
            return int(tensor.shape[0])
    raise ValueError("the batch contains no tensor with a batch dimension")
