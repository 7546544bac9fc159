"""What everybody trains in the benchmark over home lines, and what no pipeline over those lines can beat.

A stage computes c seconds for a microbatch of b samples. The host of a stage sends activations on to the next and
gradients back to the one before over the one line it has, so with u bytes up and d bytes down for a microbatch

    samples/s <= b / max over stages of (c, u / rate, d / rate)

The bytes are those of the tensors alone: encryption, headers and acknowledgements count against whoever needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.rivals import Part
from ravnest.examples.gpt import GPT, GPTConfig
from ravnest.testbed import HostSpec, Line, Topology

# Few letters, so that the embedding and the head weigh little and stages of one block each are even.
CONFIG = GPTConfig(vocab=64, context=128, layers=4, width=512, heads=8, dropout=0.0)
STAGES = 4
SEQUENCES = 3  # a microbatch: 63 ms on the line for what crosses one cut, one way
MICROBATCHES = 12  # per update
LR = 1e-3

RATE_BYTES_PER_S = 12.5e6  # 100 Mbit/s, up and down
DELAY_S = 0.025  # one way, from any PC to any other
CPU = 0.4  # of a core for each host: a stage computes for about as long as its line is busy
HOSTS = tuple(f"pc-{i}" for i in range(STAGES))
REQUESTER = "requester"


def topology() -> Topology:
    """Four PCs with a line and a share of a core each, and the requester in their middle, without limits."""
    line = Line(up_bytes_per_s=RATE_BYTES_PER_S, down_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S / 2)
    hosts = (HostSpec(name=name, line=line, cpu=CPU) for name in HOSTS)
    return Topology(hosts=(HostSpec(name=REQUESTER), *hosts))


def make_part(stage: int) -> Part:
    """The same weights whoever makes them, in stages of equally many blocks."""
    torch.manual_seed(0)
    model, blocks = GPT(CONFIG), CONFIG.layers // STAGES
    return Part(model, stage * blocks, (stage + 1) * blocks)


def make_batch(microbatches: int = MICROBATCHES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CONFIG.vocab, (microbatches * SEQUENCES, CONFIG.context), generator=generator)
    return ids, ids.roll(-1, 1)


def cut_bytes() -> int:
    """What crosses a cut between two blocks, one way, for a microbatch."""
    return SEQUENCES * CONFIG.context * CONFIG.width * 4


def line_seconds(stage: int) -> float:
    """How long the busier direction of a stage's line takes for a microbatch."""
    up = down = (stage > 0) + (stage < STAGES - 1)  # to and from each neighbour
    return max(up, down) * cut_bytes() / RATE_BYTES_PER_S


def bound(compute_s: Sequence[float]) -> float:
    """Samples per second that no pipeline of these stages can beat."""
    return SEQUENCES / max(max(compute_s), *(line_seconds(stage) for stage in range(STAGES)))
