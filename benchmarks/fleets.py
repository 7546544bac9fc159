"""Fleets and chains for planner benchmarks: a GPT by formulas, and random uneven home PCs."""

from __future__ import annotations

import random

from ravnest.plan import Chain, Storage
from ravnest.plan.fleet import Fleet, Machine

FLOPS_PER_S = 1e12  # of a machine of speed 1, in training
_MBIT = 1e6 / 8


def gpt_chain(
    *, layers: int = 24, width: int = 1024, context: int = 1024, vocabulary: int = 50_257, microbatch: int = 1
) -> Chain:
    """A GPT in fp32 with bf16 messages, as counts of multiplications and bytes: two ops a layer, embedding and head.

    A matrix of n weights costs 2 n flops per token forward and twice that backward; attention itself
    4 * context * width per token. Backward keeps about 34 bytes per token and width in fp32 and a layer, besides
    the probabilities of its 16 heads.
    """
    tokens, row = microbatch * context, microbatch * context * width
    embedding, attention, perceptron = vocabulary * width, 4 * width * width, 8 * width * width
    parameters = [embedding + context * width, *[attention, perceptron] * layers, embedding]
    flops = [
        2.0 * row,
        *[2.0 * tokens * attention + 4.0 * tokens * context * width, 2.0 * tokens * perceptron] * layers,
        2.0 * tokens * embedding,
    ]
    saved = [4 * row, *[28 * row + 8 * 16 * tokens * context, 40 * row] * layers, 4 * row + 8 * tokens * vocabulary]
    num = len(flops)
    messages = (0, *[2 * row] * (num - 1), 0)
    return Chain(
        forward_s=tuple(f / FLOPS_PER_S for f in flops),
        backward_s=tuple(2 * f / FLOPS_PER_S for f in flops),
        cuts=tuple(range(1, num)),
        forward_bytes=messages,
        backward_bytes=messages,
        weights=tuple(Storage(4 * count, (i,)) for i, count in enumerate(parameters)),
        saved=tuple(Storage(size, (i,)) for i, size in enumerate(saved)),
        work_bytes=tuple(4 * row if i < num - 1 else 4 * tokens * vocabulary for i in range(num)),
    )


def home_pcs(count: int, seed: int) -> Fleet:
    """Uneven PCs: 4 to 64 GB of which most is lent, speeds 1 to 10, 5 to 1000 Mbit/s up, five regions, some sites."""
    rng = random.Random(seed)
    return Fleet(machines=tuple(_home_pc(rng, f"pc-{i}", count) for i in range(count)))


def _home_pc(rng: random.Random, name: str, count: int) -> Machine:
    up = rng.choice([5, 10, 20, 20, 40, 50, 100, 100, 250, 500, 1000]) * rng.uniform(0.7, 1.0)
    return Machine(
        name=name,
        memory_bytes=rng.choice([4, 8, 8, 16, 16, 16, 32, 32, 64]) * 0.8e9,
        speed=10 ** rng.uniform(-0.5, 0.5),
        up_bytes_per_s=up * _MBIT,
        down_bytes_per_s=min(1000, up * rng.choice([1, 2, 5, 10])) * _MBIT,
        latency_s=rng.uniform(0.002, 0.03),
        region=rng.choice(["eu", "eu", "us-east", "us-west", "asia", "south"]),
        site=f"site-{rng.randrange(max(1, count // 10))}" if rng.random() < 0.15 else "",
        reliability=rng.uniform(0.8, 1.0),
    )
