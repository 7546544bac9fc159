"""Trains copies of a model in one process, with the pipeline's own trainers and the averaging of clusters.

Without links and threads: step s of a stage runs on version max(0, s - delay), as it does in a pipeline, and messages
are function calls. Copies average as clusters do (`ravnest.worker.averaging`): after an interval the weights of all
copies are snapshotted and averaged by a ring, and `lag` updates later each copy, which has continued to train, moves by
the difference between the result and its own snapshot:

    x = outer(mean of w_k at update t),    w_k += x - w_k(t)    at update t + lag

Every update draws one batch for all copies and divides it between them. So a copy alone with batches as large trains on
the same samples in the same order: synchronous training that others are compared with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.learning.experiment import Averaging, Experiment, optimizer_of
from benchmarks.learning.record import Result
from benchmarks.learning.ring import ring_average
from benchmarks.learning.tasks import Task, find_task
from ravnest.averaging.codec import Floats
from ravnest.averaging.outer_optimizer import Nesterov, OuterStep
from ravnest.graph import Program, Stage, legal_cuts, split
from ravnest.graph.weights import start_tensors
from ravnest.pipeline.config import TrainerConfig
from ravnest.pipeline.gradient_buffers import squared_norm
from ravnest.pipeline.packing import unpack_state
from ravnest.pipeline.trainer import Trainer

__all__ = ["train"]

CURVE_POINTS = 24
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
SECOND_MOMENTS = ("exp_avg_sq",)

Tensors = dict[str, Tensor]


class Copy:
    """One copy of the model: a trainer for each stage."""

    def __init__(self, experiment: Experiment, index: int, seed: int) -> None:
        program = find_task(experiment.task).program
        self._uses_norm = optimizer_of(experiment).clip_norm is not None
        settings = TrainerConfig(
            optimizer=optimizer_of(experiment), correction=experiment.correction, seed=seed, memory=experiment.memory
        )
        self.trainers = [
            Trainer(stage, _start(program, stage, seed), settings, delay=delay)
            for stage, delay in zip(_stages(experiment.task, experiment.cuts_of(index)), experiment.delays, strict=True)
        ]

    def update(self, number: int, inputs: Sequence[Any]) -> float:
        """Train on one microbatch, which is the whole batch of update `number`; returns its loss."""
        values: Sequence[Any] = inputs
        versions = [max(0, number - trainer.corrector.delay) for trainer in self.trainers]
        for trainer, version in zip(self.trainers, versions, strict=True):
            outputs = trainer.forward(number, number, version, values, 1.0)
            values = [v.detach() if isinstance(v, Tensor) else v for v in outputs]
        loss, gradients = float(values[0]), None
        for trainer in reversed(self.trainers):
            gradients = trainer.backward(number, gradients)
        own = [t.take_gradients(number, v)[0] for t, v in zip(self.trainers, versions, strict=True)]
        norm = math.sqrt(sum(map(squared_norm, own))) if self._uses_norm else None
        for trainer, version, gradient in zip(self.trainers, versions, own, strict=True):
            trainer.update(number, version, gradient, norm)
        return loss

    def weights(self) -> Tensors:
        return {name: tensor for trainer in self.trainers for name, tensor in trainer.weights(frozen=False).items()}

    def shift(self, by: Mapping[str, Tensor], *, now: bool = False) -> None:
        for trainer in self.trainers:
            own = trainer.weights(frozen=False).keys()
            trainer.shift({name: tensor for name, tensor in by.items() if name in own}, now=now)

    def moments(self, keys: Sequence[str]) -> Tensors:
        """Copies of optimizer state, by `parameter/key`, in float32."""
        found: Tensors = {}
        for trainer in self.trainers:
            for name, entries in _by_parameter(trainer.stepper.state_dict()).items():
                unpacked = unpack_state(entries)
                found |= {f"{name}/{key}": unpacked[key].clone() for key in keys if key in unpacked}
        return found

    def shift_moments(self, by: Mapping[str, Tensor]) -> None:
        """Add to optimizer state; second moments stay positive."""
        for trainer in self.trainers:
            state: Tensors = {}
            for name, entries in _by_parameter(trainer.stepper.state_dict()).items():
                for key, tensor in unpack_state(entries).items():
                    entry = f"{name}/{key}"
                    state[entry] = tensor if entry not in by else tensor + by[entry]
                    if entry in by and key in SECOND_MOMENTS:
                        state[entry].clamp_(min=0)
            trainer.stepper.load_state_dict(state)

    @torch.no_grad()
    def loss(self, inputs: Sequence[Any]) -> float:
        values: Sequence[Any] = inputs
        for trainer in self.trainers:
            values = trainer.evaluate(None, 0, values)
        return float(values[0])


def _by_parameter(state: Mapping[str, Tensor]) -> dict[str, Tensors]:
    result: dict[str, Tensors] = {}
    for entry, tensor in state.items():
        name, _, key = entry.rpartition("/")
        result.setdefault(name, {})[key] = tensor
    return result


@dataclass
class _Movement:
    """What an average will change in each copy, from update `at` on."""

    at: int
    weights: list[Tensors]
    moments: list[Tensors]


@dataclass
class _Group:
    """Parameters that are averaged together, and what is kept of their averages."""

    names: tuple[str, ...]
    outer: OuterStep | None
    reference: Floats | None  # the last average, where movements from it are averaged
    residuals: list[Floats] = field(default_factory=list)


class Clusters:
    """The copies, and their averages."""

    def __init__(self, experiment: Experiment, seed: int) -> None:
        self.copies = [Copy(experiment, index, seed) for index in range(experiment.copies)]
        self._settings: Averaging = experiment.averaging
        self._updates = experiment.updates
        names, count = sorted(self.copies[0].weights()), self._settings.fragments
        size = -(-len(names) // count)
        start, has_reference = self.copies[0].weights(), self._settings.of_movements
        step = Nesterov(lr=self._settings.outer_lr, momentum=self._settings.outer_momentum)
        self._groups = [
            _Group(
                own,
                OuterStep(step) if self._settings.has_outer_step else None,
                _flat(start, own) if has_reference else None,
            )
            for own in (tuple(names[i * size : (i + 1) * size]) for i in range(count))
        ]
        self._keys = {"none": (), "first": FIRST_MOMENTS, "all": FIRST_MOMENTS + SECOND_MOMENTS}[self._settings.moments]
        self._pending: list[_Movement] = []
        self._num_since = 0  # updates since the last average
        self._num_rounds = 0
        self.sent_bytes = 0  # by all copies

    def update(self, number: int, inputs: Sequence[Sequence[Any]]) -> float:
        """Update every copy, each on its own samples; returns the mean loss."""
        self._apply(number)
        losses = [copy.update(number, own) for copy, own in zip(self.copies, inputs, strict=True)]
        if len(self.copies) > 1:
            self._num_since += 1
            interval = self._settings.interval_at((number + 1) / self._updates)
            if self._num_since >= interval // len(self._groups):
                group = self._groups[self._num_rounds % len(self._groups)]
                self._pending.append(self._average(group, number + self._settings.lag))
                self._num_since, self._num_rounds = 0, self._num_rounds + 1
        return statistics.fmean(losses)

    def finish(self) -> None:
        """Average once more, exactly, as at the end of a run."""
        self._apply(None)
        if len(self.copies) == 1:
            return
        for group in self._groups:
            movement = self._average(group, 0, is_last=True)
            for copy, by in zip(self.copies, movement.weights, strict=True):
                copy.shift(by, now=True)

    def mean_weights(self) -> Mapping[str, Tensor]:
        if len(self.copies) == 1:
            return self.copies[0].weights()
        all_weights = [copy.weights() for copy in self.copies]
        return {name: torch.stack([weights[name] for weights in all_weights]).mean(0) for name in all_weights[0]}

    def _apply(self, number: int | None) -> None:
        """Apply the averages that are due at update `number`; all of them at the end."""
        for movement in [m for m in self._pending if number is None or m.at == number]:
            self._pending.remove(movement)
            for copy, by in zip(self.copies, movement.weights, strict=True):
                copy.shift(by, now=number is None)
            for copy, by in zip(self.copies, movement.moments, strict=False):
                copy.shift_moments(by)

    def _average(self, group: _Group, at: int, *, is_last: bool = False) -> _Movement:
        """Average a group; the movement of each copy is from its snapshot to the result."""
        snapshots = [copy.weights() for copy in self.copies]
        vectors = [_flat(snapshot, group.names) for snapshot in snapshots]
        codec, base = self._settings.codec, group.reference
        if is_last or base is None:
            average, sent_bytes = ring_average(vectors, "fp32" if is_last else codec, group.residuals)
        else:
            average, sent_bytes = ring_average([vector - base for vector in vectors], codec, group.residuals)
            average += base
            group.reference = average.copy()
        self.sent_bytes += 0 if is_last else sent_bytes
        if group.outer is not None:
            group.outer.apply(average)
        movements = [
            _unflat(average - vector, group.names, snapshot)
            for vector, snapshot in zip(vectors, snapshots, strict=True)
        ]
        moments = [copy.moments(self._keys) for copy in self.copies] if self._keys and not is_last else []
        own = [{n: t for n, t in found.items() if n.rpartition("/")[0] in group.names} for found in moments]
        means = {name: torch.stack([found[name] for found in own]).mean(0) for name in (own[0] if own else ())}
        return _Movement(at, movements, [{n: means[n] - found[n] for n in found} for found in own])


def _flat(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Floats:
    return np.concatenate([tensors[name].detach().reshape(-1).numpy() for name in names])


def _unflat(vector: Floats, names: Sequence[str], like: Mapping[str, Tensor]) -> Tensors:
    sizes = [like[name].numel() for name in names]
    parts = torch.split(torch.from_numpy(vector), sizes)
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def _start(program: Program, stage: Stage, seed: int) -> Tensors:
    """The tensors that a stage starts from: copies, because a trainer without a delay changes them in place."""
    return {name: tensor.clone() for name, tensor in start_tensors(program, stage.state, seed)}


@cache
def _stages(task: str, cuts: tuple[float, ...]) -> list[Stage]:
    program = find_task(task).program
    legal = legal_cuts(program)
    return split(program, [legal[int(place * len(legal))] for place in cuts])


def train(experiment: Experiment, seed: int) -> Result:
    """Train; the loss is that of the averaged weights on held-out data."""
    task = find_task(experiment.task)
    clusters, source = Clusters(experiment, seed), task.samples(seed, experiment.batch * experiment.copies)
    losses: list[float] = []
    total_measure = 0.0
    for number in range(experiment.updates):
        if task.measure is not None:
            total_measure += task.measure(clusters.mean_weights())
        given = task.program.feed(next(source))
        parts = zip(*(torch.split(tensor, experiment.batch) for tensor in given), strict=True)
        losses.append(clusters.update(number, list(parts)))
    clusters.finish()
    numbers = {"sent_bytes": float(clusters.sent_bytes)} if experiment.copies > 1 else {}
    if task.measure is not None:
        numbers["mean measure"] = total_measure / experiment.updates
    return Result(held_out_loss(task, clusters.copies[0]), _curve(losses), numbers)


def held_out_loss(task: Task, copy: Copy) -> float:
    return statistics.fmean(copy.loss(task.program.feed(batch)) for batch in task.held_out)


def _curve(losses: Sequence[float]) -> tuple[float, ...]:
    """Means of equal parts of the training."""
    size = max(1, len(losses) // CURVE_POINTS)
    return tuple(round(statistics.fmean(losses[i : i + size]), 5) for i in range(0, len(losses) - size + 1, size))
