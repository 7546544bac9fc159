"""Decides from bytecode where a raised exception goes: out of a function, or to code that goes on without it.

A branch that only raises may be left out of a trace if the exception ends the training. It does not where a `try` or
a `with` statement, or Python itself, takes it for a result: `contextlib.suppress`, a `finally` that returns, an
iterator that raises `StopIteration`, a property that raises `AttributeError` for `hasattr`.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import itertools
import linecache
from functools import cache
from types import CodeType, FrameType
from typing import Any

__all__ = ["ends_training", "leaves", "only_raises"]

_MANAGERS = (contextlib.nullcontext, contextlib.closing)  # besides those of torch
_RESULTS = (StopIteration, StopAsyncIteration, AttributeError, GeneratorExit)  # exceptions that Python catches itself
_PROTOCOLS = ("__next__", "__anext__", "__getitem__", "__len__", "__length_hint__", "__getattr__", "__getattribute__")
_MISSING = object()


def leaves(frame: FrameType) -> bool:
    """Whether an exception that is raised at the running instruction leaves the function, and reaches its caller."""
    if frame.f_code.co_name in _PROTOCOLS:
        return False
    handler = _Function(frame.f_code).handler(frame.f_lasti)
    return handler is None or bool(_ways(frame.f_code, handler, frame))


def only_raises(frame: FrameType, start: int) -> bool:
    """Whether every way from an instruction ends in an exception that leaves the function, raised by `raise`."""
    seen = _ways(frame.f_code, start, frame)
    instructions = _Function(frame.f_code).instructions
    return any(instructions[at].opname == "RAISE_VARARGS" for at in seen)


def ends_training(frame: FrameType, start: int) -> bool:
    """Whether the exceptions that are named from an instruction on are errors, not results of Python's protocols."""
    instructions = _Function(frame.f_code).instructions
    names = {str(instructions[at].argval) for at in _ways(frame.f_code, start, frame) if _is_name(instructions[at])}
    named = [_named(frame, name) for name in names]
    return not any(isinstance(found, type) and issubclass(found, _RESULTS) for found in named)


class _Function:
    """Instructions of a function by offset, and the handlers of their exceptions."""

    def __init__(self, code: CodeType) -> None:
        self.instructions, self.following, self._entries = _parsed(code)

    def handler(self, offset: int) -> int | None:
        """The instruction where an exception goes that is raised at an instruction."""
        return next((target for start, end, target in self._entries if start <= offset < end), None)


@cache
def _parsed(code: CodeType) -> tuple[dict[int, dis.Instruction], dict[int, int], list[tuple[int, int, int]]]:
    bytecode: Any = dis.Bytecode(code)
    instructions = {i.offset: i for i in bytecode}
    entries = [(entry.start, entry.end, entry.target) for entry in bytecode.exception_entries]
    return instructions, dict(itertools.pairwise(sorted(instructions))), entries


def _ways(code: CodeType, start: int, frame: FrameType | None) -> set[int]:
    """The instructions on all ways from `start`; none if a way ends otherwise than in an exception for the caller."""
    function = _Function(code)
    waiting, seen = [start], set[int]()
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        instruction = function.instructions[at]
        if (handler := function.handler(at)) is not None:
            waiting.append(handler)
        if instruction.opname in ("RAISE_VARARGS", "RERAISE"):
            continue
        following = function.following.get(at)
        if instruction.opname.startswith(("RETURN", "YIELD", "SEND")) or following is None:
            return set()
        if instruction.opname == "WITH_EXCEPT_START" and _passes_on(instruction, frame):
            waiting.append(_after_jump(function, following))
            continue
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            waiting.append(instruction.argval)
        if not instruction.opname.startswith("JUMP") or "IF" in instruction.opname:
            waiting.append(following)
    return seen


def _after_jump(function: _Function, at: int) -> int:
    """The instruction after the next jump, which is not taken."""
    while "JUMP" not in function.instructions[at].opname:
        at = function.following[at]
    return function.following[at]


def _passes_on(instruction: dis.Instruction, frame: FrameType | None) -> bool:
    """Whether the managers of a `with` statement are known to let exceptions pass."""
    line = instruction.positions.lineno if instruction.positions else None
    if frame is None or line is None:
        return False
    managers = _managers(frame.f_code.co_filename).get(line, [])
    return bool(managers) and all(_is_transparent(_value(frame, manager)) for manager in managers)


@cache
def _managers(path: str) -> dict[int, list[ast.expr]]:
    """The managers of the `with` statements in a file, by line; none if the file cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, list[ast.expr]] = {}
    for node in ast.walk(tree):
        for item in node.items if isinstance(node, ast.With) else ():
            found.setdefault(item.context_expr.lineno, []).append(item.context_expr)
    return found


def _value(frame: FrameType, manager: ast.expr) -> Any:
    """The function or class that is called for a manager, or the manager itself."""
    expression = manager.func if isinstance(manager, ast.Call) else manager
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    if not isinstance(expression, ast.Name):
        return _MISSING
    found = _named(frame, expression.id)
    for name in reversed(names):
        found = getattr(found, name, _MISSING)
    return found


def _named(frame: FrameType, name: str) -> Any:
    for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
        if name in names:
            return names[name]
    return _MISSING


def _is_transparent(manager: Any) -> bool:
    """Whether a context manager lets every exception pass."""
    if f"{getattr(manager, '__module__', '')}.".startswith("torch.") or manager in _MANAGERS:
        return True
    made_by = getattr(manager, "__wrapped__", None)
    if made_by is not None:  # a generator with `contextlib.contextmanager`
        code = getattr(made_by, "__code__", None)
        return isinstance(code, CodeType) and _yields_transparently(code)
    code = getattr(getattr(manager, "__exit__", None), "__code__", None)
    return isinstance(code, CodeType) and _returns_nothing(code)


def _yields_transparently(code: CodeType) -> bool:
    """Whether exceptions that a generator receives leave it."""
    function = _Function(code)
    handlers = [function.handler(at) for at, i in function.instructions.items() if i.opname.startswith("YIELD")]
    return bool(handlers) and all(handler is None or _ways(code, handler, None) for handler in handlers)


def _returns_nothing(code: CodeType) -> bool:
    """Whether a function returns None or False, always."""
    instructions = list(_Function(code).instructions.values())
    pairs = list(itertools.pairwise(instructions))
    values = [before.argval for before, i in pairs if i.opname == "RETURN_VALUE" and before.opname == "LOAD_CONST"]
    values += [i.argval for i in instructions if i.opname == "RETURN_CONST"]
    count = sum(i.opname.startswith("RETURN_") and i.opname != "RETURN_GENERATOR" for i in instructions)
    return count == len(values) and all(value is None or value is False for value in values)


def _is_name(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST"))
