"""Models with their data: small language models on the standard library's source, and a problem with known constants.

The problem is f(w) = sum of phi(z), phi(z) = z^2 / (1 + z^2), z = A w with an orthogonal A whose columns are divided
into blocks, so that every stage changes all of z. A sample adds n . z with Gaussian noise n. So

    L = 2,   minimum 0,   |grad f|^2 = sum of phi'(z)^2 <= 27/64 per dimension,   variance s^2 = dimensions * noise^2

f is not convex where |z| > 1/sqrt(3), where training starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.graph import Program, trace

__all__ = ["BASIN", "TASKS", "Basin", "Task", "find_task"]

HELD_OUT = 256  # samples of a batch


@dataclass(frozen=True)
class Task:
    """A traced model with its batches: `samples(seed, size)` yields them, `held_out` are the same for every run.

    `measure` is computed from the weights, averaged over the copies, before every update; `numbers` has its mean.
    """

    program: Program
    samples: Callable[[int, int], Iterator[tuple[Tensor, Tensor]]]
    held_out: tuple[tuple[Tensor, Tensor], ...]
    measure: Callable[[Mapping[str, Tensor]], float] | None = None


class GPT2Init(GPT):
    """A GPT that starts as GPT-2 does: weights of 0.02, those that write to the residual stream smaller, no biases."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "out.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


SMALL = GPTConfig(vocab=128, context=32, layers=2, width=64, heads=4, dropout=0.0)
MEDIUM = GPTConfig(vocab=128, context=64, layers=4, width=96, heads=4, dropout=0.0)


def _language(config: GPTConfig, model: type[GPT], num_held_out: int) -> Task:
    text = library_text().clamp(max=config.vocab - 1)
    cut = len(text) * 9 // 10
    ids = torch.zeros(8, config.context, dtype=torch.long)
    held_out = islice(batches(text[cut:], HELD_OUT, config.context, seed=1), num_held_out // HELD_OUT)
    return Task(
        trace(lambda: model(config), next_token_loss, (ids, ids)),
        lambda seed, size: batches(text[:cut], size, config.context, 1000 + seed),
        tuple(held_out),
    )


@dataclass(frozen=True)
class Basin:
    """Size and noise of the problem, and the constants that follow."""

    dimensions: int = 32
    blocks: int = 4
    start: float = 1.0  # of every z
    noise: float = 0.9

    smoothness: float = 2.0

    @property
    def variance(self) -> float:
        return self.dimensions * self.noise**2

    @property
    def height(self) -> float:
        """f at the start, above the minimum."""
        return self.dimensions * self.start**2 / (1 + self.start**2)

    @property
    def gradient_bound(self) -> float:
        """The bound G^2 on the expected squared norm of a sample's gradient."""
        return self.dimensions * 27 / 64 + self.variance

    def step_size(self, updates: int, copies: int) -> float:
        """The step size of the theorem."""
        return math.sqrt(2 * self.height * copies / (self.smoothness * self.variance * updates))


BASIN = Basin()


class _BasinModel(nn.Module):
    def __init__(self, basin: Basin) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        square = torch.randn(basin.dimensions, basin.dimensions, generator=generator)
        columns = torch.linalg.qr(square).Q.split(basin.dimensions // basin.blocks, dim=1)
        start = torch.full((basin.dimensions,), basin.start)
        self.blocks = nn.ParameterList(nn.Parameter(part.T @ start) for part in columns)
        self.num_blocks = basin.blocks
        for i, part in enumerate(columns):
            self.register_buffer(f"columns{i}", part.contiguous())

    def forward(self, noise: Tensor) -> Tensor:
        z = torch.zeros_like(noise)
        for i, block in enumerate(self.blocks):
            z = z + getattr(self, f"columns{i}") @ block
        return z


def _basin_loss(z: Tensor, noise: Tensor) -> Tensor:
    squares = z * z
    return (squares / (1 + squares) + noise * z).sum(1).mean()


def _basin(basin: Basin) -> Task:
    def samples(seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1000 + seed)
        while True:
            noise = torch.randn(size, basin.dimensions, generator=generator) * basin.noise
            yield noise, noise

    model = _BasinModel(basin)
    columns: Any = [getattr(model, f"columns{i}") for i in range(basin.blocks)]

    def squared_gradient_norm(weights: Mapping[str, Tensor]) -> float:
        z = sum(columns[i] @ weights[f"blocks.{i}"] for i in range(basin.blocks))
        return float((2 * z / (1 + z * z) ** 2).square().sum())

    nothing = torch.zeros(8, basin.dimensions)
    return Task(trace(model, _basin_loss, (nothing, nothing)), samples, ((nothing, nothing),), squared_gradient_norm)


TASKS: Mapping[str, Callable[[], Task]] = {
    "small": lambda: _language(SMALL, GPT, 8192),
    "small, GPT-2": lambda: _language(SMALL, GPT2Init, 8192),
    "medium": lambda: _language(MEDIUM, GPT, 4096),
    "medium, GPT-2": lambda: _language(MEDIUM, GPT2Init, 4096),
    "basin": lambda: _basin(BASIN),
}


@cache
def find_task(name: str) -> Task:
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]()
