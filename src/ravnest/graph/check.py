"""Is this a stage? Every name, reference, operation and argument, before anything is run."""

from __future__ import annotations

from typing import Any

from ..core.errors import ProgramError
from .check_init import check_init
from .check_parts import TARGET, check_op, check_tensor, define, limit, place
from .limits import Limits
from .ops import ALLOWED, may_share_memory, schema_of, writes_statistics
from .program import DTYPES, SCALARS, Op, Stage, Value, num_bytes, refs

__all__ = ["check_stage"]

_FORMAT = "ravnest-stage/1"


def check_stage(stage: Stage, limits: Limits) -> None:
    """Refuse a stage that is malformed, not allowed or too big."""
    if stage.format != _FORMAT:
        raise ProgramError(f"this is format {stage.format[:40]!r}, we read {_FORMAT!r}: update the older side")
    if not 0 <= stage.index < stage.count <= 10_000:
        raise ProgramError(f"stage {stage.index} of {stage.count} makes no sense")
    limit("ops", len(stage.ops), limits.ops)
    limit("parameters and buffers", len(stage.state), limits.state)
    limit("inputs", len(stage.inputs), limits.ports)
    limit("outputs", len(stage.outputs), limits.ports)
    kinds: dict[str, str] = {}  # of every value defined so far: tensor or number
    for value in stage.inputs:
        _check_value(value, limits)
        define(value.name, "number" if value.dtype in SCALARS else "tensor", kinds, "input")
    _check_state(stage, kinds, limits)
    protected = {s.name for s in stage.state if s.kind == "parameter" or not s.mutated}
    for i, op in enumerate(stage.ops):
        check_op(place("op", i, op), op, kinds, ALLOWED)
        _check_writes(place("op", i, op), op, protected)
        if may_share_memory(op.op) and protected.intersection(refs(op)):
            protected.update(filter(None, op.outs))
    _check_outputs(stage, kinds, limits)
    if stage.init is not None:
        check_init(stage.init, stage.state, limits)


def _check_value(value: Value, limits: Limits) -> None:
    where = f"value {value.name[:60]!r}"
    if value.dtype in SCALARS:
        if value.dtype != "int" or value.number is None or value.shape or value.grad:
            raise ProgramError(f"{where}: a number that comes in or goes out is a size that the batch determines")
        check_tensor(where, "int64", (value.number,))
        return
    if value.number is not None:
        raise ProgramError(f"{where} is a tensor, not a number")
    check_tensor(where, value.dtype, value.shape)
    if value.grad and not DTYPES[value.dtype].is_floating_point and not DTYPES[value.dtype].is_complex:
        raise ProgramError(f"{where} is {value.dtype}: it has no gradient")
    for batch in (1, limits.batch):
        if any(not isinstance(d, int) and d[0] * batch + d[1] < 0 for d in value.shape):
            raise ProgramError(f"{where} has a negative size at batch {batch}")
    limit(f"bytes in {where}", num_bytes(value, limits.batch), limits.value_bytes)


def _check_state(stage: Stage, kinds: dict[str, str], limits: Limits) -> None:
    targets: set[str] = set()
    total = 0
    for item in stage.state:
        where = f"state {item.target[:80]!r}"
        define(item.name, "tensor", kinds, where)
        if not TARGET.fullmatch(item.target) or item.target in targets:
            raise ProgramError(f"{where} is not a name or is there twice")
        targets.add(item.target)
        if item.kind not in ("parameter", "buffer"):
            raise ProgramError(f"{where} is a {item.kind[:40]!r}, not a parameter or a buffer")
        if not 0 <= item.owner < stage.count or (item.kind == "buffer" and item.owner != stage.index):
            raise ProgramError(f"{where} is owned by stage {item.owner}, which cannot be")
        check_tensor(where, item.dtype, item.shape)
        if item.trainable and (item.kind == "buffer" or not DTYPES[item.dtype].is_floating_point):
            raise ProgramError(f"{where} is not something that can be trained")
        limit(f"bytes in {where}", item.num_bytes, limits.value_bytes)
        total += item.num_bytes
    limit("bytes of parameters and buffers", total, limits.state_bytes)


def _check_outputs(stage: Stage, kinds: dict[str, str], limits: Limits) -> None:
    for name in (v.name for v in stage.outputs):
        if name not in kinds:
            raise ProgramError(f"output {name[:60]!r} is never made")
    if len({v.name for v in stage.outputs}) < len(stage.outputs):
        raise ProgramError("an output is listed twice")
    for value in stage.outputs:
        _check_value(value, limits)
        if (value.dtype in SCALARS) != (kinds[value.name] == "number"):
            raise ProgramError(f"output {value.name!r} is a {kinds[value.name]}, not {value.dtype}")


def _check_writes(where: str, op: Op, protected: set[str]) -> None:
    """Writes go to the stage's own buffers and values, never to parameters."""
    written: list[Any] = []
    if writes_statistics(op.op):
        names = [a.name for a in schema_of(op.op).arguments]
        written = [arg for name, arg in zip(names, op.args, strict=False) if name in ("running_mean", "running_var")]
    elif ALLOWED.get(op.op) == "writes":
        written = [op.args[0]]
    for arg in written:
        if isinstance(arg, str) and arg[1:] in protected:
            raise ProgramError(f"{where}: it writes to {arg[1:]!r}, which is not a buffer that may be written")
