"""Copies of a model that learn apart and are averaged, in one process: what clusters do, without the network.

Each copy is the runtime's own trainer, with gradients one update late and the default correction, as a pipeline has
them (or not, to see what that costs). After every H updates
the weights of all are copied, the mean goes through the outer step, and each copy moves by what that differs from its
own copy, with the update `lag` updates later, while it has gone on learning (`node/ringdesk.py` does the same):

    x = outer(mean of w_k at update t),    w_k += x - w_k(t)    at update t + lag

The rival is synchronous training of one copy with batches as many times larger. Both see the same samples in the same
order and make as many updates: the copies are dealt the batches of which the rival's are made.
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

from ravnest.core.config import config, require
from ravnest.core.orders import Seat
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.graph import Program, Stage, initialise, split, trace
from ravnest.node.snapshot import Floats, flatten, unflatten
from ravnest.rings.outer import Nesterov, step_nesterov
from ravnest.runtime import corrections
from ravnest.runtime.optimizers import AdamW, cosine
from ravnest.runtime.settings import Settings
from ravnest.runtime.trainer import Trainer, squares

__all__ = ["BATCH", "OUTERS", "Copies", "Text", "Way", "learn"]

MODEL = GPTConfig(vocab=128, context=32, layers=2, width=64, heads=4, dropout=0.0)
BATCH = 8  # samples of a copy's update
CLIP_NORM = 1.0
HELD_OUT = 256  # samples of a batch
RING = 0
OUTERS = {"plain": None, "nesterov": Nesterov(), "stretched": Nesterov(lr=1.3, momentum=0.0)}


@config
class Way:
    """How copies learn: `every` updates are averaged (0: never), `lag` updates pass until an average is taken over."""

    copies: int = 1
    every: int = 0
    outer: str = "plain"
    lag: int = 1
    lr: float = 4e-3
    synchronous: bool = False  # one copy, with the batches of all
    is_late: bool | None = None  # whether gradients are; None: if it is not synchronous

    def __post_init__(self) -> None:
        require(self.copies >= 1, f"there is at least 1 copy, not {self.copies}")
        require(self.every >= 0, f"every is a number of updates, 0 for never, not {self.every}")
        require(self.lag >= 1, f"an average is taken over at least 1 update later, not {self.lag}")
        require(self.outer in OUTERS, f"outer is one of {', '.join(OUTERS)}, not {self.outer!r}")

    @property
    def delay(self) -> int:
        """Of gradients, in updates."""
        return int(not self.synchronous if self.is_late is None else self.is_late)


class Text:
    """Training batches, and held-out windows that are the same for every run."""

    def __init__(self, num_held_out: int) -> None:
        text = library_text().clamp(max=MODEL.vocab - 1)
        cut = len(text) * 9 // 10
        self._train = text[:cut]
        self.held_out = list(islice(batches(text[cut:], HELD_OUT, MODEL.context, seed=1), num_held_out // HELD_OUT))

    def train(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self._train, BATCH, MODEL.context, 1000 + seed)


class Copies:
    """The copies, and where the outer step stands."""

    def __init__(self, way: Way, stage: Stage, seed: int, updates: int) -> None:
        self.way = way
        rate = cosine(updates, warmup_steps=updates // 10, final_ratio=0.1)
        correction = corrections.DEFAULT if way.delay else corrections.none()
        settings = Settings(
            optimizer=AdamW(way.lr, schedule=rate, clip_norm=CLIP_NORM), correction=correction, seed=seed
        )
        self.trainers = [
            Trainer(stage, initialise(stage, seed), settings, delay=way.delay)
            for _ in range(1 if way.synchronous else way.copies)
        ]
        names = tuple(map(str, range(len(self.trainers))))
        self._seats = (Seat(RING, names, tuple(sorted(self.trainers[0].weights()))),)
        self._reference: Floats | None = None
        self._momentum = np.zeros(0, np.float32)
        self._moves: tuple[int, list[dict[str, Tensor]]] | None = None  # the update with which to make them
        self._num_since = 0  # updates since the last average

    def update(self, number: int, given: list[list[Tensor]]) -> None:
        """One update of every copy, each on its own batch."""
        if self._moves is not None and self._moves[0] == number:
            for trainer, by in zip(self.trainers, self._moves[1], strict=True):
                trainer.shift(by)
            self._moves = None
        version = max(0, number - self.way.delay)
        for trainer, leaves in zip(self.trainers, given, strict=True):
            trainer.forward(number, number, version, leaves, 1.0)
            trainer.backward(number, None)
            own, _ = trainer.take_gradients(number, version)
            trainer.update(number, version, own, math.sqrt(squares(own)))
        self._num_since += 1
        if self.way.every and self._num_since >= self.way.every and self._moves is None:
            self._moves, self._num_since = (number + self.way.lag, self._average()), 0

    def finish(self) -> None:
        """What is under way is taken over, and what was learned since is averaged."""
        if self._moves is not None:
            for trainer, by in zip(self.trainers, self._moves[1], strict=True):
                trainer.shift(by, now=True)
        if not self._num_since or len(self.trainers) == 1:
            return
        average = {RING: self._outer(_mean([flatten(self._seats, t.weights())[RING] for t in self.trainers]))}
        for trainer in self.trainers:
            trainer.adopt(unflatten(self._seats, average, trainer.weights()))

    def _average(self) -> list[dict[str, Tensor]]:
        """How far each copy is from what the average becomes."""
        taken = [flatten(self._seats, trainer.weights())[RING] for trainer in self.trainers]
        target = self._outer(_mean(taken))
        return [
            unflatten(self._seats, {RING: target - own}, trainer.weights())
            for own, trainer in zip(taken, self.trainers, strict=True)
        ]

    def _outer(self, average: Floats) -> Floats:
        how = OUTERS[self.way.outer]
        if how is None:
            return average
        if self._reference is None:
            self._reference, self._momentum = average.copy(), np.zeros_like(average)
        else:
            step_nesterov(self._reference, average, self._momentum, how)
        return self._reference

    @torch.no_grad()
    def loss(self, held_out: list[list[Tensor]]) -> float:
        """Of the first copy; after `finish` it is everyone's."""
        return statistics.fmean(float(self.trainers[0].evaluate(None, 0, leaves)[0]) for leaves in held_out)


@cache
def _traced() -> tuple[Program, Stage]:
    ids = torch.zeros(BATCH, MODEL.context, dtype=torch.long)
    program = trace(lambda: GPT(MODEL), next_token_loss, (ids, ids))
    (stage,) = split(program, ())
    return program, stage


def learn(way: Way, text: Text, seed: int, updates: int) -> float:
    """The held-out loss after so many updates of every copy."""
    program, stage = _traced()
    source = text.train(seed)
    copies = Copies(way, stage, seed, updates)
    for number in range(updates):
        given = [program.feed(next(source)) for _ in range(way.copies)]
        copies.update(number, [_joined(given)] if way.synchronous else given)
    copies.finish()
    return copies.loss([program.feed(batch) for batch in text.held_out])


def _joined(given: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*given, strict=True)]


def _mean(vectors: list[Floats]) -> Floats:
    """Copies have trained as many samples each, so each weighs as much. The order is that of a ring."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        np.add(total, vector, out=total)
    return np.multiply(total, np.float32(1 / len(vectors)), out=total)
