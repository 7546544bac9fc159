"""Finds the sizes of a user's batches that vary from batch to batch, apart from the batch size.

Sizes that are equal in all of the first batches, or differ by one (inputs and targets shifted by a position), are one
length. Every batch must keep these relations, and no length may exceed the declared maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from ravnest.errors import TraceError
from ravnest.graph.batch import Leaves, Length, batch_size_of, input_name
from ravnest.graph.program import Value, dtype_name

__all__ = ["at_shortest", "find_lengths", "input_values", "narrowed"]

_MIN_LENGTH = 2  # torch treats sizes 0 and 1 as constants
_MAX_OFFSET = 1
_Sizes = dict[tuple[int, int], tuple[int, ...]]  # by tensor and dimension: the size in each batch


def find_lengths(examples: Sequence[Leaves], max_length: int | None) -> tuple[Length, ...]:
    """Find the lengths of the first batches.

    Args:
        examples: The tensors of the first batches, with their paths.
        max_length: The declared maximum of every length. If no size varies in the examples, the second dimension of the
            first tensor that has one is a length, with all second dimensions equal to it.

    Raises:
        ValueError: Sizes vary without a declared maximum, beyond it, or in a way that no program can follow.
    """
    sizes = _sizes(examples)
    varying = {place: seen for place, seen in sizes.items() if len(set(seen)) > 1}
    for (i, dim), seen in varying.items():
        path = examples[0][i][0]
        if dim == 0:
            raise ValueError(
                f"the first dimension of {path} varies from {min(seen)} to {max(seen)}, unlike the batch size, which "
                f"is that of {next(p for p, t in examples[0] if t.dim())}: it must be the batch size, or stay the same"
            )
        if max_length is None:
            raise ValueError(
                f"the batches have different lengths: dimension {dim} of {path} varies from {min(seen)} to {max(seen)} "
                f"in the first {len(seen)} batches. Declare the largest with max_length (--max-length), or pad all "
                "batches to one length in the collator"
            )
        if max(seen) > max_length:
            raise ValueError(f"dimension {dim} of {path} is {max(seen)} in a batch, max_length is {max_length}")
    if max_length is None:
        return ()
    return _grouped(varying or _second_dimensions(examples[0], sizes, max_length), max_length)


def _sizes(examples: Sequence[Leaves]) -> _Sizes:
    """The sizes that are not the batch size."""
    batches = [batch_size_of(leaves) for leaves in examples]
    sizes: _Sizes = {}
    for i, (path, first) in enumerate(examples[0]):
        shapes = [leaves[i][1].shape for leaves in examples]
        if len({len(shape) for shape in shapes}) > 1:
            raise ValueError(f"{path} has {first.dim()} dimensions in the first batch and others in later ones")
        for dim in range(first.dim()):
            seen = tuple(int(shape[dim]) for shape in shapes)
            if dim or seen != tuple(batches):
                sizes[i, dim] = seen
    return sizes


def _second_dimensions(first: Leaves, sizes: _Sizes, max_length: int) -> _Sizes:
    """The second dimensions that are as long as the first of them."""
    found = {place: seen for place, seen in sizes.items() if place[1] == 1 and (place[0], 0) not in sizes}
    if not found:
        raise ValueError(f"max_length is {max_length}, but no tensor of a batch has a second dimension: leave it out")
    (i, _), length = next(iter(found.items()))
    if length[0] > max_length:
        raise ValueError(f"dimension 1 of {first[i][0]} is {length[0]} in the first batch, max_length is {max_length}")
    return {place: seen for place, seen in found.items() if seen == length}


def _grouped(varying: _Sizes, max_length: int) -> tuple[Length, ...]:
    groups: list[list[tuple[tuple[int, int], tuple[int, ...]]]] = []
    for place, seen in varying.items():
        for group in groups:
            offsets = {a - b for a, b in zip(seen, group[0][1], strict=True)}
            if len(offsets) == 1 and abs(next(iter(offsets))) <= _MAX_OFFSET:
                group.append((place, seen))
                break
        else:
            groups.append([(place, seen)])
    lengths = []
    for group in groups:
        base = min(seen[0] for _, seen in group)
        largest = max(seen[0] for _, seen in group) - base
        places = tuple((i, dim, seen[0] - base) for (i, dim), seen in group)
        lengths.append(Length(places, _MIN_LENGTH, max_length - largest))
    return tuple(lengths)


def input_values(examples: Sequence[Leaves], lengths: Sequence[Length], *, dynamic_batch: bool) -> tuple[Value, ...]:
    """Describe the inputs of a program: batch sizes as `(1, 0)`, lengths by their maximum."""
    batches = [batch_size_of(leaves) for leaves in examples]
    longest = {(i, dim): length.longest + offset for length in lengths for i, dim, offset in length.places}
    taken: set[str] = set()

    def value(i: int, path: str, tensor: Tensor) -> Value:
        is_batched = dynamic_batch and tensor.dim() > 0
        is_batched &= all(leaves[i][1].shape[0] == size for leaves, size in zip(examples, batches, strict=True))
        shape = tuple(
            (1, 0) if dim == 0 and is_batched else longest.get((i, dim), int(size))
            for dim, size in enumerate(tensor.shape)
        )
        varying = tuple(dim for dim in range(tensor.dim()) if (i, dim) in longest)
        return Value(input_name(path, taken), dtype_name(tensor.dtype), shape, varying=varying)

    return tuple(value(i, path, tensor) for i, (path, tensor) in enumerate(examples[0]))


def at_shortest(values: Sequence[Value], lengths: Sequence[Length]) -> list[Value]:
    """The inputs at the shortest lengths; several lengths get different ones, so that their difference is seen."""
    shapes = [list(value.shape) for value in values]
    for number, length in enumerate(lengths):
        for i, dim, offset in length.places:
            shapes[i][dim] = min(length.shortest + number, length.longest) + offset
    return [
        msgspec.structs.replace(value, shape=tuple(shape), varying=())
        for value, shape in zip(values, shapes, strict=True)
    ]


def narrowed(lengths: Sequence[Length], ranges: Sequence[dict[int, tuple[int, int]]]) -> tuple[Length, ...]:
    """The lengths that the traced model accepts; `ranges` are the bounds of the dimensions of its inputs.

    Raises:
        TraceError: The model does not accept a length up to the declared maximum.
    """
    result = []
    for length in lengths:
        bounds = [
            (low - offset, high - offset)
            for i, dim, offset in length.places
            for low, high in (ranges[i].get(dim, (_MIN_LENGTH, length.longest + offset)),)
        ]
        shortest, longest = max(low for low, _ in bounds), min(high for _, high in bounds)
        if longest < length.longest:
            declared = length.longest + max(offset for _, _, offset in length.places)
            raise TraceError(
                f"the model takes lengths of at most {longest}, max_length is {declared}: lower max_length "
                "(--max-length), or make the model's tables, such as position embeddings, longer"
            )
        result.append(Length(length.places, max(shortest, _MIN_LENGTH), longest))
    return tuple(result)
