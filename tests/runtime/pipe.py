"""A pipeline of loops in threads of one process, linked by queues: the real runtime without processes and sockets."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ravnest.core.messages import Backward, Data, Evaluate, Forward
from ravnest.core.metrics import StageMetrics
from ravnest.core.schedule import Rule, Schedule
from ravnest.graph import Program, Stage, split, stage_weights
from ravnest.runtime.freight import Freights
from ravnest.runtime.loop import Inbox, Loop, Role, Wiring
from ravnest.runtime.roles import roles
from ravnest.runtime.settings import Settings
from ravnest.runtime.state import StageState
from ravnest.runtime.trainer import Trainer, squares
from ravnest.runtime.windows import Windows


@dataclass
class Pipe:
    """What a run left behind."""

    losses: dict[int, list[float]] = field(default_factory=dict)
    evaluations: dict[int, list[float]] = field(default_factory=dict)
    metrics: dict[int, StageMetrics] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    acks: list[int] = field(default_factory=list)
    states: list[StageState] = field(default_factory=list)  # by stage, as they were saved
    done: threading.Event = field(default_factory=threading.Event)


class _Door:
    """Puts messages into another loop's inbox, copied as a link would, after a delay if the test wants one."""

    def __init__(self, inbox: Inbox, jitter: random.Random | None) -> None:
        self.inbox, self.jitter = inbox, jitter

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        if self.jitter is not None:
            time.sleep(self.jitter.random() * 0.004)  # the thing under test: timing that falls differently
        self.inbox.put(header, [t.detach().clone() for t in tensors])


class _Front:
    """What lies before the root: takes acknowledgements."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        if isinstance(header, Backward):
            self.pipe.acks.append(header.microbatch)


class _Watch:
    def __init__(self, pipe: Pipe, updates: int, count: int, evaluations: int) -> None:
        self.pipe, self.updates, self.count, self.expected = pipe, updates, count, evaluations
        self.stops_early = False

    def loss(self, microbatch: int, values: list[float]) -> None:
        self.pipe.losses[microbatch] = values
        self._check()

    def evaluation(self, number: int, batch: int, values: list[float]) -> None:
        self.pipe.evaluations[number] = values
        self._check()

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
    settings: Settings,
    rules: Sequence[Rule],
    *,
    evaluate: dict[int, tuple[Any, bool]] | None = None,
    jitter: int | None = None,
    ends_at: int | None = None,
    start: StageState | None = None,
    save_at: int | None = None,
    whole: bool = True,
) -> Pipe:
    """Train on `batches`, each one window; `evaluate` maps a window to (batch, fresh) that goes in before it.

    `ends_at` is how many updates are expected, if not one for each batch. `start` is where to go on from; after
    `save_at` updates each stage's state is copied, while training goes on.
    """
    stages = split(program, cuts)
    pipe = Pipe()
    inboxes = [Inbox() for _ in stages]
    first = 0 if start is None else start.updates
    watch = _Watch(pipe, first + len(batches) if ends_at is None else ends_at, len(stages), len(evaluate or {}))
    watch.stops_early = ends_at is not None
    given = roles(stages, [r.delay for r in rules])
    loops = [
        _loop(program, stage, settings, rule, role, inboxes, pipe, watch, jitter, start)
        for stage, rule, role in zip(stages, rules, given, strict=True)
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
        pipe.weights.update({n: t.detach().clone() for n, t in loop.trainer.weights().items()})
    pipe.states = [saved[i] for i in sorted(saved)]
    return pipe


def _loop(
    program: Program,
    stage: Stage,
    settings: Settings,
    rule: Rule,
    role: Role,
    inboxes: Sequence[Inbox],
    pipe: Pipe,
    watch: _Watch,
    jitter: int | None,
    start: StageState | None,
) -> Loop:
    i, last = stage.index, stage.count - 1
    state = {n: t.clone() for n, t in stage_weights(program, stage).items()}
    start = None if start is None else StageState(start.updates, {n: t.clone() for n, t in start.tensors.items()})
    trainer = Trainer(stage, state, settings, delay=rule.delay, start=start)
    windows = Windows(
        is_root=i == 0,
        is_leaf=i == last,
        clips=settings.optimizer.clip_norm is not None,
        borrowers=role.borrowers,
        squares=squares,
    )
    schedule = Schedule(
        rule, is_leaf=i == last, steps_need_permission=windows.needs_permission,
        first_update=0 if start is None else start.updates,
    )  # fmt: skip
    rng = random.Random(jitter * 100 + i) if jitter is not None else None
    before = _Door(inboxes[i - 1], rng) if i else _Front(pipe)
    after = _Door(inboxes[i + 1], rng) if i < last else _Front(pipe)
    wiring = Wiring(inboxes[i], before, after, watch, Freights.of(stage, settings.compression, max_batch=1024))
    return Loop(trainer, schedule, windows, role, wiring)


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
    for window in range(len(batches) + 1):
        if window in evaluate:
            batch, fresh = evaluate[window]
            leaves = program.feed(batch)
            inbox.put(Evaluate(window, len(leaves[0]), fresh), leaves)
        if window == len(batches):
            break
        for part in pieces(program.feed(batches[window]), accumulate):
            share = len(part[0]) / sum(len(p[0]) for p in pieces(program.feed(batches[window]), accumulate))
            inbox.put(Forward(number, len(part[0]), share), part)
            number += 1


def pieces(leaves: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    return [list(part) for part in zip(*(t.tensor_split(count) for t in leaves), strict=True)]
