"""Shape inference: dtype, shape and gradient of every value, from runs on fake tensors at two batch sizes.

A dimension that is `d` at batch p and `e` at batch q is `a * batch + b` with a = (e - d) / (q - p).
A value gets a gradient if autograd requires one in that run.

If lengths vary, the program runs at the longest and at the shortest ones. A dimension that differs between these is
varying: its formula gives the size at the longest, and it must not be larger at the shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ravnest.errors import TraceError
from ravnest.graph.interpreter import run_op
from ravnest.graph.program import DTYPES, SCALARS, Dim, Op, StateSpec, Value, dtype_name, resolve_dim

__all__ = ["fake_inputs", "fake_state", "infer"]

BATCHES = (2, 5)
_Observed = tuple[str, tuple[int, ...], bool]  # dtype, shape, requires gradient
_CPU = torch.device("cpu")


def fake_state(state: Sequence[StateSpec]) -> dict[str, Tensor]:
    """Fake tensors in place of parameters and buffers (call under a FakeTensorMode)."""
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
    inputs: Sequence[Value],
    state: Sequence[StateSpec],
    ops: Sequence[Op],
    sources: Sequence[str],
    shortest: Sequence[Value] | None = None,
) -> tuple[dict[str, Value], set[str]]:
    """Describe every value, inputs included; return also the names of those that cannot be described.

    A value cannot be described if one of its sizes is not `a * batch + b`; it cannot cross a cut. `shortest` are the
    inputs at the shortest lengths, if lengths vary.
    """
    observed = [_observe(inputs, state, ops, sources, batch) for batch in BATCHES]
    described = {name: _describe(name, observed[0][name], observed[1][name]) for name in observed[0]}
    if shortest is not None:
        short = [_observe(shortest, state, ops, sources, batch) for batch in BATCHES]
        described = {
            name: _varying(value, _describe(name, short[0][name], short[1][name])) for name, value in described.items()
        }
    undescribed = {name for name, value in described.items() if value is None}
    return {name: value or _at_one_size(name, observed[0][name]) for name, value in described.items()}, undescribed


def _observe(
    inputs: Sequence[Value], state: Sequence[StateSpec], ops: Sequence[Op], sources: Sequence[str], batch: int
) -> dict[str, _Observed]:
    with FakeTensorMode():
        env: dict[str, Any] = {v.name: t for v, t in zip(inputs, fake_inputs(inputs, batch), strict=True)}
        tensors = fake_state(state)
        env.update({s.name: tensors[s.target] for s in state})
        for op, source in zip(ops, sources, strict=True):
            try:
                run_op(op, env, _CPU)
            except Exception as error:  # torch rejects bad arguments in many ways, all of them about this op
                raise TraceError(f"{source}: {op.op} fails outside the model: {error}") from error
        for item in state:
            del env[item.name]
        return {name: _spec(value) for name, value in env.items()}


def _spec(value: Any) -> _Observed:
    if isinstance(value, Tensor):
        return dtype_name(value.dtype), tuple(int(d) for d in value.shape), value.requires_grad
    return {bool: "boolean", int: "int", float: "float"}[type(value)], (int(value),), False


def _describe(name: str, small: _Observed, large: _Observed) -> Value | None:
    if len(small[1]) != len(large[1]) or small[0] != large[0] or small[0] in ("boolean", "float"):
        return None
    shape = tuple(_dim(d, e) for d, e in zip(small[1], large[1], strict=True))
    if None in shape:
        return None
    dims = cast(tuple[Dim, ...], shape)
    return Value(name, "int", number=dims[0]) if small[0] == "int" else Value(name, small[0], dims, grad=small[2])


def _varying(longest: Value | None, shortest: Value | None) -> Value | None:
    """Describe a value by its descriptions at the longest and the shortest lengths."""
    if longest is None or shortest is None or len(longest.shape) != len(shortest.shape):
        return None
    pairs = (
        [(longest.number, shortest.number)]
        if longest.number is not None
        else zip(longest.shape, shortest.shape, strict=True)
    )
    varying = []
    for i, (long, short) in enumerate(pairs):
        assert long is not None
        assert short is not None
        if any(resolve_dim(long, batch) < resolve_dim(short, batch) for batch in (1, *BATCHES)):
            return None
        if long != short:
            varying.append(i)
    return msgspec.structs.replace(longest, varying=tuple(varying))


def _at_one_size(name: str, observed: _Observed) -> Value:
    """Describe a value that never crosses a cut by its sizes at one batch size."""
    return Value(name, observed[0], () if observed[0] in SCALARS else observed[1], grad=observed[2])


def _dim(small: int, large: int) -> Dim | None:
    scale, rest = divmod(large - small, BATCHES[1] - BATCHES[0])
    if rest:
        return None
    return small if scale == 0 else (scale, small - scale * BATCHES[0])
