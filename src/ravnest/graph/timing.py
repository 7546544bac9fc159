"""Measured seconds of every op on this machine, forward and backward, one op at a time.

Two equal calls on tensors of the same dtypes, shapes and strides take the same time, so each distinct call is run once,
as a stage of a single op, on synthetic tensors. A model of many equal layers costs a few dozen measurements, and memory
for one op's tensors at a time.

    seconds of a call = minimum over repeats - seconds of an empty call

The minimum, because other load on the machine only ever adds time; with one torch thread, seconds of that thread on a
core, which other programs change less. Repeats are made in rounds over all ops until the
budget is used up, so that a slow period of the machine does not affect the same op every time. Not included: adding a
gradient to an existing one, and the optimizer step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from ravnest.core.config import require
from ravnest.graph.costs import Costs, measure_costs
from ravnest.graph.interpreter import Interpreter
from ravnest.graph.ops import ALLOWED
from ravnest.graph.program import (
    DTYPES,
    SCALARS,
    Op,
    Program,
    Stage,
    StateSpec,
    Value,
    dtype_name,
    map_refs,
    refs,
    resolve_dim,
)

__all__ = ["OpSeconds", "measure_seconds", "torch_threads"]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with `count` torch threads, and restore the number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_MAX_ROUNDS = 5
_RUNS = 3  # per op and round
_LONG_S = 0.05  # a run that takes longer is repeated only once within its round
_HEAVY = ("products", "convolutions", "recurrence")  # time proportional to FLOPs; that of other families to elements
_GUESS_S = {True: 5e-11, False: 1e-9}  # default per FLOP of a heavy op, and per element of others


@dataclass(frozen=True)
class OpSeconds:
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


class _TensorSpec(NamedTuple):
    """The properties of a tensor that an op's time depends on."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool


_ValueSpec = _TensorSpec | bool | int | float
_Key = tuple[bytes, tuple[_ValueSpec, ...]]


def measure_seconds(
    program: Program, batch: int, *, budget_s: float = 5.0, costs: Costs | None = None
) -> tuple[OpSeconds, ...]:
    """Seconds of every op for microbatches of `batch` samples, with the current number of torch threads.

    An op that fails on synthetic data, or is not reached within `budget_s`, is estimated from its FLOPs at the rate of
    the measured ops of its family; passing `costs` saves counting FLOPs.
    """
    require(batch >= 1, f"batch must be >= 1, got {batch}")
    require(budget_s > 0, f"budget_s must be > 0, got {budget_s}")
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # caused by synthetic data, not by the model
        timer = _OpTimer(program, batch, time.perf_counter() + budget_s)
        timer.repeat()
    measured = [timer.measurements[key].seconds for key in timer.keys]
    if None not in measured:
        return tuple(s for s in measured if s is not None)
    return _estimated(program, measured, costs or measure_costs(program, batch))


class _OpTimer:
    """Measures every distinct op of a program once, then again until the deadline."""

    def __init__(self, program: Program, batch: int, deadline: float) -> None:
        self.deadline = deadline
        self.overhead = _overhead()
        self.measurements: dict[_Key, _Measurement] = {}
        self.keys: list[_Key] = []
        specs: dict[str, _ValueSpec] = {v.name: _value_spec(v, batch) for v in program.inputs}
        specs.update((s.name, _state_spec(s)) for s in program.state)
        for op in program.ops:
            declared = [_value_spec(program.values[name], batch) if name else 0 for name in op.outs]
            measurement = self._measure_once(op, specs, declared)
            specs.update((name, spec) for name, spec in zip(op.outs, measurement.results, strict=True) if name)

    def _measure_once(self, op: Op, specs: dict[str, _ValueSpec], declared: list[_ValueSpec]) -> _Measurement:
        names = tuple(dict.fromkeys(refs(op)))
        positions = {name: str(i) for i, name in enumerate(names)}
        outs = tuple(f"out{i}" if out else "" for i, out in enumerate(op.outs))
        isolated = msgspec.structs.replace(map_refs(op, positions.__getitem__), outs=outs)
        arguments = tuple(specs[name] for name in names)
        key = msgspec.json.encode(isolated), arguments
        self.keys.append(key)
        if key not in self.measurements:
            self.measurements[key] = _Measurement(isolated, arguments, declared)
            if time.perf_counter() < self.deadline:
                self.measurements[key].measure(self.overhead)
        return self.measurements[key]

    def repeat(self) -> None:
        for _ in range(_MAX_ROUNDS - 1):
            for measurement in self.measurements.values():
                if measurement.seconds is not None and time.perf_counter() + measurement.spent_s < self.deadline:
                    measurement.measure(self.overhead)


class _Measurement:
    """One distinct op with the specs of its arguments and results, and its minimum seconds so far."""

    def __init__(self, op: Op, arguments: Sequence[_ValueSpec], declared: list[_ValueSpec]) -> None:
        self.op = op
        self.arguments = arguments
        self.results = declared
        self.seconds: OpSeconds | None = None
        self.spent_s = 0.0

    def measure(self, overhead: OpSeconds) -> None:
        """Run the op a few times; if it fails, `seconds` stays None."""
        start_s = time.perf_counter()
        try:
            forward_s, backward_s = self._minimum()
        except (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError):
            return  # synthetic data is not valid for every op
        self.spent_s = time.perf_counter() - start_s
        current = OpSeconds(max(forward_s - overhead.forward_s, 0.0), max(backward_s - overhead.backward_s, 0.0))
        best = self.seconds or current
        self.seconds = OpSeconds(min(current.forward_s, best.forward_s), min(current.backward_s, best.backward_s))

    def _minimum(self) -> tuple[float, float]:
        interpreter = Interpreter(_stage_of((self.op,), len(self.arguments)), fast_linear=True)
        leaves = [_synthetic(spec, _rows(self.op, self.arguments)) for spec in self.arguments]
        writes = ALLOWED.get(self.op.op) == "writes"
        forward_s = backward_s = inf
        for run in range(_RUNS):
            once_forward_s, once_backward_s, outputs = _run_once(interpreter, leaves, writes=writes)
            forward_s, backward_s = min(forward_s, once_forward_s), min(backward_s, once_backward_s)
            if run and once_forward_s + once_backward_s > _LONG_S:  # the first one also touches new memory
                break
        results = iter(outputs)
        self.results = [
            _spec(next(results), d) if out else 0 for out, d in zip(self.op.outs, self.results, strict=True)
        ]
        return forward_s, backward_s


def _run_once(interpreter: Interpreter, leaves: Sequence[Any], *, writes: bool) -> tuple[float, float, tuple[Any, ...]]:
    """Seconds of a forward pass and of its backward pass, and the results."""
    inputs = [*leaves]
    if writes:
        inputs[0] = leaves[0].clone()  # autograd rejects writes to a leaf
    now_s = _clock()
    start_s = now_s()
    outputs = interpreter({}, inputs)
    forward_s = now_s() - start_s
    ends = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    starts = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    if not ends or not starts:
        return forward_s, 0.0, outputs
    gradients = [torch.ones_like(t) for t in ends]
    start_s = now_s()
    torch.autograd.grad(ends, starts, gradients, allow_unused=True)
    return forward_s, now_s() - start_s, outputs


def _clock() -> Callable[[], float]:
    """Autograd computes on the calling thread, as long as all tensors are on the CPU."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _overhead() -> OpSeconds:
    """Seconds of a call that computes almost nothing."""
    empty = Interpreter(_stage_of((), 1))
    view = Interpreter(_stage_of((Op("aten.alias.default", ("out0",), ("%0",)),), 1))
    leaf = torch.ones(1, requires_grad=True)
    forward_s = min(_run_once(empty, [leaf], writes=False)[0] for _ in range(100))
    return OpSeconds(forward_s, min(_run_once(view, [leaf], writes=False)[1] for _ in range(100)))


def _stage_of(ops: tuple[Op, ...], num_inputs: int) -> Stage:
    inputs = tuple(Value(str(i), "float32") for i in range(num_inputs))
    outputs = tuple(Value(out, "float32") for op in ops for out in op.outs if out)
    return Stage(index=0, count=1, inputs=inputs, outputs=outputs, state=(), ops=ops)


def _value_spec(value: Value, batch: int) -> _ValueSpec:
    if value.dtype in SCALARS:
        return 1 if value.number is None else resolve_dim(value.number, batch)
    shape = tuple(resolve_dim(d, batch) for d in value.shape)
    return _TensorSpec(value.dtype, shape, _contiguous(shape), value.grad)


def _state_spec(state: StateSpec) -> _ValueSpec:
    grad = state.kind == "parameter" and state.trainable and DTYPES[state.dtype].is_floating_point
    return _TensorSpec(state.dtype, state.shape, _contiguous(state.shape), grad)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def _spec(result: Tensor | bool | int | float, declared: _ValueSpec) -> _ValueSpec:
    """The spec of an actual result; whether it gets a gradient is known from the whole program."""
    if not isinstance(result, Tensor):
        return result
    grad = declared.grad if isinstance(declared, _TensorSpec) else result.requires_grad
    return _TensorSpec(dtype_name(result.dtype), tuple(result.shape), result.stride(), grad)


def _synthetic(spec: _ValueSpec, num_rows: int) -> Any:
    """A tensor with this spec: fractions between 0 and 1, indices in range, masks that are all true."""
    if not isinstance(spec, _TensorSpec):
        return spec
    dtype = DTYPES[spec.dtype]
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=dtype)
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // dtype.itemsize,), (1,))
    if dtype.is_floating_point or dtype.is_complex:
        _tile(flat, torch.rand(4096, dtype=torch.float32).mul_(0.9).add_(0.05).to(dtype))
    elif num_rows:
        _tile(flat, torch.randint(0, num_rows, (4096,)).to(dtype))
    else:
        flat.fill_(dtype is torch.bool)
    return tensor.requires_grad_(spec.grad)


def _tile(flat: Tensor, pattern: Tensor) -> None:
    """Fill with repeats of a random pattern, at the speed of a copy."""
    whole = flat.numel() // pattern.numel() * pattern.numel()
    flat[:whole].view(-1, pattern.numel()).copy_(pattern)
    flat[whole:].copy_(pattern[: flat.numel() - whole])


def _rows(op: Op, arguments: Sequence[_ValueSpec]) -> int:
    """Number of rows that an index may address; 0 if only index 0 is certainly valid."""
    return arguments[0].shape[0] if op.op == "aten.embedding.default" and isinstance(arguments[0], _TensorSpec) else 0


def _estimated(program: Program, measured: Sequence[OpSeconds | None], costs: Costs) -> tuple[OpSeconds, ...]:
    """The measured seconds; for the other ops FLOPs times the seconds per FLOP of similar ops."""
    families = [ALLOWED.get(op.op, "views") for op in program.ops]

    @cache
    def rate(family: str, backward: bool) -> float:
        for similar in ({family}, set(_HEAVY) if family in _HEAVY else set(families) - set(_HEAVY)):
            pairs = [
                (seconds.backward_s, cost.backward_flops) if backward else (seconds.forward_s, cost.forward_flops)
                for seconds, cost, other in zip(measured, costs.ops, families, strict=True)
                if seconds is not None and other in similar
            ]
            if flops := sum(f for _, f in pairs):
                return sum(s for s, _ in pairs) / flops
        return _GUESS_S[family in _HEAVY]

    return tuple(
        seconds or OpSeconds(cost.forward_flops * rate(family, False), cost.backward_flops * rate(family, True))
        for seconds, cost, family in zip(measured, costs.ops, families, strict=True)
    )
