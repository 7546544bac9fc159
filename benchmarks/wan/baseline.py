"""Baselines of the benchmark over home lines: torch's schedules over gloo, one process on each host of the testbed.

    python -m benchmarks.wan.baseline --limit both --rank 0 --stages 4 --master ADDRESS --steps 3 --schedules 1F1B GPipe

Each process times its own stage while the others wait, before and after all train together, because the speed of a
machine varies: these are the seconds of the bound. Prints one line of JSON: `compute_s` of this stage for a microbatch,
and `samples_per_s` of all by schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pipeline.baselines import GPTStage
from benchmarks.wan.task import CONTEXT, LR, MICROBATCHES, POINTS, Point, make_batch, make_stage
from ravnest.examples.gpt import next_token_loss
from ravnest.worker.process import keep_freed_memory
from testbed.namespaces import DEVICE

PORT = 7600
WARM_UP = 1  # steps of the schedule that do not count
WARM_UP_MICROBATCHES = 8


def time_stage(point: Point, module: GPTStage, microbatches: int) -> float:
    """Mean seconds of forward and backward of a microbatch while the other hosts are idle.

    The mean, because a CPU quota is granted in periods, of which a microbatch meets more or fewer.
    """
    ids, targets = make_batch(point, 1)
    x = ids if module.is_first else torch.randn(point.sequences, CONTEXT, point.width, requires_grad=True)
    began_s = 0.0
    for i in range(WARM_UP_MICROBATCHES + microbatches):
        if i == WARM_UP_MICROBATCHES:
            began_s = time.perf_counter()
        _forward_backward(module, x, targets)
    module.zero_grad()
    return (time.perf_counter() - began_s) / microbatches


def time_in_turn(point: Point, module: GPTStage, rank: int, stages: int, microbatches: int) -> float:
    compute_s = 0.0
    for turn in range(stages):
        if turn == rank:
            compute_s = time_stage(point, module, microbatches)
        dist.barrier()
    return compute_s


def _forward_backward(module: GPTStage, x: Tensor, targets: Tensor) -> None:
    y = module(x)
    if module.is_last:
        next_token_loss(y, targets).backward()  # type: ignore[no-untyped-call]
    else:
        y.backward(torch.ones_like(y))


def make_step(name: str, point: Point, module: GPTStage, rank: int, stages: int) -> Callable[[], None]:
    """An update by a schedule of torch."""
    from torch.distributed.pipelining import PipelineStage, schedules

    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule: Any = schedules.get_schedule_class(name)(stage, MICROBATCHES, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    x, y = make_batch(point)
    args = (x,) if module.is_first else ()
    kwargs: dict[str, Any] = {"target": y, "losses": []} if module.is_last else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*args, **kwargs)
        optimizer.step()

    return step


def time_steps(point: Point, step: Callable[[], None], steps: int) -> float:
    """Samples per second of all processes, between two barriers."""
    for _ in range(WARM_UP):
        step()
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return steps * MICROBATCHES * point.sequences / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", choices=POINTS, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--master", required=True, help="the address of the first host")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--schedules", nargs="+", required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()  # as Ravnest's workers do: page faults would slow torch, and the bound, by several per cent
    os.environ.update(MASTER_ADDR=options.master, MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME=DEVICE)
    point, rank, stages = POINTS[options.limit], options.rank, options.stages
    dist.init_process_group("gloo", rank=rank, world_size=stages)
    module = make_stage(point, rank, stages)
    stage_s = [time_in_turn(point, module, rank, stages, microbatches=10)]
    samples_per_s = {
        name: time_steps(point, make_step(name, point, module, rank, stages), options.steps)
        for name in options.schedules
    }
    stage_s.append(time_in_turn(point, module, rank, stages, microbatches=10))
    compute_s = statistics.mean(stage_s)
    sys.stdout.write(json.dumps({"compute_s": compute_s, "samples_per_s": samples_per_s}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
