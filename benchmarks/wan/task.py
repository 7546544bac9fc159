"""The task of the benchmark over home lines, and an upper bound for any pipeline over those lines.

A stage computes c seconds for a microbatch of b samples. The host of a stage sends activations to the next stage and
gradients to the previous one over its only line, so with u bytes up and d bytes down for a microbatch

    samples/s <= b / max over stages of (c, u / rate, d / rate)

The bytes are those of the tensors alone: encryption, headers and acknowledgements count against the system measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ravnest
from benchmarks.pipeline.baselines import GPTStage
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from testbed import HostSpec, Line, Topology

VOCAB, CONTEXT = 64, 128  # a small vocabulary: the head costs little, so stages are even
MICROBATCHES = 12  # per update
LR = 1e-3


@dataclass(frozen=True)
class Point:
    """A model and its microbatches; the tensors of one cut take 63 ms on the line, one way."""

    limit: str  # what limits the pipeline, by the bound
    blocks: int  # of a stage
    width: int
    heads: int
    sequences: int  # a microbatch

    @property
    def cut_bytes(self) -> int:
        """Bytes of a microbatch's activations between two stages; the gradients have the same size."""
        return self.sequences * CONTEXT * self.width * 4


POINTS = {
    point.limit: point
    for point in (
        Point("line", blocks=1, width=96, heads=3, sequences=16),
        Point("both", blocks=1, width=192, heads=6, sequences=8),
        Point("compute", blocks=2, width=192, heads=6, sequences=8),
    )
}

RATE_BYTES_PER_S = 12.5e6  # 100 Mbit/s, up and down
DELAY_S = 0.025  # one way, from any PC to any other
CPU = {
    2: 0.65,
    4: 0.4,
}  # cores of each PC by number of PCs: of two cores, some are left for the forwarder and the requester
REQUESTER = "requester"


def hosts(stages: int) -> tuple[str, ...]:
    return tuple(f"pc-{i}" for i in range(stages))


def topology(stages: int) -> Topology:
    """PCs with a line and a CPU quota each, and the requester without limits."""
    line = Line(up_bytes_per_s=RATE_BYTES_PER_S, down_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S / 2)
    pcs = (HostSpec(name=name, line=line, cpu=CPU[stages]) for name in hosts(stages))
    return Topology(hosts=(HostSpec(name=REQUESTER), *pcs))


def make_model(point: Point, stages: int) -> GPT:
    layers = point.blocks * stages
    return GPT(
        GPTConfig(vocab=VOCAB, context=CONTEXT, layers=layers, width=point.width, heads=point.heads, dropout=0.0)
    )


def make_stage(point: Point, stage: int, stages: int) -> GPTStage:
    """One stage, with the same weights in every process."""
    torch.manual_seed(0)
    return GPTStage(make_model(point, stages), stage * point.blocks, (stage + 1) * point.blocks)


def make_batch(point: Point, microbatches: int = MICROBATCHES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (microbatches * point.sequences, CONTEXT), generator=generator)
    return ids, ids.roll(-1, 1)


def make_job(limit: str, stages: int) -> ravnest.Job:
    """The job for `ravnest train`."""
    point = POINTS[limit]
    return ravnest.Job(
        model=lambda: make_model(point, stages),
        loss=next_token_loss,
        optimizer=ravnest.AdamW(LR),
        data=[make_batch(point, seed=seed) for seed in range(4)],
        name="wan",
        config=ravnest.TrainingConfig(microbatches_per_step=MICROBATCHES),
    )


def line_seconds(point: Point, stage: int, stages: int) -> float:
    """Seconds of either direction of a stage's line for a microbatch."""
    neighbours = (stage > 0) + (stage < stages - 1)
    return neighbours * point.cut_bytes / RATE_BYTES_PER_S


def bound(point: Point, compute_s: Sequence[float]) -> float:
    """An upper bound of the samples per second of any pipeline of these stages."""
    stages = len(compute_s)
    return point.sequences / max(*compute_s, *(line_seconds(point, stage, stages) for stage in range(stages)))
