"""Dry run of a stage on meta tensors, which have sizes but no memory, to bound its memory use.

The size of every result is checked before the next op runs, and torch checks shapes and dtypes on the way. Nothing is
allocated, so rejecting a stage that needs a terabyte costs nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ravnest.errors import ProgramError
from ravnest.graph.interpreter import run_op
from ravnest.graph.limits import StageLimits
from ravnest.graph.ops import ALLOWED, LITERAL
from ravnest.graph.program import (
    DTYPES,
    BackwardPass,
    Draw,
    Init,
    Op,
    Stage,
    Value,
    actual_shapes,
    dtype_name,
    resolve_dim,
    storage_id,
)
from ravnest.graph.validate import location

__all__ = ["dry_run", "dry_run_batch"]

_META = torch.device("meta")


def dry_run(stage: Stage, limits: StageLimits) -> None:
    """Reject a stage whose ops do not fit together or would exceed `limits`."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in dict.fromkeys((2, limits.batch)):
            _run_ops(stage, batch, limits)
        if stage.init is not None:
            _run_init(stage.init, stage, limits)


def _written_tensor(op: Op, env: dict[str, Any]) -> Tensor:
    """The tensor that an in-place op writes to."""
    target = op.args[0]
    assert isinstance(target, str)
    tensor: Tensor = env[target[1:]]
    return tensor


def dry_run_batch(stage: Stage, batch: int, limits: StageLimits, sizes: tuple[int, ...] = ()) -> None:
    """Dry run at another batch size, or with other varying sizes of the inputs, before its first microbatch."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _run_ops(stage, batch, limits, actual_shapes(stage.inputs, batch, sizes))


def _run_ops(stage: Stage, batch: int, limits: StageLimits, shapes: Sequence[tuple[int, ...]] | None = None) -> None:
    """Run at the given shapes of the inputs, or at their largest."""
    largest = shapes is None
    if shapes is None:
        shapes = [
            tuple(resolve_dim(d, batch) for d in ((v.number,) if v.number is not None else v.shape))
            for v in stage.inputs
        ]
    env: dict[str, Any] = {v.name: _example(v, shape) for v, shape in zip(stage.inputs, shapes, strict=True)}
    env.update((s.name, _meta(s.shape, s.dtype)) for s in stage.state)
    protected = {storage_id(env[s.name]) for s in stage.state if s.kind == "parameter" or not s.mutated}
    meter = _Meter(limits)
    for i, op in enumerate(stage.ops):
        where = location("op", i, op)
        if ALLOWED.get(op.op) == "writes" and storage_id(_written_tensor(op, env)) in protected:
            raise ProgramError(f"{where}: it writes to the memory of a parameter or a constant buffer")
        meter.run(where, op, env)
        if op.backward is not None:
            _run_backward(where, op, op.backward, env, meter)
    for value in (*stage.outputs, *([] if stage.prediction is None else [stage.prediction])):
        _check_output(value, env[value.name], batch, exempt=() if largest else value.varying)


def _run_backward(where: str, op: Op, backward: BackwardPass, env: dict[str, Any], meter: _Meter) -> None:
    """Run the backward pass of an op; the gradients must have the shapes and dtypes of the op's inputs."""
    outputs, inputs, saved = ([env[name[1:]] for name in names] for names in cast(tuple[tuple[str, ...], ...], op.args))
    if not all(t.is_floating_point() or t.is_complex() for t in outputs):
        raise ProgramError(f"{where}: its outputs must be floating-point tensors")
    gradients = [_meta(tuple(t.shape), dtype_name(t.dtype)) for t in outputs]
    local: dict[str, Any] = dict(zip((*backward.gradients, *backward.saved), (*gradients, *saved), strict=True))
    protected = {storage_id(t) for t in local.values() if isinstance(t, Tensor)}
    for i, inner in enumerate(backward.ops):
        inside = f"{where}, {location('backward op', i, inner)}"
        if ALLOWED.get(inner.op) == "writes" and storage_id(_written_tensor(inner, local)) in protected:
            raise ProgramError(f"{inside}: it writes to a tensor that its backward pass did not make")
        meter.run(inside, inner, local)
    for name, tensor in zip(backward.results, inputs, strict=True):
        if name and (local[name].shape, local[name].dtype) != (tensor.shape, tensor.dtype):
            raise ProgramError(
                f"{where}: the gradient of an input is {dtype_name(local[name].dtype)} {tuple(local[name].shape)}, "
                f"the input {dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            )


def _run_init(init: Init, stage: Stage, limits: StageLimits) -> None:
    env: dict[str, Any] = {}
    meter = _Meter(limits)
    for i, op in enumerate(init.ops):
        if op.op == LITERAL:
            _, dtype, shape = cast(tuple[Any, str, tuple[int, ...]], op.args)  # checked by `validate`
            env[op.outs[0]] = _meta(shape, dtype[1:])
        else:
            meter.run(location("init op", i, op), op, env)
    for i, draw in enumerate(init.draws):
        where = location("draw", i, draw)
        meter.run(where, _draw_op(draw), {"scratch": _meta(draw.shape, draw.dtype)})
    for item in stage.state:
        made = env.get(item.target)
        if made is not None and (tuple(made.shape) != item.shape or dtype_name(made.dtype) != item.dtype):
            raise ProgramError(
                f"the init list makes {item.target!r} with {dtype_name(made.dtype)} {tuple(made.shape)}, "
                f"the stage declares {item.dtype} {item.shape}"
            )


def _draw_op(draw: Draw) -> Op:
    if draw.op.split(".")[1].endswith("_"):
        return Op(draw.op, ("",), ("%scratch", *draw.args))
    return Op(draw.op, ("drawn",), draw.args)


class _Meter:
    """Runs ops one by one and sums the sizes of their results."""

    def __init__(self, limits: StageLimits) -> None:
        self.limits = limits
        self.total_bytes = 0

    def run(self, where: str, op: Op, env: dict[str, Any]) -> None:
        _guarded(where, lambda: run_op(op, env, _META))
        for out in filter(None, op.outs):
            self._measure(where, env[out])

    def _measure(self, where: str, result: Any) -> None:
        if isinstance(result, bool | int | float):
            return
        if not isinstance(result, Tensor) or dtype_name(result.dtype) not in DTYPES:
            raise ProgramError(f"{where}: its result is not a tensor of an allowed dtype")
        if result.device != _META:
            raise ProgramError(f"{where}: its result is on {result.device}, not on the device of its arguments")
        size = result.numel() * result.element_size()
        self.total_bytes += size
        if size > self.limits.value_bytes:
            raise ProgramError(f"{where}: its result has {size} bytes, the limit is {self.limits.value_bytes}")
        if self.total_bytes > self.limits.total_bytes:
            raise ProgramError(f"{where}: the values of the stage exceed the limit of {self.limits.total_bytes} bytes")


def _guarded(where: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:  # torch rejects bad arguments in many ways, all of them about this op
        raise ProgramError(f"{where}: {type(error).__name__}: {str(error)[:300]}") from None


def _meta(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype], device=_META)


def _example(value: Value, shape: tuple[int, ...]) -> Any:
    """A meta tensor or number in place of an input."""
    return shape[0] if value.number is not None else _meta(shape, value.dtype)


def _check_output(value: Value, made: Any, batch: int, exempt: tuple[int, ...]) -> None:
    """Reject an output that is not as declared; the sizes of the `exempt` dimensions may be smaller."""
    is_number = value.number is not None
    declared = tuple(resolve_dim(d, batch) for d in ((value.number,) if value.number is not None else value.shape))
    sizes, dtype = ((made,), "int") if is_number else (tuple(made.shape), dtype_name(made.dtype))
    if len(sizes) != len(declared) or dtype != value.dtype or any(
        not 0 <= size <= wanted if d in exempt else size != wanted
        for d, (size, wanted) in enumerate(zip(sizes, declared, strict=True))
    ):  # fmt: skip
        raise ProgramError(
            f"output {value.name!r} is declared as {value.dtype} {declared} but is {dtype} {sizes} at batch {batch}"
        )
