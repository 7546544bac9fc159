"""Trains copies of a model separately and averages them, in one process: clusters without the network.

Each copy is the pipeline's own trainer, with gradients one update late and the default correction (or without, to
measure their cost). After every H updates the weights of all copies are snapshotted, the mean goes through the outer
step, and `lag` updates later each copy, which has continued to train, moves by the difference from its own snapshot
(`ravnest.worker.averaging` does the same):

    x = outer(mean of w_k at update t),    w_k += x - w_k(t)    at update t + lag

The baseline is synchronous training of one copy with batches as many times larger. Both use the same samples in the
same order and make the same number of updates: a batch of the baseline is the batches of all copies joined.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from functools import cache
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ravnest.averaging.outer_optimizer import Nesterov, step_nesterov
from ravnest.core.config import config, require
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.graph import Program, Stage, initialise, split, trace
from ravnest.pipeline import staleness as corrections
from ravnest.pipeline.config import TrainerConfig
from ravnest.pipeline.gradient_buffers import squared_norm
from ravnest.pipeline.optimizers import AdamW, cosine
from ravnest.pipeline.trainer import Trainer
from ravnest.protocol.commands import RingPosition
from ravnest.worker.averaging import Floats, flatten, unflatten

__all__ = ["BATCH", "OUTERS", "Copies", "Text", "TrainingMethod", "train"]

MODEL = GPTConfig(vocab=128, context=32, layers=2, width=64, heads=4, dropout=0.0)
BATCH = 8  # samples of a copy's update
CLIP_NORM = 1.0
HELD_OUT = 256  # samples of a batch
RING = 0
OUTERS = {"plain": None, "nesterov": Nesterov(), "stretched": Nesterov(lr=1.3, momentum=0.0)}


@config
class TrainingMethod:
    """How copies train: they average after `every` updates (0: never) and apply an average `lag` updates later."""

    copies: int = 1
    every: int = 0
    outer: str = "plain"
    lag: int = 1
    lr: float = 4e-3
    synchronous: bool = False  # one copy, with the batches of all
    is_late: bool | None = None  # whether gradients are late; None: unless synchronous

    def __post_init__(self) -> None:
        require(self.copies >= 1, f"copies must be >= 1, got {self.copies}")
        require(self.every >= 0, f"every must be >= 0 updates (0: never), got {self.every}")
        require(self.lag >= 1, f"lag must be >= 1 update, got {self.lag}")
        require(self.outer in OUTERS, f"outer must be one of {', '.join(OUTERS)}, got {self.outer!r}")

    @property
    def delay(self) -> int:
        """The delay of gradients, in updates."""
        return int(not self.synchronous if self.is_late is None else self.is_late)


class Text:
    """Training batches, and held-out sequences that are the same for every run."""

    def __init__(self, num_held_out: int) -> None:
        text = library_text().clamp(max=MODEL.vocab - 1)
        cut = len(text) * 9 // 10
        self._train = text[:cut]
        self.held_out = list(islice(batches(text[cut:], HELD_OUT, MODEL.context, seed=1), num_held_out // HELD_OUT))

    def train(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self._train, BATCH, MODEL.context, 1000 + seed)


class Copies:
    """The copies, and the state of the outer step."""

    def __init__(self, method: TrainingMethod, stage: Stage, seed: int, updates: int) -> None:
        self.method = method
        rate = cosine(updates, warmup_steps=updates // 10, final_ratio=0.1)
        correction = corrections.DEFAULT if method.delay else corrections.none()
        settings = TrainerConfig(
            optimizer=AdamW(method.lr, schedule=rate, clip_norm=CLIP_NORM), correction=correction, seed=seed
        )
        self.trainers = [
            Trainer(stage, initialise(stage, seed), settings, delay=method.delay)
            for _ in range(1 if method.synchronous else method.copies)
        ]
        names = tuple(map(str, range(len(self.trainers))))
        self._positions = (RingPosition(RING, names, tuple(sorted(self.trainers[0].weights()))),)
        self._reference: Floats | None = None
        self._momentum = np.zeros(0, np.float32)
        self._pending: tuple[int, list[dict[str, Tensor]]] | None = None  # movements, and the update to apply them at
        self._num_since = 0  # updates since the last average

    def update(self, number: int, given: list[list[Tensor]]) -> None:
        """Update every copy, each on its own batch."""
        if self._pending is not None and self._pending[0] == number:
            for trainer, by in zip(self.trainers, self._pending[1], strict=True):
                trainer.shift(by)
            self._pending = None
        version = max(0, number - self.method.delay)
        for trainer, leaves in zip(self.trainers, given, strict=True):
            trainer.forward(number, number, version, leaves, 1.0)
            trainer.backward(number, None)
            own, _ = trainer.take_gradients(number, version)
            trainer.update(number, version, own, math.sqrt(squared_norm(own)))
        self._num_since += 1
        if self.method.every and self._num_since >= self.method.every and self._pending is None:
            self._pending, self._num_since = (number + self.method.lag, self._average()), 0

    def finish(self) -> None:
        """Apply a pending average, and average once more if there were updates since."""
        if self._pending is not None:
            for trainer, by in zip(self.trainers, self._pending[1], strict=True):
                trainer.shift(by, now=True)
        if not self._num_since or len(self.trainers) == 1:
            return
        average = {RING: self._outer(_mean([flatten(self._positions, t.weights())[RING] for t in self.trainers]))}
        for trainer in self.trainers:
            trainer.set_weights(unflatten(self._positions, average, trainer.weights()))

    def _average(self) -> list[dict[str, Tensor]]:
        """The movement of each copy from its snapshot to the result of the outer step."""
        snapshots = [flatten(self._positions, trainer.weights())[RING] for trainer in self.trainers]
        target = self._outer(_mean(snapshots))
        return [
            unflatten(self._positions, {RING: target - own}, trainer.weights())
            for own, trainer in zip(snapshots, self.trainers, strict=True)
        ]

    def _outer(self, average: Floats) -> Floats:
        nesterov = OUTERS[self.method.outer]
        if nesterov is None:
            return average
        if self._reference is None:
            self._reference, self._momentum = average.copy(), np.zeros_like(average)
        else:
            step_nesterov(self._reference, average, self._momentum, nesterov)
        return self._reference

    @torch.no_grad()
    def loss(self, held_out: list[list[Tensor]]) -> float:
        """The loss of the first copy, which after `finish` is that of all."""
        return statistics.fmean(float(self.trainers[0].evaluate(None, 0, leaves)[0]) for leaves in held_out)


@cache
def _traced() -> tuple[Program, Stage]:
    ids = torch.zeros(BATCH, MODEL.context, dtype=torch.long)
    program = trace(lambda: GPT(MODEL), next_token_loss, (ids, ids))
    (stage,) = split(program, ())
    return program, stage


def train(method: TrainingMethod, text: Text, seed: int, updates: int) -> float:
    """The held-out loss after `updates` updates of every copy."""
    program, stage = _traced()
    source = text.train(seed)
    copies = Copies(method, stage, seed, updates)
    for number in range(updates):
        given = [program.feed(next(source)) for _ in range(method.copies)]
        copies.update(number, [_joined(given)] if method.synchronous else given)
    copies.finish()
    return copies.loss([program.feed(batch) for batch in text.held_out])


def _joined(given: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*given, strict=True)]


def _mean(vectors: list[Floats]) -> Floats:
    """The mean with equal weights, as copies train the same number of samples; summed in the order of a ring."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        np.add(total, vector, out=total)
    return np.multiply(total, np.float32(1 / len(vectors)), out=total)
