"""Baselines of the pipeline benchmark: PyTorch's own ways to train one GPT with two processes, each pinned to a core.

    python -m benchmarks.pipeline.baselines --mode 1F1B --microbatches 4 --steps 12

prints one line of JSON: samples per second of all processes together, after a warm-up. Modes: single (one process),
two (two independent processes: the ceiling), ddp, and the schedules of
torch.distributed.pipelining by their names. All train the same model on the same batch with AdamW.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss

CONFIG = GPTConfig(vocab=1024, context=64, layers=8, width=256, heads=4, dropout=0.0)
SEQUENCES = 4  # a microbatch
LR = 1e-3
Step = Callable[[], None]


class GPTStage(nn.Module):
    """A range of blocks of the GPT, with the embeddings before the first and the head after the last."""

    def __init__(self, model: GPT, first: int, last: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[first:last])
        self.is_first, self.is_last = first == 0, last == len(model.blocks)
        if self.is_first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def batch(microbatches: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CONFIG.vocab, (microbatches * SEQUENCES, CONFIG.context), generator=generator)
    return ids, ids.roll(-1, 1)


def single_process(microbatches: int) -> Step:
    """A step of one process with the whole model."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    x, y = batch(microbatches)

    def step() -> None:
        optimizer.zero_grad()
        for xs, ys in zip(x.split(SEQUENCES), y.split(SEQUENCES), strict=True):  # type: ignore[no-untyped-call]
            (next_token_loss(model(xs), ys) / microbatches).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def data_parallel(rank: int, microbatches: int) -> Step:
    """A step of DDP: the whole model in each process, gradients averaged."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(GPT(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    x, y = batch(microbatches)
    shard = list(zip(x.split(SEQUENCES), y.split(SEQUENCES), strict=True))[rank::2]  # type: ignore[no-untyped-call]

    def step() -> None:
        optimizer.zero_grad()
        for i, (xs, ys) in enumerate(shard):
            model.require_backward_grad_sync = i == len(shard) - 1
            (next_token_loss(model(xs), ys) / len(shard)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def pipelined(rank: int, mode: str, microbatches: int) -> Step:
    """A step of a schedule of torch with two processes and stages of equal size."""
    from torch.distributed.pipelining import PipelineStage, schedules

    cls: Any = schedules.get_schedule_class(mode)
    has_several_stages = issubclass(cls, schedules.PipelineScheduleMulti)
    count = 4 if has_several_stages else 2
    torch.manual_seed(0)
    model = GPT(CONFIG)
    width = len(model.blocks) // count
    stage_modules = [GPTStage(model, i * width, (i + 1) * width) for i in range(count)]
    mine = [rank, count - 1 - rank] if mode == "ZBVZeroBubble" else list(range(rank, count, 2))
    stages = [PipelineStage(stage_modules[i], i, count, torch.device("cpu")) for i in mine]
    optimizer = torch.optim.AdamW([p for i in mine for p in stage_modules[i].parameters()], lr=LR)
    schedule = cls(stages if has_several_stages else stages[0], microbatches, loss_fn=next_token_loss)
    x, y = batch(microbatches)
    args = (x,) if 0 in mine else ()
    kwargs: dict[str, Any] = {"target": y, "losses": []} if count - 1 in mine else {}
    if "return_outputs" in schedule.step.__code__.co_varnames:
        kwargs["return_outputs"] = False

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*args, **kwargs)
        optimizer.step()

    return step


def work(rank: int, options: argparse.Namespace, port: int, results: Any) -> None:
    """Run one process: warm up, then time the steps between two barriers."""
    warnings.simplefilter("ignore")
    os.sched_setaffinity(0, {rank})
    torch.set_num_threads(1)
    together = options.mode != "single"
    if together:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=2)
    if options.mode in ("single", "two"):
        step = single_process(options.microbatches)
    elif options.mode == "ddp":
        step = data_parallel(rank, options.microbatches)
    else:
        step = pipelined(rank, options.mode, options.microbatches)
    for _ in range(2):
        step()
    if together:
        dist.barrier()
    began = time.perf_counter()
    for _ in range(options.steps):
        step()
    if together and options.mode != "two":
        dist.barrier()
    results.put(time.perf_counter() - began)
    if together:
        dist.barrier()
        dist.destroy_process_group()


def measure(options: argparse.Namespace) -> float:
    """Samples per second of all processes together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    count = 1 if options.mode == "single" else 2
    processes = [context.Process(target=work, args=(rank, options, port, results)) for rank in range(count)]
    for process in processes:
        process.start()
    seconds: list[float] = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=30)
    samples = float(options.steps * options.microbatches * SEQUENCES)
    return sum(samples / s for s in seconds) if options.mode == "two" else samples / max(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    sys.stdout.write(json.dumps({"samples_per_s": measure(options)}) + "\n")


if __name__ == "__main__":
    main()
