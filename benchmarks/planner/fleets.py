"""Fleets and chains for planner benchmarks: a GPT by formulas, random uneven home PCs, small hard tasks."""

from __future__ import annotations

import random

from ravnest.planner import Chain, Fleet, Machine, MemoryModel, Storage, Task

FLOPS_PER_S = 1e12  # of a machine of speed 1, in training
_MBIT = 1e6 / 8


def gpt_chain(
    *, layers: int = 24, width: int = 1024, context: int = 1024, vocabulary: int = 50_257, microbatch: int = 1
) -> Chain:
    """A GPT in fp32 with bf16 messages, as counts of flops and bytes: two ops a layer, embedding and head.

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
    """Uneven PCs: 4 to 64 GB most of it offered, speeds 1 to 10, 5 to 1000 Mbit/s up, five regions, some sites."""
    rng = random.Random(seed)
    return Fleet(machines=tuple(_home_pc(rng, f"pc-{i}", count) for i in range(count)))


def _home_pc(rng: random.Random, name: str, count: int) -> Machine:
    up = rng.choice([5, 10, 20, 20, 40, 50, 100, 100, 250, 500, 1000]) * rng.uniform(0.7, 1.0)
    return Machine(
        name=name,
        memory_bytes=rng.choice([4, 8, 8, 16, 16, 16, 32, 32, 64]) * rng.uniform(0.6, 0.9) * 1e9,
        speed=10 ** rng.uniform(-0.5, 0.5),
        up_bytes_per_s=up * _MBIT,
        down_bytes_per_s=min(1000, up * rng.choice([1, 2, 5, 10])) * _MBIT,
        latency_s=rng.uniform(0.002, 0.03),
        region=rng.choice(["eu", "eu", "us-east", "us-west", "asia", "south"]),
        site=f"site-{rng.randrange(max(1, count // 10))}" if rng.random() < 0.15 else "",
        reliability=rng.uniform(0.8, 1.0),
    )


def hard_task(seed: int, max_machines: int = 6) -> Task:
    """Three to six machines and five to nine ops: uneven and tight memory, slow lines, regions, sites, depth caps."""
    rng = random.Random(seed)
    chain = _small_chain(rng, rng.randint(5, 9))
    memory = MemoryModel(base_bytes=0, correction_copies=rng.choice([0, 2]), recompute=rng.random() < 0.2)
    whole = sum(s.num_bytes for s in chain.weights) * 7 + 2 * sum(s.num_bytes for s in chain.saved)
    machines = tuple(
        _small_machine(rng, f"m{i}", whole) for i in range(min(rng.choice([3, 4, 4, 5, 5, 6]), max_machines))
    )
    return Task(
        chain=chain,
        fleet=Fleet(machines=machines, far_s=rng.choice([0.04, 1.0]), lan_bytes_per_s=200.0),
        memory=memory,
        accumulate=rng.choice([0, 0, 0, 2, 3]),
    )


def _small_chain(rng: random.Random, num: int) -> Chain:
    def some(low: float, high: float) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high) for _ in range(num))

    seconds = some(0.2, 2.0)
    return Chain(
        forward_s=seconds,
        backward_s=tuple(2 * s for s in seconds),
        cuts=tuple(range(1, num)),
        forward_bytes=tuple(rng.randrange(10, 60) for _ in range(num + 1)),
        backward_bytes=tuple(rng.randrange(10, 60) for _ in range(num + 1)),
        weights=tuple(Storage(rng.randrange(5, 60), (i,)) for i in range(num)),
        saved=tuple(Storage(rng.randrange(20, 120), (i,)) for i in range(num)),
    )


def _small_machine(rng: random.Random, name: str, whole_bytes: float) -> Machine:
    up = rng.choice([3.0, 10.0, 30.0, 100.0])
    return Machine(
        name=name,
        memory_bytes=whole_bytes * rng.uniform(0.15, 0.9),
        speed=rng.uniform(0.3, 3.0),
        up_bytes_per_s=up,
        down_bytes_per_s=up * rng.choice([1, 3]),
        latency_s=rng.uniform(0.0, 0.2),
        region=rng.choice(["eu", "us"]),
        site=rng.choice(["", "", "lab"]),
    )
