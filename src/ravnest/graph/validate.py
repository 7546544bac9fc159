"""Validates stages from untrusted senders: every name, reference, operation and argument, before anything is run.

The arguments of an op are checked against its torch schema. A stage's init list is checked as strictly as its ops. An
error names its location: `op 12 (aten.reshape.default -> v12): argument shape ...`. `kinds` maps every value defined so
far to "tensor" or "number". A backward pass inside an op is checked by the same rules, in its own names: it reads what
the op passes to it and nothing else, draws no random numbers, writes only to its own tensors and contains no other
backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple, cast

from ravnest.errors import ProgramError
from ravnest.graph.interpreter import returns_one
from ravnest.graph.limits import StageLimits
from ravnest.graph.ops import (
    ALLOWED,
    INIT_ALLOWED,
    LITERAL,
    LITERAL_LIMIT,
    SYM,
    TRUNC_NORMAL,
    WITH_GRADIENT,
    is_random,
    may_share_memory,
    schema_of,
    writes_statistics,
)
from ravnest.graph.program import (
    DTYPES,
    SCALARS,
    BackwardPass,
    Draw,
    Init,
    Op,
    Stage,
    StateSpec,
    Value,
    num_bytes,
    refs,
)

__all__ = ["check_stage", "location", "declared_arguments"]

MAX_LIST = 4096
# Arguments of one op.

_TEXT = re.compile(r"[A-Za-z0-9 ,.>\-]{0,200}")
_MEMORY_FORMATS = ("~contiguous_format", "~channels_last", "~channels_last_3d", "~preserve_format")
_MAX_INT = 2**63 - 1
_CHOICES = ("reduction", "interpolation_mode", "padding_mode", "mode")
_CHOICE_VALUES = (0, 1, 2)  # torch checks few of them: a loss with another reduction returns memory as it found it
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
            raise ProgramError(f"{where}: {key[:40]!r} is not one of its keyword arguments")
        given[key] = arg
    for argument in declared:
        if argument.name in given:
            _check_argument(where, argument, given[argument.name], kinds)
        elif not argument.optional:
            raise ProgramError(f"{where}: argument {argument.name} is missing")


def _check_argument(where: str, argument: Declared, arg: Any, kinds: dict[str, str]) -> None:
    if argument.name == "other" and is_number(arg, kinds):
        return  # torch accepts a number for a tensor named `other`
    is_choice = argument.type == "int" and argument.name in _CHOICES
    if is_choice and (isinstance(arg, bool | float | str) or arg not in _CHOICE_VALUES):
        raise ProgramError(f"{where}: argument {argument.name} = {arg!r:.60} must be 0, 1 or 2")
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

# Whole stages.

_TARGET = re.compile(r"[A-Za-z0-9_.\-]{1,500}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,199}")
_MAX_RANK = 16


def location(kind: str, index: int, op: Op | Draw) -> str:
    outs = ", ".join(filter(None, op.outs)) if isinstance(op, Op) else "nothing"
    return f"{kind} {index} ({op.op[:80]} -> {outs[:80]})"


def _check_limit(name: str, count: int, maximum: int) -> None:
    if count > maximum:
        raise ProgramError(f"{count} {name}, at most {maximum} are allowed")


def _define(name: str, kind: str, kinds: dict[str, str], where: str) -> None:
    if not _NAME.fullmatch(name):
        raise ProgramError(f"{where}: {name[:60]!r} is not a valid name")
    if name in kinds:
        raise ProgramError(f"{where}: the name {name!r} is used twice")
    kinds[name] = kind


def _check_tensor(where: str, dtype: str, shape: Iterable[Any]) -> None:
    if dtype not in DTYPES:
        raise ProgramError(f"{where}: {dtype[:40]!r} is not an allowed dtype")
    dims = tuple(shape)
    _check_limit(f"dimensions in {where}", len(dims), _MAX_RANK)
    for dim in dims:
        for number in (dim,) if isinstance(dim, int) else dim:
            if not -(2**48) <= number <= 2**48 or (isinstance(dim, int) and number < 0):
                raise ProgramError(f"{where}: {number} is not a valid size")


def _check_op(where: str, op: Op, kinds: dict[str, str], allowed: dict[str, str]) -> None:
    if op.backward is not None:
        raise ProgramError(f"{where}: this operation may not have a backward pass of its own")
    for name in refs(op):
        if name not in kinds:
            raise ProgramError(f"{where}: it reads {name[:60]!r}, which no earlier op defines")
    if op.op in SYM:
        check_arithmetic(where, op, kinds)
    elif op.op == "aten.sym_size.int" or op.op in allowed:
        check_arguments(where, op, kinds)
    else:
        raise ProgramError(f"{where}: this operation is not on the list of allowed operations")
    result = "number" if op.op in SYM or op.op == "aten.sym_size.int" else "tensor"
    if returns_one(op.op) and len(op.outs) != 1:
        raise ProgramError(f"{where}: it has one result, {len(op.outs)} are named")
    _check_limit(f"results of {where}", len(op.outs), MAX_LIST)
    for out in filter(None, op.outs):
        _define(out, result, kinds, where)


def _check_custom_gradient(where: str, op: Op, kinds: dict[str, str]) -> None:
    """Check an op with a backward pass of its own, and that backward pass."""
    backward = op.backward
    lists = [arg for arg in op.args if isinstance(arg, tuple)]
    if backward is None or op.kwargs or len(lists) != 3 or len(op.args) != 3:
        raise ProgramError(f"{where}: it takes three lists (outputs, inputs, saved) and a backward pass")
    outputs, inputs, saved = lists
    for arg in (*outputs, *inputs, *saved):
        if not _is_ref(arg) or str(arg)[1:] not in kinds:
            raise ProgramError(f"{where}: {arg!r:.60} is not a value that an earlier op defines")
    if not all(_is_tensor(arg, kinds) for arg in (*outputs, *inputs)):
        raise ProgramError(f"{where}: its outputs and inputs must be tensors")
    lengths = len(op.outs), len(backward.gradients), len(backward.saved), len(backward.results)
    if lengths != (len(outputs), len(outputs), len(saved), len(inputs)) or not outputs:
        raise ProgramError(f"{where}: its backward pass has other numbers of outputs, inputs or saved values")
    _check_limit(f"values of {where}", max(lengths), MAX_LIST)
    _check_backward(where, backward, [kinds[str(arg)[1:]] for arg in saved])
    for out in filter(None, op.outs):
        _define(out, "tensor", kinds, where)


def _check_backward(where: str, backward: BackwardPass, saved: Sequence[str]) -> None:
    kinds: dict[str, str] = {}
    for name in backward.gradients:
        _define(name, "tensor", kinds, where)
    for name, kind in zip(backward.saved, saved, strict=True):
        _define(name, kind, kinds, where)
    protected = set(kinds)
    for i, op in enumerate(backward.ops):
        inside = f"{where}, {location('backward op', i, op)}"
        _check_op(inside, op, kinds, ALLOWED)
        if is_random(op.op):
            raise ProgramError(f"{inside}: a backward pass may not draw random numbers")
        _check_protected(inside, op, protected)
    for name in filter(None, backward.results):
        if kinds.get(name) != "tensor":
            raise ProgramError(f"{where}: its backward pass returns {name[:60]!r}, which is not a tensor of it")


def _check_protected(where: str, op: Op, protected: set[str]) -> None:
    """Reject a write to `protected` values, and add the results that may share their memory."""
    _check_writes(where, op, protected)
    if ALLOWED.get(op.op) == "writes":  # gives the tensor that it has written to, which is not protected
        return
    if may_share_memory(op.op) and protected.intersection(refs(op)):
        protected.update(filter(None, op.outs))


def _check_init(init: Init, state: Iterable[StateSpec], limits: StageLimits) -> None:
    _check_limit("init ops", len(init.ops), limits.ops)
    _check_limit("init draws", len(init.draws), limits.ops)
    kinds: dict[str, str] = {}
    targets = {s.target for s in state}
    for i, op in enumerate(init.ops):
        where = location("init op", i, op)
        if op.backward is not None:
            raise ProgramError(f"{where}: an init op may not have a backward pass")
        if op.op == LITERAL:
            _check_literal(where, op)
            _define_init(op.outs[0], kinds, where)
            continue
        if op.op == TRUNC_NORMAL:
            _check_truncation(where, op.args, kinds)
            continue
        shadow = Op(op.op, tuple("" for _ in op.outs), op.args, op.kwargs)
        _check_op(where, shadow, kinds, INIT_ALLOWED)
        for out in filter(None, op.outs):
            _define_init(out, kinds, where)
    if not set(kinds) >= {s.target for s in state if not s.trainable}:
        raise ProgramError("the init list does not initialise every buffer and frozen parameter of the stage")
    if unknown := [k for k in kinds if k not in targets and not re.fullmatch(r"i[0-9]{1,9}", k)]:
        raise ProgramError(f"the init list makes {unknown[0][:60]!r}, which is not state of the stage")
    for i, draw in enumerate(init.draws):
        _check_draw(location("draw", i, draw), draw, len(init.ops), limits)


def _define_init(name: str, kinds: dict[str, str], where: str) -> None:
    if not _TARGET.fullmatch(name) or name in kinds:
        raise ProgramError(f"{where}: {name[:60]!r} is not a valid name or is made twice")
    kinds[name] = "tensor"


def _check_literal(where: str, op: Op) -> None:
    if len(op.args) != 3 or op.kwargs or len(op.outs) != 1:
        raise ProgramError(f"{where}: a literal takes (numbers, dtype, shape)")
    numbers, dtype, shape = op.args
    if not isinstance(numbers, tuple) or not all(is_number(n, {}) for n in numbers if not _is_ref(n)):
        raise ProgramError(f"{where}: the first argument of a literal must be a list of numbers")
    if not isinstance(dtype, str) or dtype[1:] not in DTYPES or not isinstance(shape, tuple):
        raise ProgramError(f"{where}: a literal needs a dtype and a shape")
    _check_tensor(where, dtype[1:], shape)
    if any(map(_is_ref, numbers)) or len(numbers) > LITERAL_LIMIT or prod(cast(tuple[int, ...], shape)) != len(numbers):
        raise ProgramError(f"{where}: a literal of {len(numbers)} numbers does not have shape {shape!r:.60}")


def _check_truncation(where: str, args: Sequence[Any], kinds: dict[str, str]) -> None:
    """Reject bounds that contain almost no probability: the draw would not terminate."""
    numbers = args[1:]
    if len(args) != 5 or not _is_ref(args[0]) or args[0][1:] not in kinds or not all(type(n) is float for n in numbers):
        raise ProgramError(f"{where}: a truncated normal takes a tensor, a mean, a standard deviation and two bounds")
    mean, std, a, b = numbers
    if not (std > 0 and a < b and b - a > std / 1000 and a - 2 * std <= mean <= b + 2 * std):
        raise ProgramError(f"{where}: almost no value lies between the bounds {a:g} and {b:g}")


def _is_ref(atom: Any) -> bool:
    return isinstance(atom, str) and atom.startswith("%")


def _check_draw(where: str, draw: Draw, num_ops: int, limits: StageLimits) -> None:
    if draw.op == TRUNC_NORMAL:
        _check_tensor_draw(where, draw, num_ops, limits)
        _check_truncation(where, ("%scratch", *draw.args), {"scratch": "tensor"})
        return
    if draw.op not in INIT_ALLOWED or not is_random(draw.op):
        raise ProgramError(f"{where}: this operation draws no random numbers or is not allowed")
    _check_tensor_draw(where, draw, num_ops, limits)
    if any(_is_ref(a) for arg in draw.args for a in (arg if isinstance(arg, tuple) else (arg,))):
        raise ProgramError(f"{where}: a draw may not read values")
    first = ("%scratch",) if draw.op.split(".")[1].endswith("_") else ()
    check_arguments(where, Op(draw.op, ("",), (*first, *draw.args)), {"scratch": "tensor"})


def _check_tensor_draw(where: str, draw: Draw, num_ops: int, limits: StageLimits) -> None:
    if not 0 <= draw.at <= num_ops:
        raise ProgramError(f"{where}: there is no init op {draw.at}, the list has {num_ops}")
    _check_tensor(where, draw.dtype, draw.shape)
    _check_limit(f"bytes in {where}", prod(draw.shape) * DTYPES[draw.dtype].itemsize, limits.value_bytes)


_FORMAT = "ravnest-stage/2"


def check_stage(stage: Stage, limits: StageLimits) -> None:
    """Reject a stage that is malformed, not allowed or too big."""
    if stage.format != _FORMAT:
        raise ProgramError(f"stage format is {stage.format[:40]!r}, expected {_FORMAT!r}: update the older side")
    if not 0 <= stage.index < stage.count <= 10_000:
        raise ProgramError(f"stage index {stage.index} of {stage.count} is out of range")
    _check_limit("ops", sum(1 + len(op.backward.ops if op.backward else ()) for op in stage.ops), limits.ops)
    _check_limit("parameters and buffers", len(stage.state), limits.state)
    _check_limit("inputs", len(stage.inputs), limits.ports)
    _check_limit("outputs", len(stage.outputs), limits.ports)
    kinds: dict[str, str] = {}  # defined value -> tensor or number
    for value in stage.inputs:
        _check_value(value, limits)
        _define(value.name, "number" if value.dtype in SCALARS else "tensor", kinds, "input")
    _check_state(stage, kinds, limits)
    protected = {s.name for s in stage.state if s.kind == "parameter" or not s.mutated}
    for i, op in enumerate(stage.ops):
        where = location("op", i, op)
        if op.op == WITH_GRADIENT:
            _check_custom_gradient(where, op, kinds)
        else:
            _check_op(where, op, kinds, ALLOWED)
        _check_protected(where, op, protected)
    _check_outputs(stage, kinds, limits)
    if stage.prediction is not None:
        _check_prediction(stage, stage.prediction, kinds, limits)
    if stage.init is not None:
        _check_init(stage.init, stage.state, limits)


def _check_value(value: Value, limits: StageLimits) -> None:
    where = f"value {value.name[:60]!r}"
    if value.dtype in SCALARS:
        if value.dtype != "int" or value.number is None or value.shape or value.grad:
            raise ProgramError(f"{where}: a number that crosses a cut must be a size that depends on the batch")
        _check_tensor(where, "int64", (value.number,))
        _check_varying(where, value.varying, 1)
        return
    if value.number is not None:
        raise ProgramError(f"{where} is a tensor and must not have a number")
    _check_tensor(where, value.dtype, value.shape)
    _check_varying(where, value.varying, len(value.shape))
    if value.grad and not DTYPES[value.dtype].is_floating_point and not DTYPES[value.dtype].is_complex:
        raise ProgramError(f"{where} is {value.dtype}: it cannot have a gradient")
    for batch in (1, limits.batch):
        if any(not isinstance(d, int) and d[0] * batch + d[1] < 0 for d in value.shape):
            raise ProgramError(f"{where} has a negative size at batch {batch}")
    _check_limit(f"bytes in {where}", num_bytes(value, limits.batch), limits.value_bytes)


def _check_varying(where: str, varying: tuple[int, ...], num_dims: int) -> None:
    if not all(0 <= dim < num_dims for dim in varying) or sorted(set(varying)) != list(varying):
        raise ProgramError(f"{where}: {varying!r:.60} are not increasing dimensions of a value with {num_dims}")


def _check_state(stage: Stage, kinds: dict[str, str], limits: StageLimits) -> None:
    targets: set[str] = set()
    total = 0
    for item in stage.state:
        where = f"state {item.target[:80]!r}"
        _define(item.name, "tensor", kinds, where)
        if not _TARGET.fullmatch(item.target) or item.target in targets:
            raise ProgramError(f"{where} is not a valid name or is defined twice")
        targets.add(item.target)
        if item.kind not in ("parameter", "buffer"):
            raise ProgramError(f"{where} is a {item.kind[:40]!r}, not a parameter or a buffer")
        if not 0 <= item.owner < stage.count or (not item.trainable and item.owner != stage.index):
            raise ProgramError(f"{where} has an invalid owner, stage {item.owner}")
        _check_tensor(where, item.dtype, item.shape)
        if item.trainable and (item.kind == "buffer" or not DTYPES[item.dtype].is_floating_point):
            raise ProgramError(f"{where} cannot be trained: it must be a floating-point parameter")
        _check_limit(f"bytes in {where}", item.num_bytes, limits.value_bytes)
        total += item.num_bytes
    _check_limit("bytes of parameters and buffers", total, limits.state_bytes)


def _check_outputs(stage: Stage, kinds: dict[str, str], limits: StageLimits) -> None:
    for name in (v.name for v in stage.outputs):
        if name not in kinds:
            raise ProgramError(f"output {name[:60]!r} is never computed")
    if len({v.name for v in stage.outputs}) < len(stage.outputs):
        raise ProgramError("an output is listed twice")
    for value in stage.outputs:
        _check_value(value, limits)
        if (value.dtype in SCALARS) != (kinds[value.name] == "number"):
            raise ProgramError(f"output {value.name!r} is a {kinds[value.name]}, not {value.dtype}")


def _check_prediction(stage: Stage, value: Value, kinds: dict[str, str], limits: StageLimits) -> None:
    if stage.index != stage.count - 1:
        raise ProgramError("only the last stage has a prediction")
    if kinds.get(value.name) != "tensor":
        raise ProgramError(f"the prediction {value.name[:60]!r} is not a tensor of the stage")
    _check_value(value, limits)
    if len(value.shape) != 3 or value.dtype in SCALARS or not DTYPES[value.dtype].is_floating_point:
        raise ProgramError("the prediction must have three dimensions and be of floating-point numbers")


def _check_writes(where: str, op: Op, protected: set[str]) -> None:
    """Reject writes to anything but the stage's own buffers and values."""
    written: list[Any] = []
    if writes_statistics(op.op):
        names = [a.name for a in schema_of(op.op).arguments]
        written = [arg for name, arg in zip(names, op.args, strict=False) if name in ("running_mean", "running_var")]
    elif ALLOWED.get(op.op) == "writes":
        written = [op.args[0]]
    for arg in written:
        if isinstance(arg, str) and arg[1:] in protected:
            raise ProgramError(f"{where}: it writes to {arg[1:]!r}, which may not be written")
