"""What everybody trains in the benchmark over home lines, and what no pipeline over those lines can beat.

A stage computes c seconds for a microbatch of b samples. The host of a stage sends activations on to the next and
gradients back to the one before over the one line it has, so with u bytes up and d bytes down for a microbatch

    samples/s <= b / max over stages of (c, u / rate, d / rate)

The bytes are those of the tensors alone: encryption, headers and acknowledgements count against whoever needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ravnest
from benchmarks.rivals import Part
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.testbed import HostSpec, Line, Topology

VOCAB, CONTEXT = 64, 128  # few letters: the head weighs little, so stages are even
MICROBATCHES = 12  # per update
LR = 1e-3


@dataclass(frozen=True)
class Point:
    """A model, and microbatches that take 63 ms on the line for what crosses one cut, one way."""

    limit: str  # what limits it, by the bound
    blocks: int  # of a stage
    width: int
    heads: int
    sequences: int  # a microbatch

    @property
    def cut_bytes(self) -> int:
        """Of a microbatch's activations between two stages; their gradients are as many."""
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
CPU = {2: 0.65, 4: 0.4}  # cores of each PC by how many there are: of two cores, some are left for wires and requester
REQUESTER = "requester"


def hosts(stages: int) -> tuple[str, ...]:
    return tuple(f"pc-{i}" for i in range(stages))


def topology(stages: int) -> Topology:
    """PCs with a line and a share of a core each, and the requester in their middle, without limits."""
    line = Line(up_bytes_per_s=RATE_BYTES_PER_S, down_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S / 2)
    pcs = (HostSpec(name=name, line=line, cpu=CPU[stages]) for name in hosts(stages))
    return Topology(hosts=(HostSpec(name=REQUESTER), *pcs))


def make_model(point: Point, stages: int) -> GPT:
    layers = point.blocks * stages
    return GPT(
        GPTConfig(vocab=VOCAB, context=CONTEXT, layers=layers, width=point.width, heads=point.heads, dropout=0.0)
    )


def make_part(point: Point, stage: int, stages: int) -> Part:
    """The same weights whoever makes them."""
    torch.manual_seed(0)
    return Part(make_model(point, stages), stage * point.blocks, (stage + 1) * point.blocks)


def make_batch(point: Point, microbatches: int = MICROBATCHES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (microbatches * point.sequences, CONTEXT), generator=generator)
    return ids, ids.roll(-1, 1)


def make_job(limit: str, stages: int) -> ravnest.Job:
    """What `ravnest train` is given."""
    point = POINTS[limit]
    return ravnest.Job(
        model=lambda: make_model(point, stages),
        loss=next_token_loss,
        optimizer=ravnest.AdamW(LR),
        data=[make_batch(point, seed=seed) for seed in range(4)],
        name="wan",
        training=ravnest.Training(accumulate=MICROBATCHES),
    )


def line_seconds(point: Point, stage: int, stages: int) -> float:
    """How long either direction of a stage's line takes for a microbatch."""
    neighbours = (stage > 0) + (stage < stages - 1)
    return neighbours * point.cut_bytes / RATE_BYTES_PER_S


def bound(point: Point, compute_s: Sequence[float]) -> float:
    """Samples per second that no pipeline of these stages can beat."""
    stages = len(compute_s)
    return point.sequences / max(*compute_s, *(line_seconds(point, stage, stages) for stage in range(stages)))
