"""Decides checks on the values of tensors that only raise, such as `if (x < 0).any(): raise ValueError(...)`.

A traced model has no values, so a branch on them cannot be traced. A branch that only raises does not change what is
trained: the check is taken to pass. It is made on the first batch, when the program is compared with the model, and not
later. A branch is a check if its exception ends the training (`exception_flow.py`). All other branches on values are
left to torch, which rejects them.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from ravnest.graph.exception_flow import ends_training, leaves, only_raises
from ravnest.graph.export_errors import LayerSkip

__all__ = ["ValueReads", "passing_checks"]

_ENTRY = ("ravnest/graph/export.py", "ravnest/graph/init_recorder.py")
_TORCH = str(Path(torch.__file__).parent)
_SYMBOLS = (torch.SymBool, torch.SymInt, torch.SymFloat)
_NUMBERS = ("__int__", "__index__", "__float__")
_LESS = (torch.lt, Tensor.lt, Tensor.__lt__)
_READS = (Tensor.numpy, Tensor.tolist, Tensor.__array__)
_WITHOUT_VALUES = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
_BETWEEN = ("TO_BOOL", "CALL", "PRECALL", "CACHE", "NOP", "UNARY_NOT")  # from a truth value to the jump on it


@contextmanager
def passing_checks(refused: list[Exception] | None = None) -> Iterator[None]:
    """Give the truth value of a traced tensor where the branch of the other value only raises.

    The errors of all other decisions on values go to `refused`. One that the model catches is raised again at the end:
    the model would take the way of its handler, which it does not take with values.
    """
    refused = [] if refused is None else refused
    originals = {(kind, "__bool__"): kind.__bool__ for kind in (Tensor, *_SYMBOLS)}
    originals |= {(kind, name): getattr(kind, name) for kind in _SYMBOLS for name in _NUMBERS if hasattr(kind, name)}
    for (kind, name), original in originals.items():
        setattr(kind, name, (_truth if name == "__bool__" else _number)(original, refused))
    try:
        yield
    finally:
        for (kind, name), original in originals.items():
            setattr(kind, name, original)
    if refused:
        raise refused[0]


def _truth(original: Callable[[Any], bool], refused: list[Exception]) -> Callable[[Any], bool]:
    """`__bool__` of tensors and symbols: a size has a value, a number that was read by `.item()` has none."""

    def decide(value: Any) -> bool:
        frame = sys._getframe(1)
        is_traced = isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter)
        if is_traced and (passing := _passing_value(frame)) is not None:
            return passing
        try:
            return original(value)
        except GuardOnDataDependentSymNode as error:
            if (passing := _passing_value(frame)) is not None:
                return passing
            _note(refused, error, frame)
            raise

    return decide


def _number(original: Callable[[Any], Any], refused: list[Exception]) -> Callable[[Any], Any]:
    """Conversions of symbols."""

    def convert(symbol: Any) -> Any:
        try:
            return original(symbol)
        except GuardOnDataDependentSymNode as error:
            _note(refused, error, sys._getframe(1))
            raise

    return convert


def _note(refused: list[Exception], error: Exception, frame: FrameType | None) -> None:
    """Note an error that reaches the model's own code: torch handles some itself."""
    while frame is not None and _is_between(frame) and leaves(frame):
        frame = frame.f_back
    if frame is not None and not _is_between(frame):
        refused.append(error)


def _own_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the model."""
    while _is_between(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_between(frame: FrameType) -> bool:
    """Whether a function is one of torch, or of a mode that watches its calls."""
    return frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_name == "__torch_function__"


class ValueReads(TorchFunctionMode):
    """Notes in `refused` that the model reads values, which a traced tensor has not.

    Comparisons of a random number with a bound that it cannot reach, such as `torch.rand([]) < 0.0`, are decided:
    models that can skip layers at random do so in Python; with a probability of zero they never skip one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[Exception] = []
        self.skips: list[LayerSkip] = []
        self._numbers: list[tuple[Tensor, int]] = []  # drawn from [0, 1), with their versions: they may be written to

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_bound = func in _LESS and len(args) == 2 and isinstance(args[1], int | float)
        if is_bound and any(args[0] is drawn and drawn._version == version for drawn, version in self._numbers):
            if args[1] <= 0:
                return False
            self.skips.append(LayerSkip.found(_own_frame(sys._getframe(1)), float(args[1])))
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:  # raised again; only noted if it is due to tensors without values
            if isinstance(error, _WITHOUT_VALUES) or func in _READS:
                _note(self.refused, error, sys._getframe(1))
            raise
        if func is torch.rand and isinstance(result, Tensor) and result.dim() == 0:
            self._numbers.append((result, result._version))
        return result


def _passing_value(frame: FrameType) -> bool | None:
    """The truth value with which the running function does not raise; None if this is no check."""
    value = _value_without_raise(frame)
    return None if value is None or any(_is_caught(caller) for caller in _callers(frame)) else value


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """The frame and its callers, up to the function that traces."""
    current: FrameType | None = frame
    while current is not None and not current.f_code.co_filename.endswith(_ENTRY):
        yield current
        current = current.f_back


def _value_without_raise(frame: FrameType) -> bool | None:
    instructions = {i.offset: i for i in dis.get_instructions(frame.f_code)}
    order = sorted(instructions)
    negated = False
    for at, following in zip(order, [*order[1:], -1], strict=True):
        if at < frame.f_lasti:
            continue
        instruction = instructions[at]
        if "POP_JUMP" in instruction.opname and instruction.opname.endswith(("IF_TRUE", "IF_FALSE")):
            jumps_if = instruction.opname.endswith("IF_TRUE")
            if _is_check(frame, instruction.argval):
                return (not jumps_if) != negated
            return jumps_if != negated if _is_check(frame, following) else None
        if instruction.opname not in _BETWEEN and at != frame.f_lasti:
            return None
        negated ^= instruction.opname == "UNARY_NOT"
    return None


def _is_check(frame: FrameType, start: int) -> bool:
    """Whether the branch that starts at an instruction only raises an error."""
    return only_raises(frame, start) and ends_training(frame, start)


def _is_caught(frame: FrameType) -> bool:
    """Whether an exception of the running instruction stays in its function. Handlers of torch itself raise again."""
    return not frame.f_code.co_filename.startswith(_TORCH) and not leaves(frame)
