"""What a model is to us: a flat list of aten calls over named values. Data, never code.

An argument of a call is a plain JSON value. A string starts with one sign that says what it is:

    %name   a value            $float32   a dtype            @   the runner's device
    =text   a string           ~channels_last   a memory format    #inf #-inf   a float JSON cannot write

A size that depends on the batch is written `(a, b)`, which means `a * batch + b`.

`Program` is what the requester holds of the whole model; a `Stage` is the part that one node is given,
and all that it is given. Both are made of the same ops, values and state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import torch

if TYPE_CHECKING:
    from .batch import Feed
    from .recorder import InitLog

__all__ = [
    "Arg", "Dim", "Draw", "Init", "Op", "Program", "Stage", "State", "Value",
    "DTYPES", "dtype_name", "map_refs", "num_bytes", "refs", "resolve_dim",
]  # fmt: skip

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


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A strict record: immutable, no unknown fields, defaults left out of the JSON."""


class Value(_Data, frozen=True):
    """A tensor that has a name: what it looks like, and whether a gradient comes back for it.

    A value may also be a number that the batch size determines (`dtype` "int"); `number` says which.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] = ()
    grad: bool = False
    number: Dim | None = None


class State(_Data, frozen=True):
    """A parameter or buffer: `name` is the value in the program, `target` its name in the model.

    `owner` is the stage that keeps and updates it; another stage that uses it borrows it.
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


class Op(_Data, frozen=True):
    """One call: `outs = op(*args, **kwargs)`. A result nobody uses has the empty name."""

    op: str
    outs: tuple[str, ...]
    args: tuple[Arg, ...] = ()
    kwargs: dict[str, Arg] = {}
    no_grad: bool = False
    no_autocast: bool = False


class Draw(_Data, frozen=True):
    """Random numbers that are drawn and thrown away before init op `at`: they belong to another stage."""

    at: int
    op: str
    dtype: str
    shape: tuple[int, ...]
    args: tuple[Arg, ...] = ()


class Init(_Data, frozen=True):
    """How state gets its first values: ops that make the tensors named `%target`, in the model's own order."""

    ops: tuple[Op, ...] = ()
    draws: tuple[Draw, ...] = ()


class Stage(_Data, frozen=True, kw_only=True):
    """One node's share of the program, complete: what comes in, what goes out, what it keeps, what it computes."""

    format: str = "ravnest-stage/1"
    index: int
    count: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    state: tuple[State, ...]
    ops: tuple[Op, ...]
    init: Init | None = None

    @property
    def parameters(self) -> tuple[State, ...]:
        return tuple(s for s in self.state if s.kind == "parameter")

    @property
    def buffers(self) -> tuple[State, ...]:
        return tuple(s for s in self.state if s.kind == "buffer")

    @property
    def borrowed(self) -> tuple[State, ...]:
        """Parameters that another stage owns: their values come forward, their gradients go back."""
        return tuple(s for s in self.state if s.owner != self.index)


@dataclass(frozen=True)
class Program:
    """The whole model and its loss. `outputs[0]` is the loss, the others are metrics.

    `values` describes every value, `sources[i]` is the line of the model that op i comes from, `islands` are
    the stretches `(first, last)` of ops that must stay together, and `ties` maps a second name of a parameter
    to the name it is kept under. `idle` is state that the forward pass never reads. `tensors` are the model's own
    tensors; those of a program traced from a builder are fake, and `log` knows how to make them.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    state: tuple[State, ...]
    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    feed: Feed
    sources: tuple[str, ...] = ()
    islands: tuple[tuple[int, int], ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[State, ...] = ()
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    log: InitLog | None = None

    @property
    def num_parameters(self) -> int:
        return sum(prod(s.shape) for s in self.state if s.kind == "parameter")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def resolve_dim(dim: Dim, batch: int) -> int:
    return dim if isinstance(dim, int) else dim[0] * batch + dim[1]


def num_bytes(value: Value, batch: int) -> int:
    """Size of a value in a microbatch of `batch` samples."""
    if value.dtype in SCALARS:
        return NUMBER_BYTES
    return prod(resolve_dim(d, batch) for d in value.shape) * DTYPES[value.dtype].itemsize


def refs(op: Op) -> Iterator[str]:
    """Names of the values an op reads, in order, repeats included."""
    for arg in (*op.args, *op.kwargs.values()):
        for atom in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(atom, str) and atom.startswith("%"):
                yield atom[1:]


def map_refs(op: Op, rename: Callable[[str], str]) -> Op:
    """The same op with the names of the values it reads changed."""

    def one(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(one(a) for a in arg)
        return "%" + rename(arg[1:]) if isinstance(arg, str) and arg.startswith("%") else arg

    return msgspec.structs.replace(
        op, args=tuple(one(a) for a in op.args), kwargs={k: one(a) for k, a in op.kwargs.items()}
    )
