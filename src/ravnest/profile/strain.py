"""How much slower work is in a row than operation by operation.

Alone and repeated, an operation finds its data in the caches, and of its repeats the quickest counts. In a training
run caches are cold, memory is taken and given back, a container's quota makes pauses, others use the machine too.

    strain = seconds of a stretch of the program, forward and backward over and over / seconds of its operations alone

The stretch is the program's beginning, as much as fits into the time and the memory for it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import Costs, Program, Runner, Stage, Tape, legal_cuts, split
from ..graph.program import DTYPES, resolve_dim
from ..graph.timing import OpSeconds

__all__ = ["measure_strain"]

_MOST_BYTES = 500_000_000
_LEAST_RUNS = 3
_USUAL = 1.15  # of a program that cannot be run on made-up data


def measure_strain(program: Program, costs: Costs, seconds: Sequence[OpSeconds], *, budget_s: float = 1.0) -> float:
    """The factor, with the threads that torch uses now; `seconds` and `costs` are of the same microbatch."""
    end = _stretch(program, costs, seconds, budget_s / (_LEAST_RUNS + 1))
    alone_s = sum(op.total_s for op in seconds[:end])
    if not alone_s:
        return _USUAL
    stage = split(program, () if end == len(program.ops) else (end,))[0]
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about made-up data, not about the model
            return max(1.0, _in_a_row_s(stage, costs.batch, budget_s) / alone_s)
    except (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError):
        return _USUAL  # made-up data cannot please every op


def _stretch(program: Program, costs: Costs, seconds: Sequence[OpSeconds], most_s: float) -> int:
    """Where it ends: at the last cut within time and memory, or at the first."""
    taken_s, taken_bytes, spent, best = 0.0, 0, 0, 0
    for cut in (*legal_cuts(program), len(program.ops)):
        taken_s += sum(op.total_s for op in seconds[spent:cut])
        taken_bytes += sum(op.result_bytes + 2 * op.parameter_bytes for op in costs.ops[spent:cut])
        spent = cut
        if best and (taken_s > most_s or taken_bytes > _MOST_BYTES):
            break
        best = cut
    return best


def _in_a_row_s(stage: Stage, batch: int, budget_s: float) -> float:
    """Seconds of one pass forward and backward, the mean of many."""
    runner = Runner(stage)
    state = {s.target: _made_up(s.dtype, s.shape).requires_grad_(s.trainable) for s in stage.state}
    inputs = [_made_up(v.dtype, [resolve_dim(d, batch) for d in v.shape]) for v in stage.inputs]

    def once() -> None:
        tape = Tape(runner, state, inputs)
        tape.backward([_ones(o) for o in tape.outputs])
        for tensor in state.values():
            tensor.grad = None

    once()
    runs, began = 0, time.perf_counter()
    while runs < _LEAST_RUNS or time.perf_counter() - began < budget_s:
        once()
        runs += 1
    return (time.perf_counter() - began) / runs


def _made_up(dtype: str, shape: Sequence[int]) -> Tensor:
    """Small fractions, and for the rest 0: an index that is always there."""
    kind = DTYPES[dtype]
    return torch.rand(shape).mul_(0.05).to(kind) if kind.is_floating_point else torch.zeros(shape, dtype=kind)


def _ones(output: Any) -> Tensor | None:
    is_float = isinstance(output, Tensor) and output.is_floating_point()
    return torch.ones_like(output) if is_float else None
