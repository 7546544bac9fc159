"""Executes a stage: `Interpreter` runs its ops, `Tape` is the forward and backward pass of one microbatch.

The interpreter holds no weights: they are passed in, so that several versions can be live at once. Before the first
run every op is compiled to an instruction: the parameters and buffers that it is the first to read, the function, a
getter that reads its arguments from the environment in one call, the slots of its results, and the slots that are not
read again and are freed at once. Constants are in the environment from the start. A run is then one loop over
instructions.

A tape detaches its inputs, so that each stage has its own autograd graph. With `recompute` it keeps only the inputs:
the backward pass repeats the forward pass with the same random numbers and buffers.

On AMD processors float32 products of typical layer sizes take 5 to 8 % less time with oneDNN than with the library
that `torch.nn.functional.linear` calls. With `fast_linear` the interpreter uses oneDNN there. The choice depends on the
machine alone, never on a measurement, so that the same run on the same machine gives the same bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from ravnest.graph.custom_gradient import with_gradient
from ravnest.graph.device import RngState, rng_state, set_rng_state
from ravnest.graph.ops import (
    ALLOWED,
    LITERAL,
    SYM,
    TRUNC_NORMAL,
    WITH_GRADIENT,
    eval_arguments,
    needs_device,
    resolve,
    schema_of,
)
from ravnest.graph.program import DTYPES, Arg, BackwardPass, Op, Stage, Value, refs

__all__ = ["Interpreter", "Tape", "decode", "linear", "onednn_is_faster", "returns_one", "run_op"]


@cache
def onednn_is_faster() -> bool:
    """Whether this is an AMD processor and torch was built with oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return "AuthenticAMD" in platform.processor() + _cpu_info()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, up to rounding."""
    supported = (
        x.device.type == "cpu" and x.dtype is weight.dtype is torch.float32 and x.dim() >= 2 and weight.dim() == 2
    )
    if not supported or not onednn_is_faster() or torch.is_autocast_enabled("cpu"):
        return torch.ops.aten.linear.default(x, weight, bias)  # type: ignore[no-any-return]
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


class _Linear(torch.autograd.Function):
    """y = x W^T + b,  dx = g W,  dW = g^T x,  db = sum of g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        gradient = gradients[0].flatten(0, -2)
        return (
            _product(gradient, weight.t()).view(x.shape) if of_x else None,
            gradient.t().mm(x.flatten(0, -2)) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _cpu_info() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            return file.read(200)
    except OSError:
        return ""


_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve_format": torch.preserve_format,
}
_INFINITIES = {"#inf": float("inf"), "#-inf": float("-inf")}

Getter = Callable[[list[Any]], tuple[Any, ...]]


class _Instruction(NamedTuple):
    loads: tuple[tuple[int, str], ...]  # parameters and buffers that no earlier op has read: (slot, name)
    function: Callable[..., Any]
    get: Getter
    kwargs: Mapping[str, Any]
    lists: tuple[tuple[int, Getter], ...]  # list arguments that contain values: (slot, getter)
    slot: int  # of the single result, or -1
    slots: tuple[int, ...]  # of a tuple's results
    freed: tuple[int, ...]


class _Region(NamedTuple):
    """Consecutive instructions under the same modes."""

    no_grad: bool
    no_autocast: bool
    instructions: tuple[_Instruction, ...]


def decode(atom: Any, device: torch.device) -> Any:
    """Decode a constant argument."""
    if isinstance(atom, tuple):
        return [decode(a, device) for a in atom]
    if not isinstance(atom, str):
        return atom
    match atom[0]:
        case "$":
            return DTYPES[atom[1:]]
        case "@":
            return device
        case "~":
            return _MEMORY_FORMATS[atom[1:]]
        case "#":
            return _INFINITIES[atom]
        case _:
            return atom[1:]


class Interpreter:
    """A stage compiled for a device. Holds no weights: they are passed to each call.

    With `fast_linear` results may differ from plain PyTorch by rounding.
    """

    def __init__(self, stage: Stage, device: torch.device | str = "cpu", *, fast_linear: bool = False) -> None:
        self.stage = stage
        self.device = torch.device(device)
        self.fast_linear = fast_linear
        self._compiled = {True: _Compiler(self, training=True)}

    def __call__(self, state: Mapping[str, Tensor], inputs: Sequence[Any], *, training: bool = True) -> tuple[Any, ...]:
        """Run the stage on `inputs`, with parameters and buffers from `state` by name, each read once when needed.

        Buffers that the model updates are written in place in training, and not written in evaluation.
        """
        if training not in self._compiled:
            self._compiled[training] = _Compiler(self, training=training)
        compiled = self._compiled[training]
        env = compiled.template.copy()
        for slot, target in compiled.unread:
            env[slot] = state[target]
        first = len(self.stage.state)
        env[first : first + len(self.stage.inputs)] = inputs
        del inputs
        for region in compiled.regions:
            if not region.no_grad and not region.no_autocast:
                _execute(region.instructions, env, state)
                continue
            with ExitStack() as modes:
                if region.no_grad:
                    modes.enter_context(torch.no_grad())
                if region.no_autocast:
                    modes.enter_context(torch.autocast(self.device.type, enabled=False))
                _execute(region.instructions, env, state)
        return tuple(env[slot] for slot in compiled.outputs)


def run_op(op: Op, env: dict[str, Any], device: torch.device) -> None:
    """Run a single op on named values; slower than `Interpreter`, for inspection of every op."""

    def value_of(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return [value_of(a) for a in arg]
        return env[arg[1:]] if isinstance(arg, str) and arg.startswith("%") else decode(arg, device)

    with ExitStack() as modes:
        if op.no_grad:
            modes.enter_context(torch.no_grad())
        if op.no_autocast and device.type != "meta":
            modes.enter_context(torch.autocast(device.type, enabled=False))
        function = _custom_gradient(op.backward, device) if op.backward else resolve(op.op)
        result = function(*map(value_of, op.args), **{key: value_of(arg) for key, arg in _kwargs(op).items()})
    results = (result,) if returns_one(op.op) else result
    env.update((out, item) for out, item in zip(op.outs, results, strict=True) if out)


def _custom_gradient(backward: BackwardPass, device: torch.device) -> Callable[..., Any]:
    def run(values: Sequence[Any]) -> list[Any]:
        env = dict(zip((*backward.gradients, *backward.saved), values, strict=True))
        for op in backward.ops:
            run_op(op, env, device)
        return [env[name] for name in backward.results if name]

    return with_gradient(run, backward.results)


def _execute(instructions: Sequence[_Instruction], env: list[Any], state: Mapping[str, Tensor]) -> None:
    for loads, function, get, kwargs, lists, slot, slots, freed in instructions:
        for at, target in loads:
            env[at] = state[target]
        for at, items in lists:
            env[at] = list(items(env))
        if slot >= 0:
            env[slot] = function(*get(env), **kwargs)
        else:
            for at, item in zip(slots, function(*get(env), **kwargs), strict=True):
                env[at] = item
        for at in freed:
            env[at] = None


class _Compiler:
    """Assigns every value, constant and list a slot in the environment and compiles ops to instructions."""

    def __init__(self, interpreter: Interpreter, *, training: bool) -> None:
        stage, self.device, self.fast_linear = interpreter.stage, interpreter.device, interpreter.fast_linear
        self.functions: dict[str, Callable[..., Any]] = (
            {"aten.linear.default": linear} if interpreter.fast_linear else {}
        )
        self.template: list[Any] = [None] * (len(stage.state) + len(stage.inputs))
        self.slot_of: dict[str, int] = {}
        for i, name in enumerate([*(s.name for s in stage.state), *(v.name for v in stage.inputs)]):
            self.slot_of[name] = i
        self._unused = self._new_slot()
        self._unread = {s.name: (i, s.target) for i, s in enumerate(stage.state)}
        ops = stage.ops if training else _evaluation_ops(stage)
        self.regions = self._regions(ops, keep={v.name for v in stage.outputs})
        self.outputs = [self.slot_of[v.name] for v in stage.outputs]
        self.unread = tuple(self._unread.values())

    def _new_slot(self, content: Any = None) -> int:
        self.template.append(content)
        return len(self.template) - 1

    def _regions(self, ops: Sequence[Op], keep: set[str]) -> tuple[_Region, ...]:
        last_read = _last_reads(ops, keep)
        regions: list[tuple[bool, bool, list[_Instruction]]] = []
        for i, op in enumerate(ops):
            instruction = self._instruction(op, last_read.get(i, ()))
            if not regions or regions[-1][:2] != (op.no_grad, op.no_autocast):
                regions.append((op.no_grad, op.no_autocast, []))
            regions[-1][2].append(instruction)
        return tuple(_Region(a, b, tuple(instructions)) for a, b, instructions in regions)

    def _instruction(self, op: Op, freed: Sequence[str]) -> _Instruction:
        lists: list[tuple[int, Getter]] = []
        keywords = _kwargs(op)
        named = [key for key, arg in keywords.items() if _reads_values(arg)]
        slots = [self._argument(arg, lists) for arg in (*op.args, *(keywords[key] for key in named))]
        outs = [self._result(out) for out in op.outs]
        single = returns_one(op.op)
        function = self._custom_gradient(op.backward) if op.backward else self.functions.get(op.op) or resolve(op.op)
        unused = () if all(op.outs) else (self._unused,)
        return _Instruction(
            loads=tuple(self._unread.pop(n) for n in dict.fromkeys(refs(op)) if n in self._unread),
            function=_with_keywords(function, named) if named else function,
            get=_getter(slots),
            kwargs={key: decode(arg, self.device) for key, arg in keywords.items() if key not in named},
            lists=tuple(lists),
            slot=outs[0] if single else -1,
            slots=() if single else tuple(outs),
            freed=(*(self.slot_of[n] for n in freed), *(at for at, _ in lists), *unused),
        )

    def _custom_gradient(self, backward: BackwardPass) -> Callable[..., Any]:
        """A function with its own backward pass, which is interpreted like a stage."""
        inputs = tuple(Value(name, "") for name in (*backward.gradients, *backward.saved))
        outputs = tuple(Value(name, "") for name in backward.results if name)
        stage = Stage(index=0, count=1, inputs=inputs, outputs=outputs, state=(), ops=backward.ops)
        run = partial(Interpreter(stage, self.device, fast_linear=self.fast_linear), {})
        return with_gradient(run, backward.results)

    def _result(self, name: str) -> int:
        if not name:
            return self._unused
        if name not in self.slot_of:
            self.slot_of[name] = self._new_slot()
        return self.slot_of[name]

    def _argument(self, arg: Arg, lists: list[tuple[int, Getter]]) -> int:
        """The slot of an argument: of a value, of a constant, or of a list that is built before the call."""
        if isinstance(arg, str) and arg.startswith("%"):
            return self.slot_of[arg[1:]]
        if _reads_values(arg):
            assert isinstance(arg, tuple)
            slot = self._new_slot()
            lists.append((slot, _getter([self._argument(a, lists) for a in arg])))
            return slot
        return self._new_slot(decode(arg, self.device))


def returns_one(name: str) -> bool:
    """Whether an op returns one result, not a tuple or list."""
    if name in SYM or name in ("aten.sym_size.int", LITERAL, TRUNC_NORMAL):
        return True
    if name == WITH_GRADIENT:
        return False
    returns = schema_of(name).returns
    return len(returns) == 1 and str(returns[0].type) in ("Tensor", "number", "int", "SymInt")


def _kwargs(op: Op) -> Mapping[str, Arg]:
    """The op's keyword arguments; ops that create a tensor create it on the interpreter's device."""
    return {**op.kwargs, "device": "@"} if needs_device(op.op) else op.kwargs


def _reads_values(arg: Arg) -> bool:
    return any(isinstance(a, str) and a.startswith("%") for a in (arg if isinstance(arg, tuple) else (arg,)))


def _with_keywords(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """`function` with its last arguments passed by keyword, for values of keyword-only arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        split = len(args) - len(names)
        return function(*args[:split], **dict(zip(names, args[split:], strict=True)), **kwargs)

    return call


def _getter(slots: Sequence[int]) -> Getter:
    if len(slots) == 1:
        only = slots[0]
        return lambda env: (env[only],)
    if not slots:
        return lambda env: ()
    return itemgetter(*slots)


def _last_reads(ops: Sequence[Op], keep: set[str]) -> dict[int, list[str]]:
    """For each op the values that are not read after it."""
    last: dict[str, int] = {}
    for i, op in enumerate(ops):
        for name in (*op.outs, *refs(op)):
            if name and name not in keep:
                last[name] = i
    freed: dict[int, list[str]] = {}
    for name, i in last.items():
        freed.setdefault(i, []).append(name)
    return freed


def _evaluation_ops(stage: Stage) -> tuple[Op, ...]:
    """The ops with training flags off and without writes to the model's buffers."""
    buffers = {s.name for s in stage.state if s.mutated}
    ops: list[Op] = []
    for op in stage.ops:
        first = op.args[0] if op.args else None
        on_buffer = isinstance(first, str) and first[1:] in buffers
        if on_buffer and ALLOWED.get(op.op) in ("views", "writes"):
            buffers.update(op.outs)
        if on_buffer and ALLOWED.get(op.op) == "writes":
            ops.append(Op("aten.alias.default", op.outs, (first,), no_grad=True))
        else:
            changed = dict(eval_arguments(op.op))
            if op.op == "aten.instance_norm.default" and op.args[3] is not None:
                changed["use_input_stats"] = False  # it has running statistics
            ops.append(with_arguments(op, changed))
    return tuple(ops)


def with_arguments(op: Op, changed: Mapping[str, Any]) -> Op:
    """The op with some of its arguments replaced."""
    if not changed:
        return op
    args, kwargs = list(op.args), dict(op.kwargs)
    names = [a.name for a in schema_of(op.op).arguments]
    for name, value in changed.items():
        position = names.index(name)
        if position < len(args):
            args[position] = value
        elif name in kwargs:
            kwargs[name] = value
    return msgspec.structs.replace(op, args=tuple(args), kwargs=kwargs)


class Tape:
    """Forward and backward pass of one microbatch: `Tape(...)` computes `outputs`, `backward` the inputs' gradients.

    Gradients of parameters are added to the `.grad` of the tensors that were passed in.
    """

    def __init__(
        self, interpreter: Interpreter, state: Mapping[str, Tensor], inputs: Sequence[Any], *, recompute: bool = False
    ) -> None:
        self._interpreter = interpreter
        self._state: Mapping[str, Tensor] = state
        self._inputs = [_leaf(given, value.grad) for given, value in zip(inputs, interpreter.stage.inputs, strict=True)]
        self._outputs: tuple[Any, ...] | None = None
        self._rng: RngState | None = None
        if recompute:
            self._rng = rng_state(interpreter.device)
            before = {s.target: state[s.target].clone() for s in interpreter.stage.state if s.mutated}
            with torch.no_grad():
                outputs = interpreter(state, self._inputs)
            self._state = {**state, **before}
        else:
            outputs = self._outputs = interpreter(state, self._inputs)
        self.outputs = tuple(o.detach() if isinstance(o, Tensor) else o for o in outputs)

    def backward(self, gradients: Sequence[Tensor | None] | None = None) -> list[Tensor | None]:
        """Gradients of the inputs, from those of the outputs (None for the last stage). Frees the graph."""
        if not any(value.grad for value in self._interpreter.stage.outputs):  # nothing up to here is trained
            self._outputs = None
            return [None] * len(self._inputs)
        outputs = self._outputs if self._outputs is not None else self._recompute()
        if gradients is None:
            gradients = [torch.ones_like(o) if i == 0 else None for i, o in enumerate(self.outputs)]
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and isinstance(output, Tensor) and output.requires_grad
        ]
        self._outputs = None
        del outputs
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return [x.grad if isinstance(x, Tensor) and x.requires_grad else None for x in self._inputs]

    def _recompute(self) -> tuple[Any, ...]:
        """Repeat the forward pass with the same random numbers and buffers."""
        if self._rng is None:
            raise AssertionError("backward was called twice")
        devices = [] if self._interpreter.device.type == "cpu" else [self._interpreter.device]
        with torch.random.fork_rng(devices, device_type=self._interpreter.device.type if devices else "cuda"):
            set_rng_state(self._interpreter.device, self._rng)
            self._rng = None
            return self._interpreter(self._state, self._inputs)


def _leaf(given: Any, grad: bool) -> Any:
    return given.detach().requires_grad_(grad) if isinstance(given, Tensor) else given
