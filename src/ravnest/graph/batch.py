"""Converts a user's batch to the flat list of named tensors that a program takes.

A batch is `(inputs, targets)`. `inputs` is a tensor, a tuple (positional arguments) or a mapping (keyword
arguments); `targets` is passed to the loss. Without a loss a batch is the inputs alone. Everything in it that is not
a tensor is a constant of the program and must be the same in every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ravnest.graph.program import Value, dtype_name, resolve_dim

__all__ = ["BatchLayout", "flatten", "unflatten"]


@dataclass(frozen=True)
class _Slot:
    """Placeholder of the n-th tensor in a batch's structure."""

    index: int


def flatten(batch: Any, path: str) -> tuple[Any, list[tuple[str, Tensor]]]:
    """Split a batch into its structure with numbered slots and its tensors with their paths, in order."""
    leaves: list[tuple[str, Tensor]] = []

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            leaves.append((path, node))
            return _Slot(len(leaves) - 1)
        if isinstance(node, Mapping):
            return {key: walk(value, f"{path}.{key}") for key, value in node.items()}
        if isinstance(node, list | tuple):
            return tuple(walk(value, f"{path}.{i}") for i, value in enumerate(node))
        if node is None or isinstance(node, bool | int | float | str):
            return node
        raise ValueError(
            f"{path} of the batch is a {type(node).__name__}: a batch contains tensors, numbers, strings, "
            "and tuples, lists and dicts of them"
        )

    return walk(batch, path), leaves


def unflatten(structure: Any, leaves: Sequence[Tensor]) -> Any:
    """Put tensors into the slots of a structure."""
    if isinstance(structure, _Slot):
        return leaves[structure.index]
    if isinstance(structure, dict):
        return {key: unflatten(value, leaves) for key, value in structure.items()}
    if isinstance(structure, tuple):
        return tuple(unflatten(value, leaves) for value in structure)
    return structure


def _problems(leaves: Sequence[tuple[str, Tensor]], values: Sequence[Value], batch: int) -> Iterator[str]:
    for (path, tensor), value in zip(leaves, values, strict=True):
        expected = tuple(resolve_dim(d, batch) for d in value.shape)
        if tuple(tensor.shape) != expected:
            yield f"{path} has shape {tuple(tensor.shape)}, the program was traced for {expected}"
        if dtype_name(tensor.dtype) != value.dtype:
            yield f"{path} is {dtype_name(tensor.dtype)}, the program was traced for {value.dtype}"


@dataclass(frozen=True)
class BatchLayout:
    """Turns the user's batches into the program's inputs, and rejects those it was not traced for."""

    structure: Any
    has_targets: bool
    values: tuple[Value, ...] = ()

    def batch_size(self, leaves: Sequence[tuple[str, Tensor]]) -> int:
        for (_, tensor), value in zip(leaves, self.values, strict=True):
            if tensor.dim() and value.shape and isinstance(value.shape[0], tuple):
                scale, offset = value.shape[0]
                return (tensor.shape[0] - offset) // scale
        return 1

    def __call__(self, batch: Any) -> list[Tensor]:
        """The batch's tensors in the program's order; `ValueError` if they do not match."""
        structure, leaves = flatten(split_batch(batch, self.has_targets), "batch")
        if structure != self.structure:
            raise ValueError(f"the structure of the batch differs from the traced one: {structure}")
        if problems := list(_problems(leaves, self.values, self.batch_size(leaves))):
            raise ValueError("; ".join(problems) + ". All batches must have the same shapes except for the batch size")
        return [tensor for _, tensor in leaves]


def split_batch(batch: Any, has_targets: bool) -> dict[str, Any]:
    """A batch as `{"inputs": ..., "targets": ...}`."""
    if not has_targets:
        return {"inputs": batch}
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ValueError(
            f"a batch must be a pair (inputs, targets), got a {type(batch).__name__}; "
            "with loss=None it is the inputs alone and the model returns the loss"
        )
    return {"inputs": batch[0], "targets": batch[1]}


def input_name(path: str, taken: set[str]) -> str:
    """`batch.inputs.input_ids` -> `inputs.input_ids`, restricted to safe characters and made unique."""
    name = "".join(c if (c.isalnum() and c.isascii()) or c in "._" else "_" for c in path.removeprefix("batch."))
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def example_tensors(leaves: Sequence[tuple[str, Tensor]], batch: int) -> list[Tensor]:
    """Empty tensors like the batch's, with `batch` samples where the first dimension is the batch size."""
    size = batch_size_of(leaves)
    return [
        torch.empty((batch, *t.shape[1:]) if t.dim() and t.shape[0] == size else t.shape, dtype=t.dtype)
        for _, t in leaves
    ]


def batch_size_of(leaves: Sequence[tuple[str, Tensor]]) -> int:
    """The batch size is the first dimension of the first tensor that has one."""
    for _, tensor in leaves:
        if tensor.dim():
            return int(tensor.shape[0])
    raise ValueError("the batch contains no tensor with a batch dimension")
