"""Turns a job and a node file into a task for the planner, without training.

The job is traced, and its ops are timed on this machine. Node files give speeds in GFLOP/s, so the reference is the
speed of this machine on the same program, by the convention of `ravnest profile`:

    speed of a node = its GFLOP/s / ours        ours = FLOPs of forward and backward / seconds measured here

If this machine is slow during the measurement, seconds and speeds grow by the same factor, which cancels out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from ravnest.graph import Costs, Cutter, Program, Value, measure_costs
from ravnest.graph.program import num_bytes, resolve_dim
from ravnest.graph.timing import torch_threads
from ravnest.pipeline.optimizers import Optimizer
from ravnest.planner import Chain, MemoryModel
from ravnest.planner.fleet import Fleet, Task
from ravnest.planner.node_file import NodeFile
from ravnest.profiling.speed import Workload
from ravnest.run.plan import chain_of, memory_model

__all__ = ["TimedJob", "compressed", "make_plan_request", "sent_bytes", "time_job"]

if TYPE_CHECKING:
    from ravnest.config import TrainingConfig
    from ravnest.run.job import Job


@dataclass(frozen=True)
class PlanRequest:
    """The planner's task, and its measured inputs: FLOPs of a microbatch, and this machine's speed."""

    task: Task
    microbatch_flops: int
    reference_gflops: float


@dataclass(frozen=True)
class TimedJob:
    """Times and sizes of a job for microbatches of `microbatch` samples; `gflops` is this machine's speed on it."""

    chain: Chain
    memory: MemoryModel
    microbatch: int
    accumulate: int
    max_staleness: int
    flops: int
    gflops: float

    def task(self, fleet: Fleet, *, whole: bool = False, num_spares: int = 0) -> Task:
        """Return the planner's task for this fleet. With `whole`, one machine may hold the whole model."""
        return Task(
            chain=self.chain if whole else self.chain.sharing_weights(),
            fleet=fleet,
            memory=self.memory,
            microbatch=self.microbatch,
            accumulate=self.accumulate,
            max_staleness=self.max_staleness,
            min_stages=1 if whole else 2,
            num_spares=num_spares,
        )


def make_plan_request(job: Job, nodes: NodeFile, *, log: Callable[[str], None] = lambda text: None) -> PlanRequest:
    """Trace the job, time it on this machine, and return the task for the planner.

    Without `job.config.microbatches_per_step`, a step has as many microbatches as the pipeline has in flight.
    """
    log("tracing the model")
    work = job.workload()
    log(f"timing its {len(work.program.ops)} operations on this machine")
    timed = time_job(work, job.optimizer, job.config, accumulate=job.config.microbatches_per_step or 0)
    task = timed.task(nodes.fleet(timed.gflops), whole=job.config.allow_single_node, num_spares=job.config.spares)
    return PlanRequest(task, timed.flops, timed.gflops)


def time_job(work: Workload, optimizer: Optimizer, config: TrainingConfig, *, accumulate: int) -> TimedJob:
    """Time a program's ops on this machine, and model the memory of its training."""
    costs = measure_costs(work.program, work.batch)
    chain = _timed(work.program, costs)
    flops = costs.flops(0, len(costs.ops))
    return TimedJob(
        chain=compressed(chain, work.program, work.batch, config.activation_compression),
        memory=memory_model(
            work.program, optimizer, config.correction, mode=config.memory_mode, synchronous=config.is_synchronous,
            accumulate=accumulate, recompute=config.recomputes, ring_copies=config.ring_copies,
        ),
        microbatch=work.batch,
        accumulate=accumulate,
        max_staleness=config.max_staleness or 1,
        flops=flops,
        gflops=max(flops, 1) / max(sum(chain.forward_s) + sum(chain.backward_s), 1e-9) / 1e9,
    )  # fmt: skip


def _timed(program: Program, costs: Costs) -> Chain:
    """Time the ops with one thread: only their ratios matter, and these vary least on a busy machine."""
    with torch_threads(1):
        return chain_of(program, costs)


def compressed(chain: Chain, program: Program, batch: int, compression: str) -> Chain:
    """Return the chain with the compressed sizes of values that cross its cuts."""
    if compression == "none":
        return chain
    cutter = Cutter(program)
    forward, backward = list(chain.forward_bytes), list(chain.backward_bytes)
    for cut in chain.cuts:
        crossing = cutter.crossing(cut)
        forward[cut] = sum(sent_bytes(value, batch, compression) for value in crossing)
        backward[cut] = sum(sent_bytes(value, batch, compression) for value in crossing if value.grad)
    return replace(chain, forward_bytes=tuple(forward), backward_bytes=tuple(backward))


def sent_bytes(value: Value, batch: int, compression: str) -> int:
    """Return the bytes of a value on a link: `pipeline.tensor_codec` compresses floats that have a gradient."""
    if compression == "none" or not value.grad or value.dtype != "float32" or not value.shape:
        return num_bytes(value, batch)
    shape = [resolve_dim(d, batch) for d in value.shape]
    if compression == "bf16":
        return 2 * prod(shape)
    return prod(shape) + 4 * prod(shape[:-1])  # int8, and a float scale per row
