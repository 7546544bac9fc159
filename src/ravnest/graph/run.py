"""Runs a stage: walks its ops with parameters that are passed in, so that several weight versions can live at once.

Before the first run every op is turned into an instruction: the function, a getter that picks its arguments
from the environment in one call, the places of its results, and the places that nobody reads afterwards and
are cleared at once. Constants lie in the environment from the start. A run is then one loop over instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .linear import linear
from .ops import ALLOWED, LITERAL, SYM, TRUNC_NORMAL, needs_device, resolve, schema_of, train_flags
from .program import DTYPES, Arg, Op, Stage, refs

__all__ = ["Runner", "decode", "returns_one", "run_op"]

_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve_format": torch.preserve_format,
}
_INFINITIES = {"#inf": float("inf"), "#-inf": float("-inf")}

Getter = Callable[[list[Any]], tuple[Any, ...]]


class _Instruction(NamedTuple):
    function: Callable[..., Any]
    get: Getter
    kwargs: Mapping[str, Any]
    built: tuple[tuple[int, Getter], ...]  # list arguments made of values: (place, getter)
    place: int  # of the single result, or -1
    places: tuple[int, ...]  # of a tuple's results
    cleared: tuple[int, ...]


class _Region(NamedTuple):
    """Neighbouring instructions under the same modes."""

    no_grad: bool
    no_autocast: bool
    instructions: tuple[_Instruction, ...]


def decode(atom: Any, device: torch.device) -> Any:
    """What a constant argument stands for."""
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


class Runner:
    """A stage ready to run on a device. Holds no weights: they come with each call.

    If `quick`, its results need not have the bits of plain PyTorch: see `linear`.
    """

    def __init__(self, stage: Stage, device: torch.device | str = "cpu", *, quick: bool = False) -> None:
        self.stage = stage
        self.device = torch.device(device)
        self.quick = quick
        self._compiled = {True: _Compiler(self, training=True)}
        self._state = [(s.target, i) for i, s in enumerate(stage.state)]

    def __call__(self, state: Mapping[str, Tensor], inputs: Sequence[Any], *, training: bool = True) -> tuple[Any, ...]:
        """Outputs of the stage for `inputs`, with parameters and buffers taken from `state` by their names.

        Buffers that the model updates are written in place when training and left alone when not.
        """
        if training not in self._compiled:
            self._compiled[training] = _Compiler(self, training=training)
        compiled = self._compiled[training]
        env = compiled.template.copy()
        for target, place in self._state:
            env[place] = state[target]
        first = len(self._state)
        env[first : first + len(self.stage.inputs)] = inputs
        del inputs
        for region in compiled.regions:
            if not region.no_grad and not region.no_autocast:
                _execute(region.instructions, env)
                continue
            with ExitStack() as modes:
                if region.no_grad:
                    modes.enter_context(torch.no_grad())
                if region.no_autocast:
                    modes.enter_context(torch.autocast(self.device.type, enabled=False))
                _execute(region.instructions, env)
        return tuple(env[place] for place in compiled.outputs)


def run_op(op: Op, env: dict[str, Any], device: torch.device) -> None:
    """Run a single op on named values: the slow way, for those who watch every op."""

    def look(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return [look(a) for a in arg]
        return env[arg[1:]] if isinstance(arg, str) and arg.startswith("%") else decode(arg, device)

    with ExitStack() as modes:
        if op.no_grad:
            modes.enter_context(torch.no_grad())
        if op.no_autocast and device.type != "meta":
            modes.enter_context(torch.autocast(device.type, enabled=False))
        result = resolve(op.op)(*map(look, op.args), **{key: look(arg) for key, arg in _kwargs(op).items()})
    results = (result,) if returns_one(op.op) else result
    env.update((out, item) for out, item in zip(op.outs, results, strict=True) if out)


def _execute(instructions: Sequence[_Instruction], env: list[Any]) -> None:
    for function, get, kwargs, built, place, places, cleared in instructions:
        for at, items in built:
            env[at] = list(items(env))
        if place >= 0:
            env[place] = function(*get(env), **kwargs)
        else:
            for at, item in zip(places, function(*get(env), **kwargs), strict=True):
                env[at] = item
        for at in cleared:
            env[at] = None


class _Compiler:
    """Gives every value, constant and list a place in the environment and turns ops into instructions."""

    def __init__(self, runner: Runner, *, training: bool) -> None:
        stage, self.device = runner.stage, runner.device
        self.functions: dict[str, Callable[..., Any]] = {"aten.linear.default": linear} if runner.quick else {}
        self.template: list[Any] = [None] * (len(stage.state) + len(stage.inputs))
        self.place_of: dict[str, int] = {}
        for i, name in enumerate([*(s.name for s in stage.state), *(v.name for v in stage.inputs)]):
            self.place_of[name] = i
        self._void = self._new_place()
        ops = stage.ops if training else _for_evaluation(stage)
        self.regions = self._regions(ops, keep={v.name for v in stage.outputs})
        self.outputs = [self.place_of[v.name] for v in stage.outputs]

    def _new_place(self, content: Any = None) -> int:
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

    def _instruction(self, op: Op, cleared: Sequence[str]) -> _Instruction:
        built: list[tuple[int, Getter]] = []
        keywords = _kwargs(op)
        named = [key for key, arg in keywords.items() if _reads_values(arg)]
        places = [self._argument(arg, built) for arg in (*op.args, *(keywords[key] for key in named))]
        outs = [self._result(out) for out in op.outs]
        single = returns_one(op.op)
        function = self.functions.get(op.op) or resolve(op.op)
        void = () if all(op.outs) else (self._void,)
        return _Instruction(
            function=_by_name(function, named) if named else function,
            get=_getter(places),
            kwargs={key: decode(arg, self.device) for key, arg in keywords.items() if key not in named},
            built=tuple(built),
            place=outs[0] if single else -1,
            places=() if single else tuple(outs),
            cleared=(*(self.place_of[n] for n in cleared), *(at for at, _ in built), *void),
        )

    def _result(self, name: str) -> int:
        if not name:
            return self._void
        if name not in self.place_of:
            self.place_of[name] = self._new_place()
        return self.place_of[name]

    def _argument(self, arg: Arg, built: list[tuple[int, Getter]]) -> int:
        """The place of an argument: of a value, of a constant, or of a list that is built before the call."""
        if isinstance(arg, str) and arg.startswith("%"):
            return self.place_of[arg[1:]]
        if _reads_values(arg):
            assert isinstance(arg, tuple)
            place = self._new_place()
            built.append((place, _getter([self._argument(a, built) for a in arg])))
            return place
        return self._new_place(decode(arg, self.device))


def returns_one(name: str) -> bool:
    """Whether an op gives one result (and not a tuple or a list of them)."""
    if name in SYM or name in ("aten.sym_size.int", LITERAL, TRUNC_NORMAL):
        return True
    returns = schema_of(name).returns
    return len(returns) == 1 and str(returns[0].type) in ("Tensor", "number", "int", "SymInt")


def _kwargs(op: Op) -> Mapping[str, Arg]:
    """The op's named arguments; what makes a tensor from nothing makes it on the runner's device."""
    return {"device": "@", **op.kwargs} if needs_device(op.op) else op.kwargs


def _reads_values(arg: Arg) -> bool:
    return any(isinstance(a, str) and a.startswith("%") for a in (arg if isinstance(arg, tuple) else (arg,)))


def _by_name(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """`function` with its last arguments passed by name, for values that may only be given so."""

    def call(*args: Any, **kwargs: Any) -> Any:
        split = len(args) - len(names)
        return function(*args[:split], **dict(zip(names, args[split:], strict=True)), **kwargs)

    return call


def _getter(places: Sequence[int]) -> Getter:
    if len(places) == 1:
        only = places[0]
        return lambda env: (env[only],)
    if not places:
        return lambda env: ()
    return itemgetter(*places)


def _last_reads(ops: Sequence[Op], keep: set[str]) -> dict[int, list[str]]:
    """For each op the values that nobody reads after it."""
    last: dict[str, int] = {}
    for i, op in enumerate(ops):
        for name in (*op.outs, *refs(op)):
            if name and name not in keep:
                last[name] = i
    ends: dict[int, list[str]] = {}
    for name, i in last.items():
        ends.setdefault(i, []).append(name)
    return ends


def _for_evaluation(stage: Stage) -> tuple[Op, ...]:
    """The ops with their training flags off and without writes to the model's buffers."""
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
            ops.append(with_arguments(op, dict(train_flags(op.op))))
    return tuple(ops)


def with_arguments(op: Op, changed: Mapping[str, Any]) -> Op:
    """The op with some of its arguments given other values."""
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
    return Op(op.op, op.outs, tuple(args), kwargs, no_grad=op.no_grad, no_autocast=op.no_autocast)
