"""What every value looks like: the program is run on fake tensors, at two batch sizes.

A dimension that is `d` at batch p and `e` at batch q is `a * batch + b` with a = (e - d) / (q - p).
A value gets a gradient if autograd says so in that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..core.errors import TraceError
from .program import DTYPES, SCALARS, Dim, Op, State, Value, dtype_name, resolve_dim
from .run import run_op

__all__ = ["fake_inputs", "fake_state", "infer"]

BATCHES = (2, 5)
_Seen = tuple[str, tuple[int, ...], bool]  # dtype, shape, gets a gradient
_CPU = torch.device("cpu")


def fake_state(state: Sequence[State]) -> dict[str, Tensor]:
    """Tensors without memory in place of parameters and buffers (call under a FakeTensorMode)."""
    return {
        s.target: torch.empty(s.shape, dtype=DTYPES[s.dtype]).requires_grad_(
            s.kind == "parameter" and s.trainable and DTYPES[s.dtype].is_floating_point
        )
        for s in state
    }


def fake_inputs(values: Sequence[Value], batch: int) -> list[Tensor]:
    return [
        torch.empty([resolve_dim(d, batch) for d in v.shape], dtype=DTYPES[v.dtype]).requires_grad_(v.grad)
        for v in values
    ]


def infer(
    inputs: Sequence[Value], state: Sequence[State], ops: Sequence[Op], sources: Sequence[str]
) -> tuple[dict[str, Value], set[str]]:
    """A description of every value, inputs included, and the names of those that have none.

    A value has no description if a size of it is not `a * batch + b`; it cannot cross a cut.
    """
    seen = [_observe(inputs, state, ops, sources, batch) for batch in BATCHES]
    described = {name: _describe(name, seen[0][name], seen[1][name]) for name in seen[0]}
    unknown = {name for name, value in described.items() if value is None}
    return {name: value or _nameless(name, seen[0][name]) for name, value in described.items()}, unknown


def _observe(
    inputs: Sequence[Value], state: Sequence[State], ops: Sequence[Op], sources: Sequence[str], batch: int
) -> dict[str, _Seen]:
    with FakeTensorMode():
        env: dict[str, Any] = {v.name: t for v, t in zip(inputs, fake_inputs(inputs, batch), strict=True)}
        tensors = fake_state(state)
        env.update({s.name: tensors[s.target] for s in state})
        for op, source in zip(ops, sources, strict=True):
            try:
                run_op(op, env, _CPU)
            except Exception as error:  # any refusal by torch is about this op
                raise TraceError(f"{source}: {op.op} does not work on its own: {error}") from error
        for item in state:
            del env[item.name]
        return {name: _look(value) for name, value in env.items()}


def _look(value: Any) -> _Seen:
    if isinstance(value, Tensor):
        return dtype_name(value.dtype), tuple(int(d) for d in value.shape), value.requires_grad
    return {bool: "boolean", int: "int", float: "float"}[type(value)], (int(value),), False


def _describe(name: str, small: _Seen, large: _Seen) -> Value | None:
    if len(small[1]) != len(large[1]) or small[0] != large[0] or small[0] in ("boolean", "float"):
        return None
    shape = tuple(_dim(d, e) for d, e in zip(small[1], large[1], strict=True))
    if None in shape:
        return None
    dims = cast(tuple[Dim, ...], shape)
    return Value(name, "int", number=dims[0]) if small[0] == "int" else Value(name, small[0], dims, grad=small[2])


def _nameless(name: str, seen: _Seen) -> Value:
    """Enough for a value that stays where it is made."""
    return Value(name, seen[0], () if seen[0] in SCALARS else seen[1], grad=seen[2])


def _dim(small: int, large: int) -> Dim | None:
    scale, rest = divmod(large - small, BATCHES[1] - BATCHES[0])
    if rest:
        return None
    return small if scale == 0 else (scale, small - scale * BATCHES[0])
