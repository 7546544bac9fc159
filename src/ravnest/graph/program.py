"""Programs and stages: a model as a flat list of aten calls over named values. Data, never code.

An argument of a call is a plain JSON value. The first character of a string is its type:

    %name   a value            $float32   a dtype            @   the interpreter's device
    =text   a string           ~channels_last   a memory format    #inf #-inf   a float JSON cannot write

A size that depends on the batch is written `(a, b)`, which means `a * batch + b`.

A `Program` is the whole model, held by the requester; a `Stage` is the part that one node receives, complete in
itself. Both consist of the same ops, values and state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ravnest.core.config import Record
from ravnest.errors import FrameError

__all__ = [
    "Arg",
    "BackwardPass",
    "Dim",
    "Draw",
    "Init",
    "Op",
    "Program",
    "Stage",
    "StateSpec",
    "Value",
    "DTYPES",
    "actual_shapes",
    "dtype_name",
    "map_refs",
    "num_bytes",
    "refs",
    "resolve_dim",
    "storage_id",
    "varying_sizes",
]

if TYPE_CHECKING:
    from ravnest.graph.batch import BatchLayout
    from ravnest.graph.init_recorder import InitLog
    from ravnest.graph.pretrained import PretrainedWeights


Dim = int | tuple[int, int]
Atom = None | bool | int | float | str
Arg = Atom | tuple[Atom, ...]

DTYPES: dict[str, torch.dtype] = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
SCALARS = ("int", "float", "boolean")  # a value that is a Python number, not a tensor
NUMBER_BYTES = 8


class Value(Record, frozen=True):
    """A named tensor: dtype, shape, and whether it gets a gradient.

    A value can also be a number that depends on the batch size: `dtype` is "int" and `number` its formula.

    `varying` are the dimensions whose size depends on the length of the data: `shape` has their maximum, and each
    microbatch comes with the actual sizes. `(0,)` for a number that does.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] = ()
    grad: bool = False
    number: Dim | None = None
    varying: tuple[int, ...] = ()


class StateSpec(Record, frozen=True):
    """A parameter or buffer: `name` is the value in the program, `target` its name in the model.

    `owner` is the stage that updates it; other stages that read it borrow it. Frozen state is owned by every stage that
    reads it.
    """

    name: str
    target: str
    dtype: str
    shape: tuple[int, ...] = ()
    kind: str = "parameter"
    trainable: bool = True
    persistent: bool = True
    mutated: bool = False
    owner: int = 0

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def is_frozen(self) -> bool:
        """Whether training leaves it as it is: a parameter without gradient, or a buffer that the model only reads."""
        return not (self.trainable or self.mutated)


class Op(Record, frozen=True):
    """One call: `outs = op(*args, **kwargs)`. An unused result has an empty name.

    `ravnest.with_gradient` has the arguments `(outputs, inputs, saved)` and a `backward` pass of its own. Its results
    are the outputs, whose gradients `backward` turns into those of the inputs.
    """

    op: str
    outs: tuple[str, ...]
    args: tuple[Arg, ...] = ()
    kwargs: dict[str, Arg] = msgspec.field(default_factory=dict)
    no_grad: bool = False
    no_autocast: bool = False
    backward: BackwardPass | None = None


class BackwardPass(Record, frozen=True):
    """The backward pass of an op, with names of its own.

    It computes `results`, the gradients of the op's inputs ("" for none), from the gradients of the op's results and
    the saved values, which are named by `gradients` and `saved` in the order of the op.
    """

    gradients: tuple[str, ...]
    saved: tuple[str, ...] = ()
    ops: tuple[Op, ...] = ()
    results: tuple[str, ...] = ()


class Draw(Record, frozen=True):
    """Random numbers drawn and discarded before init op `at`, because they belong to another stage."""

    at: int
    op: str
    dtype: str
    shape: tuple[int, ...]
    args: tuple[Arg, ...] = ()


class Init(Record, frozen=True):
    """Initialization of state: ops that make the tensors named `%target`, in the order of the model."""

    ops: tuple[Op, ...] = ()
    draws: tuple[Draw, ...] = ()


class Stage(Record, frozen=True, kw_only=True):
    """One node's part of the program, complete: inputs, outputs, state and ops."""

    format: str = "ravnest-stage/2"
    index: int
    count: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    state: tuple[StateSpec, ...]
    ops: tuple[Op, ...]
    init: Init | None = None
    prediction: Value | None = None  # of the last stage: the scores of the next token at every position

    @property
    def parameters(self) -> tuple[StateSpec, ...]:
        return tuple(s for s in self.state if s.kind == "parameter")

    @property
    def buffers(self) -> tuple[StateSpec, ...]:
        return tuple(s for s in self.state if s.kind == "buffer")

    @property
    def borrowed(self) -> tuple[StateSpec, ...]:
        """Parameters owned by another stage: their values come forward, their gradients go back."""
        return tuple(s for s in self.state if s.owner != self.index)


@dataclass(frozen=True)
class Program:
    """The whole model and its loss. `outputs[0]` is the loss, the others are metrics.

    `values` describes every value, `sources[i]` is the line of the model that op i comes from, `atomic_ranges` are
    the ranges `(first, last)` of ops that must stay in one stage, and `ties` maps other names of a tied parameter to
    its canonical name. `idle` is state that the forward pass never reads. `tensors` are the model's own tensors; those
    of a program traced from a builder are fake, and `init_log` records how to make them; with `pretrained`, most of
    them are read from files instead. `prediction` is the model's output, if it is a score for every token at every
    position. `untraced` describes backward passes of the model's own that could not be traced: there, autograd
    differentiates the forward pass.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    state: tuple[StateSpec, ...]
    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    feed: BatchLayout
    sources: tuple[str, ...] = ()
    atomic_ranges: tuple[tuple[int, int], ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[StateSpec, ...] = ()
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    init_log: InitLog | None = None
    pretrained: PretrainedWeights | None = None
    prediction: Value | None = None
    untraced: tuple[str, ...] = ()

    @property
    def is_self_initialising(self) -> bool:
        """Whether stages make their own initial tensors, from the seed."""
        return self.init_log is not None and self.pretrained is None

    @property
    def has_batch_dimension(self) -> bool:
        """Whether it takes batches of different sizes."""
        return any(v.shape and isinstance(v.shape[0], tuple) for v in self.inputs)

    @property
    def num_parameters(self) -> int:
        return sum(prod(s.shape) for s in self.state if s.kind == "parameter")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def resolve_dim(dim: Dim, batch: int) -> int:
    return dim if isinstance(dim, int) else dim[0] * batch + dim[1]


def varying_sizes(values: Iterable[Value], items: Iterable[Any]) -> tuple[int, ...]:
    """The sizes of `items` that depend on the length of the data, in order."""
    return tuple(
        int(item if value.number is not None else item.shape[dim])
        for value, item in zip(values, items, strict=True)
        for dim in value.varying
    )


def actual_shapes(values: Iterable[Value], batch: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The shape of each value in a microbatch of `batch` samples with these varying sizes; of a number, the number.

    Raises:
        FrameError: A size is missing, too many or beyond its maximum.
    """
    remaining = iter(sizes)
    shapes: list[tuple[int, ...]] = []
    for value in values:
        shape = [resolve_dim(d, batch) for d in (value.shape if value.number is None else (value.number,))]
        for dim in value.varying:
            size = next(remaining, -1)
            if not 0 <= size <= shape[dim]:
                raise FrameError(f"dimension {dim} of {value.name!r:.60} must be 0 to {shape[dim]}, got {size}")
            shape[dim] = size
        shapes.append(tuple(shape))
    if next(remaining, None) is not None:
        raise FrameError(f"more varying sizes than expected: {len(sizes)}")
    return shapes


def num_bytes(value: Value, batch: int) -> int:
    """Size of a value in a microbatch of `batch` samples; with lengths that vary, the largest."""
    if value.dtype in SCALARS:
        return NUMBER_BYTES
    return prod(resolve_dim(d, batch) for d in value.shape) * DTYPES[value.dtype].itemsize


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor while it is alive, on fake and meta tensors too."""
    return int(tensor.untyped_storage()._cdata)


def refs(op: Op) -> Iterator[str]:
    """Names of the values an op reads, in order, with repeats."""
    for arg in (*op.args, *op.kwargs.values()):
        for atom in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(atom, str) and atom.startswith("%"):
                yield atom[1:]


def map_refs(op: Op, rename: Callable[[str], str]) -> Op:
    """The op with the names of the values it reads replaced."""

    def one(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(one(a) for a in arg)
        return "%" + rename(arg[1:]) if isinstance(arg, str) and arg.startswith("%") else arg

    return msgspec.structs.replace(
        op, args=tuple(one(a) for a in op.args), kwargs={k: one(a) for k, a in op.kwargs.items()}
    )
