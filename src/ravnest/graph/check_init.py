"""Is this a list of first values? The same care as for a stage's ops: names, operations, arguments, sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, cast

from ..core.errors import ProgramError
from .check_parts import TARGET, check_op, check_tensor, limit, place
from .limits import Limits
from .ops import INIT_ALLOWED, LITERAL, LITERAL_LIMIT, TRUNC_NORMAL, is_random
from .program import DTYPES, Draw, Init, Op, State
from .signature import check_arguments, is_number

__all__ = ["check_init"]


def check_init(init: Init, state: Iterable[State], limits: Limits) -> None:
    limit("init ops", len(init.ops), limits.ops)
    limit("init draws", len(init.draws), limits.ops)
    kinds: dict[str, str] = {}
    targets = {s.target for s in state}
    for i, op in enumerate(init.ops):
        where = place("init op", i, op)
        if op.op == LITERAL:
            _check_literal(where, op)
            _define_init(op.outs[0], kinds, where)
            continue
        if op.op == TRUNC_NORMAL:
            _check_truncation(where, op.args, kinds)
            continue
        shadow = Op(op.op, tuple("" for _ in op.outs), op.args, op.kwargs)
        check_op(where, shadow, kinds, INIT_ALLOWED)
        for out in filter(None, op.outs):
            _define_init(out, kinds, where)
    if not set(kinds) >= {s.target for s in state if s.kind == "buffer"}:
        raise ProgramError("the init list does not make every buffer of the stage")
    if unknown := [k for k in kinds if k not in targets and not re.fullmatch(r"i[0-9]{1,9}", k)]:
        raise ProgramError(f"the init list makes {unknown[0][:60]!r}, which the stage does not have")
    for i, draw in enumerate(init.draws):
        _check_draw(place("draw", i, draw), draw, len(init.ops), limits)


def _define_init(name: str, kinds: dict[str, str], where: str) -> None:
    if not TARGET.fullmatch(name) or name in kinds:
        raise ProgramError(f"{where}: {name[:60]!r} is not a name or is made twice")
    kinds[name] = "tensor"


def _check_literal(where: str, op: Op) -> None:
    if len(op.args) != 3 or op.kwargs or len(op.outs) != 1:
        raise ProgramError(f"{where}: a literal is (numbers, dtype, shape)")
    numbers, dtype, shape = op.args
    if not isinstance(numbers, tuple) or not all(is_number(n, {}) for n in numbers if not _is_ref(n)):
        raise ProgramError(f"{where}: a literal's numbers are not numbers")
    if not isinstance(dtype, str) or dtype[1:] not in DTYPES or not isinstance(shape, tuple):
        raise ProgramError(f"{where}: a literal has a dtype and a shape")
    check_tensor(where, dtype[1:], shape)
    if any(map(_is_ref, numbers)) or len(numbers) > LITERAL_LIMIT or prod(cast(tuple[int, ...], shape)) != len(numbers):
        raise ProgramError(f"{where}: a literal of {len(numbers)} numbers does not have shape {shape!r:.60}")


def _check_truncation(where: str, args: Sequence[Any], kinds: dict[str, str]) -> None:
    """Refuse limits between which next to no value lies: drawing would take for ever."""
    numbers = args[1:]
    if len(args) != 5 or not _is_ref(args[0]) or args[0][1:] not in kinds or not all(type(n) is float for n in numbers):
        raise ProgramError(f"{where}: a truncated normal has a tensor, a mean, a deviation and two limits")
    mean, std, a, b = numbers
    if not (std > 0 and a < b and b - a > std / 1000 and a - 2 * std <= mean <= b + 2 * std):
        raise ProgramError(f"{where}: next to no value lies between {a:g} and {b:g}")


def _is_ref(atom: Any) -> bool:
    return isinstance(atom, str) and atom.startswith("%")


def _check_draw(where: str, draw: Draw, num_ops: int, limits: Limits) -> None:
    if draw.op == TRUNC_NORMAL:
        _check_tensor_draw(where, draw, num_ops, limits)
        _check_truncation(where, ("%scratch", *draw.args), {"scratch": "tensor"})
        return
    if draw.op not in INIT_ALLOWED or not is_random(draw.op):
        raise ProgramError(f"{where}: this operation draws no random numbers or is not on the list")
    _check_tensor_draw(where, draw, num_ops, limits)
    first = ("%scratch",) if draw.op.split(".")[1].endswith("_") else ()
    check_arguments(where, Op(draw.op, ("",), (*first, *draw.args)), {"scratch": "tensor"})
    if any(_is_ref(a) for arg in draw.args for a in (arg if isinstance(arg, tuple) else (arg,))):
        raise ProgramError(f"{where}: a draw reads no values")


def _check_tensor_draw(where: str, draw: Draw, num_ops: int, limits: Limits) -> None:
    if not 0 <= draw.at <= num_ops:
        raise ProgramError(f"{where}: there is no init op {draw.at}")
    check_tensor(where, draw.dtype, draw.shape)
    limit(f"bytes in {where}", prod(draw.shape) * DTYPES[draw.dtype].itemsize, limits.value_bytes)
