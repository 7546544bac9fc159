"""Training speed of this machine: FLOPs of forward and backward passes over the seconds that they take.

    of a job's program      FLOPs / (seconds of the operations, each alone * slowdown)
    of the reference mix    FLOPs / mean seconds of whole passes

On a CPU each distinct operation of a job's program runs alone (`graph.timing`), so that a model too big for the machine
can be measured too. Alone and repeated, an operation finds its data in the caches, and its fastest repeat counts. In a
training run caches are cold, memory is allocated and freed, a container's quota causes pauses, and other programs run:

    slowdown = seconds of a stretch of the program, forward and backward repeated / seconds of its operations alone

The stretch is the beginning of the program, up to the last cut within the time and memory for it.

The reference mix of common layers is small: it runs as a whole, repeated for long enough that a quota takes effect. It
runs in plain torch without tracing, so that a PC that joins is measured within seconds. Its FLOPs are counted by hand:
the product of an m x k by a k x n matrix is 2 m k n, and backward takes twice as much as forward.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ravnest.graph import Costs, Interpreter, Program, Stage, Tape, legal_cuts, measure_costs, split
from ravnest.graph.device import has_bfloat16, synchronize
from ravnest.graph.program import DTYPES, resolve_dim
from ravnest.graph.timing import OpSeconds, measure_seconds, torch_threads

__all__ = ["measure_slowdown", "measure_speed", "Workload", "reference_mix", "forward_backward"]

_BATCH, _LENGTH, _WIDTH, _HEADS = 4, 128, 512, 8
_CHANNELS, _SIDE = 64, 28


@dataclass(frozen=True)
class Workload:
    """A program at a microbatch size."""

    program: Program
    batch: int


@dataclass(frozen=True)
class WorkloadBlock:
    """Layers, the shape of their input, and the FLOPs of a forward and a backward pass."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    flops: int


def reference_mix() -> list[WorkloadBlock]:
    """Return a transformer block and a convolution block, both with the sizes of a small model."""
    tokens = _BATCH * _LENGTH
    linear = 2 * tokens * 12 * _WIDTH**2  # query, key, value and out: 4 width^2; two of the fourfold width: 8
    attention = 2 * (2 * tokens * _LENGTH * _WIDTH)
    pixels = _BATCH * _SIDE**2
    convolved = 2 * pixels * 9 * (_CHANNELS * _CHANNELS + _CHANNELS * 2 * _CHANNELS)
    return [
        WorkloadBlock("a transformer block", _Transformer, (_BATCH, _LENGTH, _WIDTH), 3 * (linear + attention)),
        WorkloadBlock("a convolution block", _convolutions, (_BATCH, _CHANNELS, _SIDE, _SIDE), 3 * convolved),
    ]


def forward_backward(block: nn.Module, x: Tensor) -> None:
    """Run a forward and a backward pass."""
    loss: Tensor = block(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]


class _Transformer(nn.Module):
    """A transformer block of basic operations, so that a pass has the same operations on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.wide, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.before(x)).view(batch, length, 3, _HEADS, width // _HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        widened: Tensor = nn.functional.gelu(self.wide(self.between(x)))
        return x + torch.as_tensor(self.narrow(widened))


def _convolutions() -> nn.Module:
    convolution = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
    wide = 2 * _CHANNELS
    return nn.Sequential(
        convolution(_CHANNELS, _CHANNELS), nn.BatchNorm2d(_CHANNELS), nn.ReLU(),
        convolution(_CHANNELS, wide), nn.BatchNorm2d(wide), nn.ReLU(),
    )  # fmt: skip


# slowdown of a program

_MAX_STRETCH_BYTES = 500_000_000
_MIN_RUNS = 3
_DEFAULT_SLOWDOWN = 1.15  # of a program that does not run on synthetic data
_MAX_SLOWDOWN = 1.5  # more is that of a stretch alone, such as a large embedding whose gradient is new memory each time


def measure_slowdown(program: Program, costs: Costs, seconds: Sequence[OpSeconds], *, budget_s: float = 1.0) -> float:
    """Measure the slowdown with the current torch threads; `seconds` and `costs` are of the same microbatch."""
    end = _stretch_end(program, costs, seconds, budget_s / (_MIN_RUNS + 1))
    alone_s = sum(op.total_s for op in seconds[:end])
    if not alone_s:
        return _DEFAULT_SLOWDOWN
    stage = split(program, () if end == len(program.ops) else (end,))[0]
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about synthetic data, not about the model
            return min(max(1.0, _pass_seconds(stage, costs.batch, budget_s) / alone_s), _MAX_SLOWDOWN)
    except (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError):
        return _DEFAULT_SLOWDOWN  # an op that rejects synthetic data


def _stretch_end(program: Program, costs: Costs, seconds: Sequence[OpSeconds], max_s: float) -> int:
    """Return the end of the stretch: the last cut within time and memory, at least the first cut."""
    taken_s, taken_bytes, spent, best = 0.0, 0, 0, 0
    for cut in (*legal_cuts(program), len(program.ops)):
        taken_s += sum(op.total_s for op in seconds[spent:cut])
        taken_bytes += sum(op.result_bytes + 2 * op.parameter_bytes for op in costs.ops[spent:cut])
        spent = cut
        if best and (taken_s > max_s or taken_bytes > _MAX_STRETCH_BYTES):
            break
        best = cut
    return best


def _pass_seconds(stage: Stage, batch: int, budget_s: float) -> float:
    """Return the mean seconds of a forward and a backward pass."""
    runner = Interpreter(stage)
    state = {s.target: _synthetic(s.dtype, s.shape).requires_grad_(s.trainable) for s in stage.state}
    inputs = [_synthetic(v.dtype, [resolve_dim(d, batch) for d in v.shape]) for v in stage.inputs]

    def once() -> None:
        tape = Tape(runner, state, inputs)
        tape.backward([_ones(o) for o in tape.outputs])
        for tensor in state.values():
            tensor.grad = None

    once()
    runs, began = 0, time.perf_counter()
    while runs < _MIN_RUNS or time.perf_counter() - began < budget_s:
        once()
        runs += 1
    return (time.perf_counter() - began) / runs


def _synthetic(dtype: str, shape: Sequence[int]) -> Tensor:
    """Return small fractions; for integers 0, which is a valid index of every table."""
    kind = DTYPES[dtype]
    return torch.rand(shape).mul_(0.05).to(kind) if kind.is_floating_point else torch.zeros(shape, dtype=kind)


def _ones(output: Any) -> Tensor | None:
    is_float = isinstance(output, Tensor) and output.is_floating_point()
    return torch.ones_like(output) if is_float else None


# speed

_JOB_S, _MIX_S = 4.0, 2.0
_WARM_UPS = 2


@dataclass(frozen=True)
class Speed:
    """GFLOP/s in float32; of an accelerator also under autocast, in `low_precision`."""

    gflops: float
    measured_on: str
    low_precision: str = ""
    low_precision_gflops: float = 0.0


def measure_speed(
    job: Workload | None = None,
    *,
    threads: int,
    device: torch.device | None = None,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Measure the speed on a job's program, or on the reference mix; an accelerator is measured on the mix.

    With `time.thread_time` as the `clock` of the mix, the speed of one thread while it has a core.
    """  # fmt: skip
    device = device or torch.device("cpu")
    with torch_threads(threads):
        if job is not None and device.type == "cpu":
            return _of_job(job, budget_s or _JOB_S)
        mix = reference_mix()
        name, budget_s = " and ".join(block.name for block in mix), budget_s or _MIX_S
        if device.type == "cpu":
            return Speed(_mix_gflops(mix, device, budget_s, clock), name)
        low = "bf16" if has_bfloat16(device) else "fp16"
        dtype = torch.bfloat16 if low == "bf16" else torch.float16
        fast = _mix_gflops(mix, device, budget_s / 2, clock, dtype)
        return Speed(_mix_gflops(mix, device, budget_s / 2, clock), name, low, fast)


def _mix_gflops(
    mix: Sequence[WorkloadBlock],
    device: torch.device,
    budget_s: float,
    clock: Callable[[], float],
    autocast: torch.dtype | None = None,
) -> float:
    seconds = [block_seconds(block, device, budget_s / len(mix), clock, autocast) for block in mix]
    return sum(block.flops for block in mix) / max(sum(seconds), 1e-9) / 1e9


def _of_job(work: Workload, budget_s: float) -> Speed:
    costs = measure_costs(work.program, work.batch)
    alone = measure_seconds(work.program, work.batch, budget_s=budget_s * 2 / 3, costs=costs)
    slowdown = measure_slowdown(work.program, costs, alone, budget_s=budget_s / 3)
    seconds = sum(op.total_s for op in alone) * slowdown
    return Speed(costs.flops(0, len(costs.ops)) / max(seconds, 1e-9) / 1e9, "the job's own program")


def block_seconds(
    block: WorkloadBlock,
    device: torch.device,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
    autocast: torch.dtype | None = None,
) -> float:
    """Return the mean seconds, by `clock`, of as many passes as the budget allows, after two for warm-up."""
    layers, x = block.build().to(device), torch.rand(block.shape, device=device)

    def once() -> None:
        with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            forward_backward(layers, x)

    for _ in range(_WARM_UPS):
        once()
    synchronize(device)
    began, passes, end_s = clock(), 0, time.perf_counter() + budget_s
    while passes == 0 or time.perf_counter() < end_s:
        once()
        synchronize(device)
        passes += 1
    return (clock() - began) / passes
