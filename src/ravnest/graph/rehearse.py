"""Run a stage on tensors that have sizes but no memory, and see what it would take.

Every op's result is measured before the next op runs; torch's own checks of shapes and dtypes happen on the way.
Nothing is allocated, so a stage that asks for a terabyte is refused at no cost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ..core.errors import ProgramError
from .check_parts import place
from .limits import Limits
from .ops import ALLOWED, LITERAL
from .program import DTYPES, Draw, Init, Op, Stage, Value, dtype_name, resolve_dim
from .run import run_op

__all__ = ["rehearse", "rehearse_batch"]

_META = torch.device("meta")


def rehearse(stage: Stage, limits: Limits) -> None:
    """Refuse a stage whose ops do not fit together or would take more than `limits`."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in dict.fromkeys((2, limits.batch)):
            _rehearse_ops(stage, batch, limits)
        if stage.init is not None:
            _rehearse_init(stage.init, stage, limits)


def _first(op: Op, env: dict[str, Any]) -> Tensor:
    """The tensor that a writing op changes."""
    target = op.args[0]
    assert isinstance(target, str)
    found: Tensor = env[target[1:]]
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def rehearse_batch(stage: Stage, batch: int, limits: Limits) -> None:
    """The same for one more batch size, before the first microbatch of that size is run: sizes may depend on it."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _rehearse_ops(stage, batch, limits)


def _rehearse_ops(stage: Stage, batch: int, limits: Limits) -> None:
    env: dict[str, Any] = {v.name: _example(v, batch) for v in stage.inputs}
    env.update((s.name, _meta(s.shape, s.dtype)) for s in stage.state)
    protected = {_storage(env[s.name]) for s in stage.state if s.kind == "parameter" or not s.mutated}
    meter = _Meter(limits)
    for i, op in enumerate(stage.ops):
        where = place("op", i, op)
        if ALLOWED.get(op.op) == "writes" and _storage(_first(op, env)) in protected:
            raise ProgramError(f"{where}: it writes to memory of a parameter or a fixed buffer")
        meter.run(where, op, env)
    for value in stage.outputs:
        _check_output(value, env[value.name], batch)


def _rehearse_init(init: Init, stage: Stage, limits: Limits) -> None:
    env: dict[str, Any] = {}
    meter = _Meter(limits)
    for i, op in enumerate(init.ops):
        if op.op == LITERAL:
            _, dtype, shape = cast(tuple[Any, str, tuple[int, ...]], op.args)  # as `check` found
            env[op.outs[0]] = _meta(shape, dtype[1:])
        else:
            meter.run(place("init op", i, op), op, env)
    for i, draw in enumerate(init.draws):
        where = place("draw", i, draw)
        meter.run(where, _draw_op(draw), {"scratch": _meta(draw.shape, draw.dtype)})
    for item in stage.state:
        made = env.get(item.target)
        if made is not None and (tuple(made.shape) != item.shape or dtype_name(made.dtype) != item.dtype):
            raise ProgramError(f"the init list makes {item.target!r} as {tuple(made.shape)} {made.dtype}")


def _draw_op(draw: Draw) -> Op:
    if draw.op.split(".")[1].endswith("_"):
        return Op(draw.op, ("",), ("%scratch", *draw.args))
    return Op(draw.op, ("drawn",), draw.args)


class _Meter:
    """Runs ops one by one and adds up what they make."""

    def __init__(self, limits: Limits) -> None:
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
            raise ProgramError(f"{where}: its result is not a tensor of a dtype that a stage may use")
        if result.device != _META:
            raise ProgramError(f"{where}: its result is on another device than its arguments")
        size = result.numel() * result.element_size()
        self.total_bytes += size
        if size > self.limits.value_bytes:
            raise ProgramError(f"{where}: its result has {size} bytes, at most {self.limits.value_bytes} are taken")
        if self.total_bytes > self.limits.total_bytes:
            raise ProgramError(f"{where}: the stage makes over {self.limits.total_bytes} bytes of values")


def _guarded(where: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:  # torch refuses bad arguments in many ways; all of them are about this op
        raise ProgramError(f"{where}: {type(error).__name__}: {str(error)[:300]}") from None


def _meta(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype], device=_META)


def _example(value: Value, batch: int) -> Any:
    """An input as it would arrive."""
    if value.number is not None:
        return resolve_dim(value.number, batch)
    return _meta(tuple(resolve_dim(d, batch) for d in value.shape), value.dtype)


def _check_output(value: Value, made: Any, batch: int) -> None:
    if value.number is not None:
        if made != resolve_dim(value.number, batch):
            raise ProgramError(f"output {value.name!r} is declared as {value.number} but is {made} at batch {batch}")
        return
    shape = tuple(resolve_dim(d, batch) for d in value.shape)
    if tuple(made.shape) != shape or dtype_name(made.dtype) != value.dtype:
        raise ProgramError(
            f"output {value.name!r} is declared as {value.dtype} {shape} but is {dtype_name(made.dtype)} "
            f"{tuple(made.shape)} at batch {batch}"
        )
