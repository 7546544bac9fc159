"""A pipeline of loops in threads of one process, linked by queues, without processes and sockets."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from ravnest.core.metrics import StageMetrics
from ravnest.core.schedule import PipelineSchedule, StageSchedule
from ravnest.graph import Program, Stage, split, stage_weights
from ravnest.graph.program import varying_sizes
from ravnest.pipeline.accumulation import GradientAccumulator
from ravnest.pipeline.config import StageRole, TrainerConfig, roles
from ravnest.pipeline.gradient_buffers import squared_norm
from ravnest.pipeline.loop import Inbox, Loop, LoopContext
from ravnest.pipeline.state import StageState
from ravnest.pipeline.tensor_codec import StageCodecs
from ravnest.pipeline.trainer import Trainer
from ravnest.protocol.pipeline import Backward, Data, Evaluate, Forward


@dataclass
class Pipe:
    """The results of a run."""

    losses: dict[int, list[float]] = field(default_factory=dict)
    evaluations: dict[int, list[float]] = field(default_factory=dict)
    metrics: dict[int, StageMetrics] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    acks: list[int] = field(default_factory=list)
    states: list[StageState] = field(default_factory=list)  # by stage, as they were saved
    done: threading.Event = field(default_factory=threading.Event)


class _QueueOutlet:
    """Puts copies of messages into another loop's inbox, after a random delay with `jitter`."""

    def __init__(self, inbox: Inbox, jitter: random.Random | None) -> None:
        self.inbox, self.jitter = inbox, jitter

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        if self.jitter is not None:
            time.sleep(self.jitter.random() * 0.004)  # the subject of the test: different timing
        self.inbox.put(header, [t.detach().clone() for t in tensors])


class _EndOutlet:
    """The outlet at either end of the pipeline: records acknowledgements of microbatches."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        if isinstance(header, Backward):
            self.pipe.acks.append(header.microbatch)


class _Observer:
    def __init__(self, pipe: Pipe, updates: int, count: int, evaluations: int) -> None:
        self.pipe, self.updates, self.count, self.expected = pipe, updates, count, evaluations
        self.stops_early = False

    def loss(self, microbatch: int, values: list[float]) -> None:
        self.pipe.losses[microbatch] = values
        self._check()

    def evaluation(self, number: int, batch: int, values: list[float]) -> None:
        self.pipe.evaluations[number] = values
        self._check()

    def prediction(self, number: int, tokens: list[list[int]], scores: list[list[float]]) -> None:
        raise AssertionError("no prediction was requested")

    def updated(self, metrics: StageMetrics) -> None:
        self.pipe.metrics[metrics.stage] = metrics
        self._check()

    def _check(self) -> None:
        trained = [m for m in list(self.pipe.metrics.values()) if m.updates == self.updates]
        stopped = not self.stops_early or any(loss[0] != loss[0] for loss in list(self.pipe.losses.values()))
        if len(trained) == self.count and len(self.pipe.evaluations) == self.expected and stopped:
            self.pipe.done.set()


def train(
    program: Program,
    cuts: Sequence[int],
    batches: Sequence[Any],
    config: TrainerConfig,
    rules: Sequence[StageSchedule],
    *,
    evaluate: dict[int, tuple[Any, bool]] | None = None,
    jitter: int | None = None,
    ends_at: int | None = None,
    start: StageState | None = None,
    save_at: int | None = None,
    whole: bool = True,
    processor_share: float = 1.0,
    devices: Sequence[str] | None = None,
) -> Pipe:
    """Train on `batches`, one per step; `evaluate` maps a step to the (batch, fresh) to evaluate before it.

    `ends_at` is the expected number of updates, if not one per batch. `start` is the state to resume from; after
    `save_at` updates the state of each stage is copied while training continues. `devices` are those of the stages.
    """
    stages = split(program, cuts)
    pipe = Pipe()
    inboxes = [Inbox() for _ in stages]
    first = 0 if start is None else start.updates
    observer = _Observer(pipe, first + len(batches) if ends_at is None else ends_at, len(stages), len(evaluate or {}))
    observer.stops_early = ends_at is not None
    stage_roles = roles(stages, [r.delay for r in rules])
    loops = [
        _loop(program, stage, own, rule, role, inboxes, pipe, observer, jitter, start, processor_share)
        for stage, own, rule, role in zip(stages, _configs(config, stages, devices), rules, stage_roles, strict=True)
    ]
    saved: dict[int, StageState] = {}
    for loop in loops:
        if save_at is not None:
            loop.at_update(save_at, lambda at: saved.__setitem__(at.index, at.trainer.state(whole=whole)))
    threads = [threading.Thread(target=_guard, args=(loop, pipe), daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    _feed(program, batches, rules[0].accumulate, inboxes[0], evaluate or {}, first)
    finished = pipe.done.wait(60)
    for inbox in inboxes:
        inbox.call(Loop.stop)
    for thread in threads:
        thread.join(20)
    if pipe.errors:
        raise pipe.errors[0]
    assert finished, f"stuck: {[(loop.schedule.updates, loop.schedule.next()) for loop in loops]}, {pipe.losses}"
    for loop in loops:
        pipe.weights.update({n: t.detach().cpu().clone() for n, t in loop.trainer.weights().items()})
    pipe.states = [saved[i] for i in sorted(saved)]
    return pipe


def _configs(config: TrainerConfig, stages: Sequence[Stage], devices: Sequence[str] | None) -> list[TrainerConfig]:
    return [msgspec.structs.replace(config, device=device) for device in devices or [config.device] * len(stages)]


def _loop(
    program: Program,
    stage: Stage,
    config: TrainerConfig,
    rule: StageSchedule,
    role: StageRole,
    inboxes: Sequence[Inbox],
    pipe: Pipe,
    observer: _Observer,
    jitter: int | None,
    start: StageState | None,
    processor_share: float,
) -> Loop:
    i, last = stage.index, stage.count - 1
    state = {n: t.clone() for n, t in stage_weights(program, stage).items()}
    start = None if start is None else StageState(start.updates, {n: t.clone() for n, t in start.tensors.items()})
    trainer = Trainer(stage, state, config, delay=rule.delay, start=start)
    accumulator = GradientAccumulator(
        is_first_stage=i == 0,
        is_last_stage=i == last,
        clips=config.optimizer.clip_norm is not None,
        borrowers=role.borrowers,
        squared_norm=squared_norm,
    )
    schedule = PipelineSchedule(
        rule, is_last_stage=i == last, steps_need_permission=accumulator.needs_permission,
        first_update=0 if start is None else start.updates,
    )  # fmt: skip
    rng = random.Random(jitter * 100 + i) if jitter is not None else None
    before = _QueueOutlet(inboxes[i - 1], rng) if i else _EndOutlet(pipe)
    after = _QueueOutlet(inboxes[i + 1], rng) if i < last else _EndOutlet(pipe)
    context = LoopContext(
        inboxes[i], before, after, observer, StageCodecs.of(stage, config.compression, max_batch=1024),
        processor_share=processor_share,
    )  # fmt: skip
    return Loop(trainer, schedule, accumulator, role, context)


def _guard(loop: Loop, pipe: Pipe) -> None:
    torch.set_num_threads(1)
    try:
        loop.run()
    except BaseException as error:
        pipe.errors.append(error)
        pipe.done.set()


def _feed(
    program: Program,
    batches: Sequence[Any],
    accumulate: int,
    inbox: Inbox,
    evaluate: dict[int, tuple[Any, bool]],
    first: int,
) -> None:
    number = first * accumulate
    for step in range(len(batches) + 1):
        if step in evaluate:
            batch, fresh = evaluate[step]
            leaves = program.feed(batch)
            inbox.put(Evaluate(step, len(leaves[0]), fresh, sizes=varying_sizes(program.inputs, leaves)), leaves)
        if step == len(batches):
            break
        leaves = program.feed(batches[step])
        for microbatch in microbatches(leaves, accumulate):
            size = len(microbatch[0])
            sizes = varying_sizes(program.inputs, microbatch)
            inbox.put(Forward(number, size, size / len(leaves[0]), sizes), microbatch)
            number += 1


def microbatches(leaves: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    return [list(part) for part in zip(*(t.tensor_split(count) for t in leaves), strict=True)]
