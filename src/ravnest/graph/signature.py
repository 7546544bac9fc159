"""Validation of an op's arguments against its torch schema, before it is called.

`kinds` maps every value defined so far to "tensor" or "number".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ravnest.errors import ProgramError
from ravnest.graph.ops import schema_of
from ravnest.graph.program import DTYPES, Op

__all__ = ["MAX_LIST", "Declared", "check_arguments", "check_arithmetic", "declared_arguments", "is_number"]

MAX_LIST = 4096
_TEXT = re.compile(r"[A-Za-z0-9 ,.>\-]{0,200}")
_MEMORY_FORMATS = ("~contiguous_format", "~channels_last", "~channels_last_3d", "~preserve_format")
_MAX_INT = 2**63 - 1
_LIST = re.compile(r"(Optional\[)?List\[(.*?)\]\]?")


def check_arithmetic(where: str, op: Op, kinds: dict[str, str]) -> None:
    if op.kwargs or not 1 <= len(op.args) <= 64:
        raise ProgramError(f"{where}: arithmetic takes 1 to 64 numbers, by position")
    for arg in op.args:
        if not is_number(arg, kinds):
            raise ProgramError(f"{where}: {arg!r:.60} is not a number")


class Declared(NamedTuple):
    """An argument of a torch schema."""

    name: str
    type: str
    by_name: bool
    optional: bool


@cache
def declared_arguments(op: str) -> tuple[Declared, ...]:
    return tuple(
        Declared(a.name, str(a.real_type), a.kwarg_only, a.has_default_value()) for a in schema_of(op).arguments
    )


def check_arguments(where: str, op: Op, kinds: dict[str, str]) -> None:
    """Reject a call whose arguments do not match the torch schema."""
    declared = declared_arguments(op.op)
    positional = [a.name for a in declared if not a.by_name]
    if len(op.args) > len(positional):
        raise ProgramError(f"{where}: {len(op.args)} arguments given, it takes {len(positional)}")
    given: dict[str, Any] = dict(zip(positional, op.args, strict=False))
    for key, arg in op.kwargs.items():
        if all(a.name != key for a in declared if a.by_name):
            raise ProgramError(f"{where}: {key[:40]!r} is not a keyword argument of it")
        given[key] = arg
    for argument in declared:
        if argument.name in given:
            _check_argument(where, argument, given[argument.name], kinds)
        elif not argument.optional:
            raise ProgramError(f"{where}: argument {argument.name} is missing")


def _check_argument(where: str, argument: Declared, arg: Any, kinds: dict[str, str]) -> None:
    if argument.name == "other" and is_number(arg, kinds):
        return  # torch accepts a number for a tensor named `other`
    if not _fits(argument.type, arg, kinds):
        raise ProgramError(f"{where}: argument {argument.name} = {arg!r:.60} is not a {argument.type}")


def _fits(declared: str, arg: Any, kinds: dict[str, str]) -> bool:
    """Whether an argument has the type that torch declares."""
    if declared.startswith("Optional[") and arg is None:
        return True
    if match := _LIST.fullmatch(declared):
        if not isinstance(arg, tuple):  # torch accepts one number for a list of equal ones
            return match[2] in ("int", "SymInt", "float") and _fits(match[2], arg, kinds)
        return len(arg) <= MAX_LIST and all(_fits(match[2], a, kinds) for a in arg)
    declared = declared.removeprefix("Optional[").removesuffix("]")
    predicate = _PREDICATES.get(declared)
    return predicate is not None and predicate(arg, kinds)


def _is_tensor(arg: Any, kinds: dict[str, str]) -> bool:
    return isinstance(arg, str) and arg.startswith("%") and kinds[arg[1:]] == "tensor"


def is_number(arg: Any, kinds: dict[str, str]) -> bool:
    if isinstance(arg, str):
        return arg in ("#inf", "#-inf") or (arg.startswith("%") and kinds[arg[1:]] == "number")
    return isinstance(arg, float) or _is_int(arg, kinds) or isinstance(arg, bool)


def _is_int(arg: Any, kinds: dict[str, str]) -> bool:
    if isinstance(arg, str):
        return arg.startswith("%") and kinds[arg[1:]] == "number"
    return isinstance(arg, int) and not isinstance(arg, bool) and -_MAX_INT <= arg <= _MAX_INT


def _is_text(arg: Any, kinds: dict[str, str]) -> bool:
    return isinstance(arg, str) and arg.startswith("=") and _TEXT.fullmatch(arg[1:]) is not None


_PREDICATES: dict[str, Callable[[Any, dict[str, str]], bool]] = {
    "Tensor": _is_tensor,
    "int": _is_int,
    "SymInt": _is_int,
    "float": is_number,
    "number": is_number,
    "Scalar": is_number,
    "bool": lambda arg, _: isinstance(arg, bool),
    "str": _is_text,
    "ScalarType": lambda arg, _: isinstance(arg, str) and arg.startswith("$") and arg[1:] in DTYPES,
    "Device": lambda arg, _: arg == "@",
    "MemoryFormat": lambda arg, _: arg in _MEMORY_FORMATS,
    "Layout": lambda arg, _: arg is None,
    "Generator": lambda arg, _: arg is None,
}
