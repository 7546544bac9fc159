"""How fast this machine trains: FLOPs of forward and backward passes over the seconds that they take here.

    of a job's program      FLOPs / (seconds of the operations, each alone * strain)
    of the reference mix    FLOPs / mean seconds of whole passes

A processor runs each distinct operation of a job's program alone (`graph.timing`), so that a model too big for the
machine is measured too; what that leaves out, a container's quota for one, is in the strain (`strain`). The mix of what
models are made of is small: it is run as a whole, again and again, so long that a quota is felt.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from ..graph import measure_costs
from ..graph.threads import torch_threads
from ..graph.timing import measure_seconds
from .cgroup import allowed
from .mix import Block, Workload, reference_mix, there_and_back
from .strain import measure_strain

__all__ = ["Speed", "block_seconds", "measure_speed", "usable_cores"]

_JOB_S, _MIX_S = 4.0, 2.0
_WARM_UPS = 2


@dataclass(frozen=True)
class Speed:
    gflops: float  # per second
    measured_on: str


def usable_cores() -> float:
    """Processors that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(cores), allowed().cores or cores)


def measure_speed(
    job: Workload | None = None, *, threads: int, device: torch.device | None = None, budget_s: float | None = None
) -> Speed:
    """Of a job's program, or of the reference mix; an accelerator is measured by the mix."""
    device = device or torch.device("cpu")
    with torch_threads(threads):
        if job is not None and device.type == "cpu":
            return _of_job(job, budget_s or _JOB_S)
        mix = reference_mix()
        seconds = [block_seconds(block, device, (budget_s or _MIX_S) / len(mix)) for block in mix]
        flops = sum(block.flops for block in mix)
        return Speed(flops / max(sum(seconds), 1e-9) / 1e9, " and ".join(block.name for block in mix))


def _of_job(work: Workload, budget_s: float) -> Speed:
    costs = measure_costs(work.program, work.batch)
    found = measure_seconds(work.program, work.batch, budget_s=budget_s * 2 / 3, costs=costs)
    strain = measure_strain(work.program, costs, found, budget_s=budget_s / 3)
    seconds = sum(op.total_s for op in found) * strain
    return Speed(costs.flops(0, len(costs.ops)) / max(seconds, 1e-9) / 1e9, "the job's own program")


def block_seconds(block: Block, device: torch.device, budget_s: float) -> float:
    """The mean of as many passes as the budget allows, after two that do not count."""
    layers, x = block.build().to(device), torch.rand(block.shape, device=device)
    for _ in range(_WARM_UPS):
        there_and_back(layers, x)
    _synchronize(device)
    began, passes = time.perf_counter(), 0
    while passes == 0 or time.perf_counter() - began < budget_s:
        there_and_back(layers, x)
        _synchronize(device)
        passes += 1
    return (time.perf_counter() - began) / passes


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
