"""How fast this machine trains: FLOPs of a program's forward and backward passes over the seconds that they take here.

    speed = FLOPs / (seconds of the operations, each alone * strain)

The program is the job's own where there is one, else a reference mix of what models are made of: a transformer block
and a block of convolutions. A processor runs each distinct operation alone (`graph.timing`), so that a model too big
for the machine is measured too; what that leaves out, a container's quota for one, is in the strain (`strain`). An
accelerator runs the reference mix as a whole.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from ..graph import Runner, Tape, initialise, measure_costs, split
from ..graph.program import resolve_dim
from ..graph.threads import torch_threads
from ..graph.timing import measure_seconds
from .cgroup import allowed
from .mix import Workload, reference_mix
from .strain import measure_strain

__all__ = ["Speed", "measure_speed", "usable_cores", "whole_seconds"]

_REPEATS = 5


@dataclass(frozen=True)
class Speed:
    gflops: float  # per second
    measured_on: str


def usable_cores() -> float:
    """Processors that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(cores), allowed().cores or cores)


def measure_speed(
    job: Workload | None = None, *, threads: int, device: torch.device | None = None, budget_s: float = 4.0
) -> Speed:
    """Of a job's program, or of the reference mix; `budget_s` is without tracing the mix."""
    device = device or torch.device("cpu")
    on_cpu = device.type == "cpu"
    works = [job] if job is not None and on_cpu else reference_mix()
    flops = seconds = 0.0
    with torch_threads(threads):
        for work in works:
            costs = measure_costs(work.program, work.batch)
            flops += costs.flops(0, len(costs.ops))
            if on_cpu:
                share_s = budget_s / len(works)
                found = measure_seconds(work.program, work.batch, budget_s=share_s * 2 / 3, costs=costs)
                strain = measure_strain(work.program, costs, found, budget_s=share_s / 3)
                seconds += sum(op.total_s for op in found) * strain
            else:
                seconds += whole_seconds(work, device)
    on = "the job's own program" if works == [job] else "a transformer block and a convolution block"
    return Speed(flops / max(seconds, 1e-9) / 1e9, on)


def whole_seconds(work: Workload, device: torch.device) -> float:
    """The least that a whole forward and backward pass takes, for workloads of the reference mix."""
    (stage,) = split(work.program, ())
    runner = Runner(stage, device)
    trained = {s.target for s in stage.parameters if s.trainable}
    state = {n: t.to(device).requires_grad_(n in trained) for n, t in initialise(stage, seed=0).items()}
    inputs = [torch.rand([resolve_dim(d, work.batch) for d in v.shape], device=device) for v in stage.inputs]
    least = float("inf")
    for _ in range(_REPEATS):
        _synchronize(device)
        began = time.perf_counter()
        Tape(runner, state, inputs).backward()
        _synchronize(device)
        least = min(least, time.perf_counter() - began)
    return least


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
