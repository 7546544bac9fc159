"""The loop of a stage: ask the schedule what is next, do it, send what it made; wait only when there is nothing.

One thread computes. Messages arrive in an inbox that other threads fill, and leave through doors that other threads
empty; the loop looks at all that has arrived before each decision.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol

from torch import Tensor

from ..core.clock import Clock, SystemClock
from ..core.errors import RavnestError
from ..core.messages import Backward, Data, Evaluate, Forward, Lend, Norm, Return
from ..core.metrics import StageMetrics
from ..core.schedule import Action, Schedule
from ..graph import State
from .freight import Freights
from .trainer import FRESH, Trainer
from .windows import Windows

__all__ = ["Door", "Inbox", "Loop", "Observer", "Role", "Wiring"]


class Door(Protocol):
    """One way out: to the next stage, or to the one before."""

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None: ...


class Observer(Protocol):
    """Who wants to know: losses of microbatches, results of evaluations, updates done."""

    def loss(self, microbatch: int, values: list[float]) -> None: ...

    def evaluation(self, number: int, batch: int, values: list[float]) -> None: ...

    def updated(self, metrics: StageMetrics) -> None: ...


@dataclass(frozen=True)
class Role:
    """What a stage must know of the others. `delays` are of all stages."""

    delays: tuple[int, ...]
    lends: tuple[str, ...] = ()  # own parameters that others borrow
    until: int = -1  # the last stage that borrows them
    borrowers: frozenset[int] = frozenset()
    tied: tuple[State, ...] = ()  # every parameter that anybody lends: it may pass through here


class Inbox:
    """Messages and commands for the loop, in the order they arrived."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        self._queue.put((header, tensors))

    def call(self, command: Callable[[Loop], None]) -> None:
        """Have the loop run `command` between two actions."""
        self._queue.put(command)

    def take(self, timeout_s: float) -> Any:
        """The next item, or None if none came in time."""
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None


@dataclass
class _Waiting:
    """A microbatch that arrived: what its message said, its values and the buffers they lie in."""

    header: Any
    values: list[Any]
    buffers: Sequence[Tensor] = field(default_factory=tuple)


@dataclass(frozen=True)
class Wiring:
    """What a loop is connected to."""

    inbox: Inbox
    before: Door
    after: Door
    observer: Observer
    freights: Freights
    admit: Callable[[int], None] = lambda batch: None  # refuses a microbatch size that would take too much memory
    clock: Clock = field(default_factory=SystemClock)


class Loop:
    """Drives one stage."""

    def __init__(self, trainer: Trainer, schedule: Schedule, windows: Windows, role: Role, wiring: Wiring) -> None:
        self.trainer, self.schedule, self.windows, self.role = trainer, schedule, windows, role
        self.inbox, self.observer, self.clock = wiring.inbox, wiring.observer, wiring.clock
        self.before, self.after, self.freights, self.admit = wiring.before, wiring.after, wiring.freights, wiring.admit
        stage = trainer.stage
        self.index, self.is_root, self.is_leaf = stage.index, stage.index == 0, stage.index == stage.count - 1
        self.metrics = StageMetrics(stage=stage.index)
        self._forwards: deque[_Waiting] = deque()
        self._backwards: deque[_Waiting] = deque()
        self._in_flight: dict[int, _Waiting] = {}
        self._at_updates: dict[int, list[Callable[[Loop], None]]] = {}
        self._stopped = False
        self._ends_with: Exception | None = None

    def run(self) -> None:
        """Train, and do what commands say, until one of them is `stop`."""
        for version in self.trainer.versions.live:
            self._lend(version)
        while not self._stopped:
            self._drain()
            action = self.schedule.next()
            if action.kind == "wait":
                self._wait(action)
            else:
                began = self.clock.now_s()
                self._act(action)
                self._count(action, self.clock.now_s() - began)

    def end_after(self, updates: int) -> None:
        """Train no further than this many updates."""
        if self.schedule.end is None or updates < self.schedule.end:
            self.schedule.end = updates

    def at_update(self, updates: int, command: Callable[[Loop], None]) -> bool:
        """Run `command` when there have been so many updates, before anything else is done; false if that is past."""
        if updates == self.schedule.updates:
            command(self)
        elif updates > self.schedule.updates:
            self._at_updates.setdefault(updates, []).append(command)
        return updates >= self.schedule.updates

    def stop(self) -> None:
        self._stopped = True

    def end_with(self, error: Exception) -> None:
        """Nothing more will come to be trained: end with this error when nothing is in flight any more."""
        self._ends_with = error

    def _drain(self) -> None:
        while (item := self.inbox.take(0)) is not None:
            self._receive(item)

    def _wait(self, action: Action) -> None:
        if self._stopped:
            return
        if self._ends_with is not None and not self.schedule.in_flight:
            raise self._ends_with
        began = self.clock.now_s()
        item = self.inbox.take(self.trainer.settings.patience_s)
        if item is None:
            raise RavnestError(
                f"stage {self.index} waited {self.trainer.settings.patience_s:g} s {action.reason} and gave up"
            )
        if self._is_steady and self.schedule.updates != self.schedule.end:
            self.metrics.idle_s += self.clock.now_s() - began
        self._receive(item)

    def _receive(self, item: Any) -> None:
        if callable(item):
            item(self)
            return
        header, tensors = item
        match header:
            case Forward(batch=batch):
                self.admit(batch)
                self._forwards.append(_Waiting(header, self.freights.inputs.unpack(batch, tensors), tensors))
                self.schedule.input_arrived()
            case Evaluate(evaluation=number, batch=batch, fresh=fresh):
                self.admit(batch)
                self._forwards.append(_Waiting(header, self.freights.inputs.unpack(batch, tensors)))
                self.schedule.evaluation_arrived(number, fresh=fresh)
            case Backward(batch=batch):
                self._backwards.append(_Waiting(header, self.freights.gradients_in.unpack(batch, tensors), tensors))
                self.schedule.gradient_arrived()
            case Lend(version=version, owner=owner, until=until, names=names):
                if self.index < until:
                    self.after.put(header, tensors)
                if owner in {s.owner for s in self.trainer.stage.borrowed}:
                    lent = {name: tensor.clone() for name, tensor in zip(names, tensors, strict=True)}
                    self.trainer.borrow(owner, version, self.role.delays[owner], lent)
            case Return(window=window, owner=owner, borrower=borrower, names=names):
                if owner == self.index:
                    self.windows[window].returned[borrower] = dict(zip(names, tensors, strict=True))
                    self._progress(window)
                else:
                    self.before.put(header, tensors)
            case Norm(window=window, squares=squared):
                self._norm(window, squared)

    def _act(self, action: Action) -> None:
        match action.kind:
            case "forward":
                self._forward(action)
            case "backward":
                self._backward(action)
            case "step":
                self._step(action)
            case "evaluate":
                self._evaluate(action)

    def _forward(self, action: Action) -> None:
        waiting = self._forwards.popleft()
        header: Forward = waiting.header
        window = self.schedule.rule.window(action.number)
        outputs = self.trainer.forward(action.number, window, action.version, waiting.values, header.share)
        self._in_flight[action.number] = _Waiting(header, [], waiting.buffers)
        if self.is_leaf:
            values = [float(o) for o in outputs]
            self.observer.loss(action.number, values)
            if not isfinite(values[0]):
                self.end_after(window)  # no gradient of this window goes back, so nobody can apply it
        else:
            self.after.put(header, self.freights.outputs.pack(outputs))
        self.schedule.done(action)

    def _backward(self, action: Action) -> None:
        sent = self._in_flight.pop(action.number)
        came = None if self.is_leaf else self._backwards.popleft()
        gradients = self.trainer.backward(action.number, None if came is None else self._spread(came.values))
        packed = self.freights.gradients_out.pack(
            [g for g, v in zip(gradients, self.trainer.stage.inputs, strict=True) if v.grad]
        )
        self.before.put(Backward(action.number, sent.header.batch), packed)
        self.freights.inputs.give_back(sent.buffers)
        if came is not None and not _overlap(came.buffers, packed):
            self.freights.gradients_in.give_back(came.buffers)
        self.schedule.done(action)
        if self.schedule.backwards % self.schedule.rule.accumulate == 0:
            self._window_done(self.schedule.rule.window(action.number), action.version)

    def _spread(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients that came, at the places of the outputs they belong to."""
        left = iter(gradients)
        return [next(left) if v.grad else None for v in self.trainer.stage.outputs]

    def _window_done(self, window: int, version: int) -> None:
        own, borrowed = self.trainer.take_gradients(window, version)
        for owner, gradients in borrowed.items():
            header = Return(window, owner, self.index, tuple(gradients))
            self.before.put(header, [g.contiguous() for g in gradients.values()])
        self.windows[window].own = own
        self._progress(window)

    def _progress(self, window: int) -> None:
        """See whether a window can go on towards its update."""
        if not self.windows.needs_permission:
            return
        if not self.windows.clips:
            if self.windows.complete(window):
                self.schedule.allow_step()
            return
        squared = self.windows.squares_to_send(window)
        if squared is None:
            return
        if self.is_root:
            self._norm_known(window, squared)
        else:
            self.before.put(Norm(window, squared), ())

    def _norm(self, window: int, squared: float) -> None:
        """From behind comes the sum so far, from the front the total: only before the total was our own part sent."""
        if not self.windows[window].is_told:
            self.windows[window].squares_below = squared
            self._progress(window)
        else:
            self._norm_known(window, squared)

    def _norm_known(self, window: int, squared: float) -> None:
        self.windows[window].total = squared
        if not self.is_leaf:
            self.after.put(Norm(window, squared), ())
        self.schedule.allow_step()

    def _step(self, action: Action) -> None:
        gradients, squared = self.windows.take(action.number)
        norm = None if squared is None else squared**0.5
        self.trainer.update(action.number, self.schedule.rule.version(action.number), gradients, norm)
        self.schedule.done(action)
        self._lend(self.trainer.versions.newest)
        for command in self._at_updates.pop(self.schedule.updates, ()):
            command(self)

    def _lend(self, version: int) -> None:
        if self.role.lends:
            header = Lend(version, self.index, self.role.until, self.role.lends)
            self.after.put(header, [t.contiguous() for t in self.trainer.lend(self.role.lends, version)])

    def _evaluate(self, action: Action) -> None:
        waiting = self._forwards.popleft()
        header: Evaluate = waiting.header
        if header.fresh:
            self._lend(FRESH)
        window = None if header.fresh else self.schedule.rule.window(self.schedule.forwards)
        outputs = self.trainer.evaluate(window, action.version, waiting.values)
        if self.is_leaf:
            self.observer.evaluation(action.number, header.batch, [float(o) for o in outputs])
        else:
            self.after.put(header, self.freights.outputs.pack(outputs))
        self.schedule.done(action)

    @property
    def _is_steady(self) -> bool:
        """Whether it has made an update: what came before is not typical."""
        return self.schedule.updates > self.schedule.first_update

    def _count(self, action: Action, seconds: float) -> None:
        metrics = self.metrics
        metrics.busy_s += seconds
        if self._is_steady:
            metrics.steady_busy_s += seconds
        if action.kind == "backward":
            metrics.microbatches += 1
        if action.kind == "step":
            metrics.step_s += seconds
            metrics.updates = self.schedule.updates
            metrics.in_flight, metrics.queued = self.schedule.in_flight, self.schedule.queued
            metrics.staleness = dict(self.schedule.staleness)
            metrics.versions = len(self.trainer.versions.live)
            self.observer.updated(metrics)


def _overlap(received: Sequence[Tensor], sent: Sequence[Tensor]) -> bool:
    """Whether a message that goes out uses memory that a message came in."""
    return bool({t.untyped_storage().data_ptr() for t in received} & {t.untyped_storage().data_ptr() for t in sent})
