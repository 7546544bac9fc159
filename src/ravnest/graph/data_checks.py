"""Decides checks on the values of tensors that only raise, such as `if (x < 0).any(): raise ValueError(...)`.

A traced model has no values, so a branch on them cannot be traced. A branch that only raises does not change what is
trained: the check is taken to pass. It is made on the first batch, when the program is compared with the model, and not
later. All other branches on values are left to torch, which rejects them.
"""

from __future__ import annotations

import ast
import dis
import itertools
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = ["passing_checks"]

_ENTRY = ("ravnest/graph/export.py", "ravnest/graph/init_recorder.py")
_TORCH = str(Path(torch.__file__).parent)
_BETWEEN = ("TO_BOOL", "CALL", "PRECALL", "CACHE", "NOP", "UNARY_NOT")  # from a truth value to the jump on it


@contextmanager
def passing_checks() -> Iterator[None]:
    """Give the truth value of a traced tensor where the branch of the other value only raises."""
    original = Tensor.__bool__
    symbols = {kind: kind.__bool__ for kind in (torch.SymBool, torch.SymInt, torch.SymFloat)}

    def truth(tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) and (passing := _passing_value(sys._getframe(1))) is not None:
            return passing
        return original(tensor)

    def truth_of_symbol(symbol: Any) -> bool:
        """A number that was read from a tensor, by `.item()`, has no value; a size does."""
        try:
            return bool(symbols[type(symbol)](symbol))
        except GuardOnDataDependentSymNode:
            if (passing := _passing_value(sys._getframe(1))) is None:
                raise
            return passing

    Tensor.__bool__ = truth  # type: ignore[method-assign, assignment]
    for kind in symbols:
        kind.__bool__ = truth_of_symbol  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.__bool__ = original  # type: ignore[method-assign]
        for kind, own in symbols.items():
            kind.__bool__ = own  # type: ignore[method-assign]


def _passing_value(frame: FrameType) -> bool | None:
    """The truth value with which the running function does not raise; None if this is no check."""
    value = _value_without_raise(frame.f_code, frame.f_lasti)
    return None if value is None or any(_is_caught(caller) for caller in _callers(frame)) else value


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """The frame and its callers, up to the function that traces."""
    current: FrameType | None = frame
    while current is not None and not current.f_code.co_filename.endswith(_ENTRY):
        yield current
        current = current.f_back


def _value_without_raise(code: CodeType, offset: int) -> bool | None:
    instructions = {i.offset: i for i in dis.get_instructions(code)}
    order = sorted(instructions)
    negated = False
    for at, following in zip(order, [*order[1:], -1], strict=True):
        if at < offset:
            continue
        instruction = instructions[at]
        if "POP_JUMP" in instruction.opname and instruction.opname.endswith(("IF_TRUE", "IF_FALSE")):
            jumps_if = instruction.opname.endswith("IF_TRUE")
            if _only_raises(instructions, instruction.argval):
                return (not jumps_if) != negated
            return jumps_if != negated if _only_raises(instructions, following) else None
        if instruction.opname not in _BETWEEN and at != offset:
            return None
        negated ^= instruction.opname == "UNARY_NOT"
    return None


def _only_raises(instructions: dict[int, dis.Instruction], start: int) -> bool:
    """Whether every way from an instruction ends in `raise`."""
    order = sorted(instructions)
    following = dict(itertools.pairwise(order))
    waiting, seen = [start], set()
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        instruction = instructions[at]
        if instruction.opname in ("RAISE_VARARGS", "RERAISE"):
            continue
        if instruction.opname.startswith(("RETURN", "YIELD", "SEND")) or at not in following:
            return False
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            waiting.append(instruction.argval)
        if not instruction.opname.startswith("JUMP") or "IF" in instruction.opname:
            waiting.append(following[at])
    return any(instructions[at].opname == "RAISE_VARARGS" for at in seen)


def _is_caught(frame: FrameType) -> bool:
    """Whether the running line is in a `try` with handlers. Those of torch itself raise again."""
    if frame.f_code.co_filename.startswith(_TORCH):
        return False
    return any(first <= frame.f_lineno <= last for first, last in _guarded_lines(frame.f_code.co_filename))


@cache
def _guarded_lines(path: str) -> tuple[tuple[int, int], ...]:
    """First and last lines of the `try` blocks with handlers in a file; all lines if it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ((0, sys.maxsize),)
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
    return tuple((node.body[0].lineno, node.body[-1].end_lineno or sys.maxsize) for node in tries)
