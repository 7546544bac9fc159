"""What each op takes on this machine: seconds, forward and backward, measured one op at a time.

Two ops that are the same call on tensors that look the same take the same time, so each distinct one is run
alone, as a stage of a single op, on made-up tensors of the same sizes and strides. A model of many equal layers
costs a few dozen measurements, and memory for one op's tensors at a time.

    seconds of a call = the least of its repeats - what an empty call takes

The least, because whatever else the machine does only ever adds. Repeats are made in rounds over all ops, until
the budget is used up, so that a slow moment of the machine does not meet the same op each time. What is left out:
adding a gradient to one that is there already, and the optimizer's step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from .costs import Costs, measure_costs
from .ops import ALLOWED
from .program import DTYPES, SCALARS, Op, Program, Stage, State, Value, dtype_name, map_refs, refs, resolve_dim
from .run import Runner

__all__ = ["OpSeconds", "measure_seconds"]

_MAX_ROUNDS = 5
_RUNS = 3  # of one op in one round
_LONG_S = 0.05  # a run that takes this long is not repeated at once
_HEAVY = ("products", "convolutions", "recurrence")  # whose time goes with their FLOPs, others' with their elements
_GUESS_S = {True: 5e-11, False: 1e-9}  # per FLOP of a heavy op, per element of another: if nothing was measured


@dataclass(frozen=True)
class OpSeconds:
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


class _Look(NamedTuple):
    """All of a tensor that an op's time depends on."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool


_Seen = _Look | bool | int | float
_Key = tuple[bytes, tuple[_Seen, ...]]


def measure_seconds(
    program: Program, batch: int, *, budget_s: float = 5.0, costs: Costs | None = None
) -> tuple[OpSeconds, ...]:
    """Seconds of every op for microbatches of `batch` samples, with the threads that torch uses now.

    An op that does not run on made-up data, or whose turn comes after `budget_s`, is estimated from its FLOPs
    at the rate of the measured ops of its family; `costs` saves counting them.
    """
    if batch < 1 or budget_s <= 0:
        raise ValueError(f"a batch of at least 1 and a budget above 0 s are needed, not {batch} and {budget_s}")
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about made-up data, not about the model
        survey = _Survey(program, batch, time.perf_counter() + budget_s)
        survey.repeat()
    measured = [survey.samples[key].seconds for key in survey.keys]
    if None not in measured:
        return tuple(s for s in measured if s is not None)
    return _estimated(program, measured, costs or measure_costs(program, batch))


class _Survey:
    """Walks the program, meets every distinct op once, then measures them again while there is time."""

    def __init__(self, program: Program, batch: int, deadline: float) -> None:
        self.deadline = deadline
        self.overhead = _overhead()
        self.samples: dict[_Key, _Sample] = {}
        self.keys: list[_Key] = []
        seen: dict[str, _Seen] = {v.name: _described(v, batch) for v in program.inputs}
        seen.update((s.name, _kept(s)) for s in program.state)
        for op in program.ops:
            declared = [_described(program.values[name], batch) if name else 0 for name in op.outs]
            sample = self._meet(op, seen, declared)
            seen.update((name, look) for name, look in zip(op.outs, sample.made, strict=True) if name)

    def _meet(self, op: Op, seen: dict[str, _Seen], declared: list[_Seen]) -> _Sample:
        names = tuple(dict.fromkeys(refs(op)))
        places = {name: str(i) for i, name in enumerate(names)}
        alone = map_refs(op, places.__getitem__)
        alone = msgspec.structs.replace(alone, outs=tuple(f"out{i}" if out else "" for i, out in enumerate(op.outs)))
        looks = tuple(seen[name] for name in names)
        key = msgspec.json.encode(alone), looks
        self.keys.append(key)
        if key not in self.samples:
            self.samples[key] = _Sample(alone, looks, declared)
            if time.perf_counter() < self.deadline:
                self.samples[key].measure(self.overhead)
        return self.samples[key]

    def repeat(self) -> None:
        for _ in range(_MAX_ROUNDS - 1):
            for sample in self.samples.values():
                if sample.seconds is not None and time.perf_counter() + sample.spent_s < self.deadline:
                    sample.measure(self.overhead)


class _Sample:
    """One distinct op, what its arguments look like, and the least it took so far."""

    def __init__(self, op: Op, looks: Sequence[_Seen], declared: list[_Seen]) -> None:
        self.op = op
        self.looks = looks
        self.made = declared
        self.seconds: OpSeconds | None = None
        self.spent_s = 0.0

    def measure(self, overhead: OpSeconds) -> None:
        """Run the op a few times; if torch refuses, `seconds` stays None."""
        began = time.perf_counter()
        try:
            forward_s, backward_s = self._least()
        except (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError):
            return  # made-up data cannot please every op
        self.spent_s = time.perf_counter() - began
        now = OpSeconds(max(forward_s - overhead.forward_s, 0.0), max(backward_s - overhead.backward_s, 0.0))
        before = self.seconds or now
        self.seconds = OpSeconds(min(now.forward_s, before.forward_s), min(now.backward_s, before.backward_s))

    def _least(self) -> tuple[float, float]:
        runner = Runner(_stage_of((self.op,), len(self.looks)), quick=True)
        leaves = [_make_up(look, _rows(self.op, self.looks)) for look in self.looks]
        forward_s = backward_s = inf
        for _ in range(_RUNS):
            before, after, outputs = _once(runner, leaves, writes=ALLOWED.get(self.op.op) == "writes")
            forward_s, backward_s = min(forward_s, before), min(backward_s, after)
            if before + after > _LONG_S:
                break
        results = iter(outputs)
        self.made = [_look(next(results), d) if out else 0 for out, d in zip(self.op.outs, self.made, strict=True)]
        return forward_s, backward_s


def _once(runner: Runner, leaves: Sequence[Any], *, writes: bool) -> tuple[float, float, tuple[Any, ...]]:
    """Seconds of a forward pass and of the backward pass that belongs to it, and the results."""
    inputs = [*leaves]
    if writes:
        inputs[0] = leaves[0].clone()  # autograd allows no write to a leaf
    began = time.perf_counter()
    outputs = runner({}, inputs)
    forward_s = time.perf_counter() - began
    ends = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    starts = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    if not ends or not starts:
        return forward_s, 0.0, outputs
    gradients = [torch.ones_like(t) for t in ends]
    began = time.perf_counter()
    torch.autograd.grad(ends, starts, gradients, allow_unused=True)
    return forward_s, time.perf_counter() - began, outputs


def _overhead() -> OpSeconds:
    """What calling takes when there is next to nothing to compute."""
    nothing = Runner(_stage_of((), 1))
    view = Runner(_stage_of((Op("aten.alias.default", ("out0",), ("%0",)),), 1))
    leaf = torch.ones(1, requires_grad=True)
    forward_s = min(_once(nothing, [leaf], writes=False)[0] for _ in range(100))
    return OpSeconds(forward_s, min(_once(view, [leaf], writes=False)[1] for _ in range(100)))


def _stage_of(ops: tuple[Op, ...], num_inputs: int) -> Stage:
    inputs = tuple(Value(str(i), "float32") for i in range(num_inputs))
    outputs = tuple(Value(out, "float32") for op in ops for out in op.outs if out)
    return Stage(index=0, count=1, inputs=inputs, outputs=outputs, state=(), ops=ops)


def _described(value: Value, batch: int) -> _Seen:
    if value.dtype in SCALARS:
        return 1 if value.number is None else resolve_dim(value.number, batch)
    shape = tuple(resolve_dim(d, batch) for d in value.shape)
    return _Look(value.dtype, shape, _contiguous(shape), value.grad)


def _kept(state: State) -> _Seen:
    grad = state.kind == "parameter" and state.trainable and DTYPES[state.dtype].is_floating_point
    return _Look(state.dtype, state.shape, _contiguous(state.shape), grad)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def _look(result: Tensor | bool | int | float, declared: _Seen) -> _Seen:
    """What an op really gave; whether a gradient comes back for it is known from the whole program."""
    if not isinstance(result, Tensor):
        return result
    grad = declared.grad if isinstance(declared, _Look) else result.requires_grad
    return _Look(dtype_name(result.dtype), tuple(result.shape), result.stride(), grad)


def _make_up(look: _Seen, num_rows: int) -> Any:
    """A tensor that looks so: fractions between 0 and 1, indices that are in range, masks that hide nothing."""
    if not isinstance(look, _Look):
        return look
    dtype = DTYPES[look.dtype]
    tensor = torch.empty_strided(look.shape, look.stride, dtype=dtype)
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // dtype.itemsize,), (1,))
    if dtype.is_floating_point or dtype.is_complex:
        _tile(flat, torch.rand(4096, dtype=torch.float32).mul_(0.9).add_(0.05).to(dtype))
    elif num_rows:
        _tile(flat, torch.randint(0, num_rows, (4096,)).to(dtype))
    else:
        flat.fill_(dtype is torch.bool)
    return tensor.requires_grad_(look.grad)


def _tile(flat: Tensor, pattern: Tensor) -> None:
    """Fill with repeats of a pattern: as random as an op needs, at the speed of a copy."""
    whole = flat.numel() // pattern.numel() * pattern.numel()
    flat[:whole].view(-1, pattern.numel()).copy_(pattern)
    flat[whole:].copy_(pattern[: flat.numel() - whole])


def _rows(op: Op, looks: Sequence[_Seen]) -> int:
    """How many rows an index may pick from; 0 if only the first is sure to be there."""
    return looks[0].shape[0] if op.op == "aten.embedding.default" and isinstance(looks[0], _Look) else 0


def _estimated(program: Program, measured: Sequence[OpSeconds | None], costs: Costs) -> tuple[OpSeconds, ...]:
    """The measured seconds, and for the others FLOPs times the seconds per FLOP of their like."""
    families = [ALLOWED.get(op.op, "views") for op in program.ops]

    @cache
    def rate(family: str, backward: bool) -> float:
        for like in ({family}, set(_HEAVY) if family in _HEAVY else set(families) - set(_HEAVY)):
            pairs = [
                (seconds.backward_s, cost.backward_flops) if backward else (seconds.forward_s, cost.forward_flops)
                for seconds, cost, other in zip(measured, costs.ops, families, strict=True)
                if seconds is not None and other in like
            ]
            if flops := sum(f for _, f in pairs):
                return sum(s for s, _ in pairs) / flops
        return _GUESS_S[family in _HEAVY]

    return tuple(
        seconds or OpSeconds(cost.forward_flops * rate(family, False), cost.backward_flops * rate(family, True))
        for seconds, cost, family in zip(measured, costs.ops, families, strict=True)
    )
