"""What the checks of a stage and of its first values share: names, tensors, single ops.

A refusal says where: `op 12 (aten.view.default -> v12): argument size ...`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..core.errors import ProgramError
from .ops import SYM
from .program import DTYPES, Draw, Op, refs
from .run import returns_one
from .signature import MAX_LIST, check_arguments, check_arithmetic

__all__ = ["TARGET", "check_op", "check_tensor", "define", "limit", "place"]

TARGET = re.compile(r"[A-Za-z0-9_.\-]{1,500}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,199}")
_MAX_RANK = 16


def place(kind: str, index: int, op: Op | Draw) -> str:
    outs = ", ".join(filter(None, op.outs)) if isinstance(op, Op) else "nothing"
    return f"{kind} {index} ({op.op[:80]} -> {outs[:80]})"


def limit(what: str, count: int, most: int) -> None:
    if count > most:
        raise ProgramError(f"{count} {what}, at most {most} are taken")


def define(name: str, kind: str, kinds: dict[str, str], where: str) -> None:
    if not _NAME.fullmatch(name):
        raise ProgramError(f"{where}: {name[:60]!r} is not a name")
    if name in kinds:
        raise ProgramError(f"{where}: the name {name!r} is used twice")
    kinds[name] = kind


def check_tensor(where: str, dtype: str, shape: Iterable[Any]) -> None:
    if dtype not in DTYPES:
        raise ProgramError(f"{where}: {dtype[:40]!r} is not a dtype a stage may use")
    dims = tuple(shape)
    limit(f"dimensions in {where}", len(dims), _MAX_RANK)
    for dim in dims:
        for number in (dim,) if isinstance(dim, int) else dim:
            if not -(2**48) <= number <= 2**48 or (isinstance(dim, int) and number < 0):
                raise ProgramError(f"{where}: {number} is not a size")


def check_op(where: str, op: Op, kinds: dict[str, str], allowed: dict[str, str]) -> None:
    for name in refs(op):
        if name not in kinds:
            raise ProgramError(f"{where}: it reads {name[:60]!r}, which nothing before it makes")
    if op.op in SYM:
        check_arithmetic(where, op, kinds)
    elif op.op == "aten.sym_size.int" or op.op in allowed:
        check_arguments(where, op, kinds)
    else:
        raise ProgramError(f"{where}: this operation is not on the list of those a stage may use")
    result = "number" if op.op in SYM or op.op == "aten.sym_size.int" else "tensor"
    if returns_one(op.op) and len(op.outs) != 1:
        raise ProgramError(f"{where}: it gives one result, {len(op.outs)} are named")
    limit(f"results of {where}", len(op.outs), MAX_LIST)
    for out in filter(None, op.outs):
        define(out, result, kinds, where)
