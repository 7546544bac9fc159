"""Runs a stage: gets the next action from the schedule, performs it and sends its result.

One thread computes. Other threads fill its inbox with messages and empty its outlets. The loop drains the inbox before
each decision, and waits only when the schedule has no action.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol

import msgspec
from torch import Tensor

from ravnest.core.clock import Clock, SystemClock
from ravnest.core.metrics import StageMetrics
from ravnest.core.schedule import Action, PipelineSchedule
from ravnest.errors import RavnestError
from ravnest.pipeline.accumulation import GradientAccumulator
from ravnest.pipeline.config import StageRole
from ravnest.pipeline.tensor_codec import StageCodecs
from ravnest.pipeline.trainer import FRESH, Trainer
from ravnest.pipeline.transfers import Download, Transfers, Upload
from ravnest.protocol.pipeline import Backward, Data, Evaluate, Forward, Lend, Norm, Return

__all__ = ["Inbox", "Loop", "LoopContext"]


class Outlet(Protocol):
    """A queue of messages to the next stage, or to the previous one."""

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None: ...


class Observer(Protocol):
    """Receives losses of microbatches, results of evaluations and predictions, and metrics after each update."""

    def loss(self, microbatch: int, values: list[float]) -> None: ...

    def evaluation(self, number: int, batch: int, values: list[float]) -> None: ...

    def prediction(self, number: int, tokens: list[list[int]], scores: list[list[float]]) -> None: ...

    def updated(self, metrics: StageMetrics) -> None: ...


class Inbox:
    """Messages and commands for the loop, in the order they arrived."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        self._queue.put((header, tensors))

    def call(self, command: Callable[[Loop], None]) -> None:
        """Queue a command, which the loop runs between two actions."""
        self._queue.put(command)

    def take(self, timeout_s: float) -> Any:
        """The next item; None after `timeout_s`."""
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None


@dataclass
class _QueuedMicrobatch:
    """A microbatch that arrived: its message, the buffers with its values, and these on their way to the device."""

    header: Any
    buffers: Sequence[Tensor] = field(default_factory=tuple)
    upload: Upload = field(default_factory=lambda: Upload([]))


@dataclass(frozen=True)
class LoopContext:
    """The connections of a loop."""

    inbox: Inbox
    before: Outlet
    after: Outlet
    observer: Observer
    codecs: StageCodecs
    # raises if a microbatch of this batch size and these varying sizes would take too much memory
    admit: Callable[[int, tuple[int, ...]], None] = lambda batch, sizes: None
    clock: Clock = field(default_factory=SystemClock)
    processor_share: float = 1.0  # of a core: the loop pauses after each action if it is less than 1


class Loop:
    """Trains one stage until it is stopped."""

    def __init__(
        self,
        trainer: Trainer,
        schedule: PipelineSchedule,
        accumulator: GradientAccumulator,
        role: StageRole,
        context: LoopContext,
    ) -> None:
        self.trainer, self.schedule, self.accumulator, self.role = trainer, schedule, accumulator, role
        self.inbox, self.observer, self.clock = context.inbox, context.observer, context.clock
        self.before, self.after, self.codecs, self.admit = context.before, context.after, context.codecs, context.admit
        self._pause_per_s = 1 / context.processor_share - 1  # of computing
        stage = trainer.stage
        self.index = stage.index
        self.is_first_stage, self.is_last_stage = stage.index == 0, stage.index == stage.count - 1
        self.metrics = StageMetrics(stage=stage.index)
        self.transfers = Transfers(trainer.device)
        self._outgoing: deque[tuple[Outlet, Data, Download]] = deque()  # in order; empty on the processor
        self._forwards: deque[_QueuedMicrobatch] = deque()
        self._backwards: deque[_QueuedMicrobatch] = deque()
        self._in_flight: dict[int, _QueuedMicrobatch] = {}
        self._at_updates: dict[int, list[Callable[[Loop], None]]] = {}
        self._is_stopped = False
        self._error_when_idle: Exception | None = None

    def run(self) -> None:
        """Train and run commands until one of them calls `stop`."""
        for version in self.trainer.versions.live:
            self._lend(version)
        while not self._is_stopped:
            self._drain()
            action = self.schedule.next()
            if action.kind == "wait" and not self._outgoing:
                self._wait(action)
                continue
            start_s, used_s, outgoing = self.clock.now_s(), time.thread_time(), len(self._outgoing)
            if action.kind != "wait":
                self._act(action)
            self._send_oldest(outgoing)  # the device computes this action meanwhile
            if self._pause_per_s:
                time.sleep((time.thread_time() - used_s) * self._pause_per_s)
            self._record(action, self.clock.now_s() - start_s)
        self._send_oldest(len(self._outgoing))

    def end_after(self, updates: int) -> None:
        """Stop training after this number of updates."""
        if self.schedule.end is None or updates < self.schedule.end:
            self.schedule.end = updates

    def at_update(self, updates: int, command: Callable[[Loop], None]) -> bool:
        """Run `command` right after update number `updates`; false if that has passed."""
        if updates == self.schedule.updates:
            command(self)
        elif updates > self.schedule.updates:
            self._at_updates.setdefault(updates, []).append(command)
        return updates >= self.schedule.updates

    def stop(self) -> None:
        self._is_stopped = True

    def fail_when_idle(self, error: Exception) -> None:
        """Raise this error as soon as no microbatch is in flight: no more input will arrive."""
        self._error_when_idle = error

    def _drain(self) -> None:
        while (item := self.inbox.take(0)) is not None:
            self._receive(item)

    def _wait(self, action: Action) -> None:
        if self._is_stopped:
            return
        if self._error_when_idle is not None and not self.schedule.in_flight:
            raise self._error_when_idle
        start_s = self.clock.now_s()
        timeout_s = self.trainer.config.timeout_s
        item = self.inbox.take(timeout_s)
        if item is None:
            raise RavnestError(f"stage {self.index} timed out after {timeout_s:g} s waiting {action.reason}")
        if self._is_steady and self.schedule.updates != self.schedule.end:
            self.metrics.idle_s += self.clock.now_s() - start_s
        self._receive(item)

    def _receive(self, item: Any) -> None:
        if callable(item):
            item(self)
            return
        header, tensors = item
        match header:
            case Forward(batch=batch, sizes=sizes):
                self.admit(batch, sizes)
                self._forwards.append(_QueuedMicrobatch(header, tensors, self.transfers.upload(tensors)))
                self.schedule.input_arrived()
            case Evaluate(evaluation=number, batch=batch, fresh=fresh, sizes=sizes):
                self.admit(batch, sizes)
                self._forwards.append(_QueuedMicrobatch(header, tensors, self.transfers.upload(tensors)))
                self.schedule.evaluation_arrived(number, fresh=fresh)
            case Backward():
                self._backwards.append(_QueuedMicrobatch(header, tensors, self.transfers.upload(tensors)))
                self.schedule.gradient_arrived()
            case Lend(version=version, owner=owner, until=until, names=names):
                if self.index < until:
                    self._pass_on(self.after, header, tensors)
                if owner in {s.owner for s in self.trainer.stage.borrowed}:
                    borrowed = {name: tensor.clone() for name, tensor in zip(names, tensors, strict=True)}
                    self.trainer.borrow(owner, version, self.role.delays[owner], borrowed)
            case Return(step=step, owner=owner, borrower=borrower, names=names):
                if owner == self.index:
                    gradients = self.transfers.upload(tensors).tensors()
                    self.accumulator[step].returned[borrower] = dict(zip(names, gradients, strict=True))
                    self._advance(step)
                else:
                    self._pass_on(self.before, header, tensors)
            case Norm(step=step, squares=squared):
                self._norm_arrived(step, squared)

    def _send(self, outlet: Outlet, header: Data, tensors: Sequence[Tensor]) -> None:
        """Send tensors of the device, as soon as they are in host memory."""
        download = self.transfers.download(tensors)
        if download.is_pending or self._outgoing:  # a message does not overtake another
            self._outgoing.append((outlet, header, download))
        else:
            outlet.put(header, download.tensors())

    def _pass_on(self, outlet: Outlet, header: Data, tensors: Sequence[Tensor] = ()) -> None:
        """Send tensors of the host."""
        if self._outgoing:
            self._outgoing.append((outlet, header, Download(list(tensors))))
        else:
            outlet.put(header, tensors)

    def _send_oldest(self, count: int) -> None:
        for _ in range(count):
            outlet, header, download = self._outgoing.popleft()
            outlet.put(header, download.tensors())

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
        queued = self._forwards.popleft()
        header: Forward = queued.header
        step = self.schedule.rule.step_of(action.number)
        outputs = self.trainer.forward(action.number, step, action.version, self._inputs(queued), header.share)
        self._in_flight[action.number] = _QueuedMicrobatch(header, queued.buffers)
        if self.is_last_stage:
            values = [float(o) for o in outputs]
            self.observer.loss(action.number, values)
            if not isfinite(values[0]):
                self.end_after(step)  # no gradient of this step goes back, so no stage can apply it
        else:
            self._send_outputs(header, outputs)
        self.schedule.done(action)

    def _inputs(self, queued: _QueuedMicrobatch) -> list[Any]:
        header: Forward | Evaluate = queued.header
        return self.codecs.inputs.unpack(header.batch, queued.upload.tensors(), header.sizes)

    def _gradients(self, queued: _QueuedMicrobatch) -> list[Any]:
        header: Backward = queued.header
        return self.codecs.gradients_in.unpack(header.batch, queued.upload.tensors(), header.sizes)

    def _send_outputs(self, header: Forward | Evaluate, outputs: Sequence[Any]) -> None:
        sizes = self.codecs.outputs.sizes(outputs)
        if sizes != header.sizes:
            header = msgspec.structs.replace(header, sizes=sizes)
        self._send(self.after, header, self.codecs.outputs.pack(outputs))

    def _backward(self, action: Action) -> None:
        sent = self._in_flight.pop(action.number)
        received = None if self.is_last_stage else self._backwards.popleft()
        given = None if received is None else self._align(self._gradients(received))
        gradients = self.trainer.backward(action.number, given)
        sent_back = [g for g, v in zip(gradients, self.trainer.stage.inputs, strict=True) if v.grad]
        codec = self.codecs.gradients_out
        packed = codec.pack(sent_back)
        self._send(self.before, Backward(action.number, sent.header.batch, codec.sizes(sent_back)), packed)
        self.codecs.inputs.recycle(sent.buffers)
        if received is not None and not _overlap(received.buffers, packed):
            received.upload.finish()
            self.codecs.gradients_in.recycle(received.buffers)
        self.schedule.done(action)
        if self.schedule.backwards % self.schedule.rule.accumulate == 0:
            self._finish_backwards(self.schedule.rule.step_of(action.number), action.version)

    def _align(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Received gradients at the positions of the outputs they belong to."""
        remaining = iter(gradients)
        return [next(remaining) if v.grad else None for v in self.trainer.stage.outputs]

    def _finish_backwards(self, step: int, version: int) -> None:
        """All microbatches of a step have gone back: collect its gradients."""
        will_wait = self.accumulator.needs_permission and self.schedule.rule.delay > 0
        own, borrowed = self.trainer.take_gradients(step, version, will_wait=will_wait)
        for owner, gradients in borrowed.items():
            header = Return(step, owner, self.index, tuple(gradients))
            self._send(self.before, header, [g.contiguous() for g in gradients.values()])
        self.accumulator[step].own = own
        self._advance(step)

    def _advance(self, step: int) -> None:
        """Allow a step, or send its norm, if everything that it needs from other stages has arrived."""
        if not self.accumulator.needs_permission:
            return
        if not self.accumulator.clips:
            if self.accumulator.complete(step):
                self.schedule.allow_step()
            return
        squared = self.accumulator.norm_to_send(step)
        if squared is None:
            return
        if self.is_first_stage:
            self._norm_known(step, squared)
        else:
            self._pass_on(self.before, Norm(step, squared))

    def _norm_arrived(self, step: int, squared: float) -> None:
        """A partial sum from the next stage arrives before this stage sends its own, the total after that."""
        if not self.accumulator[step].is_norm_sent:
            self.accumulator[step].later_squared_norm = squared
            self._advance(step)
        else:
            self._norm_known(step, squared)

    def _norm_known(self, step: int, squared: float) -> None:
        self.accumulator[step].total_squared_norm = squared
        if not self.is_last_stage:
            self._pass_on(self.after, Norm(step, squared))
        self.schedule.allow_step()

    def _step(self, action: Action) -> None:
        gradients, squared = self.accumulator.take(action.number)
        norm = None if squared is None else squared**0.5
        self.transfers.before_change()  # of weights that are lent
        self.trainer.update(action.number, self.schedule.rule.version(action.number), gradients, norm)
        self.schedule.done(action)
        self._lend(self.trainer.versions.newest)
        for command in self._at_updates.pop(self.schedule.updates, ()):
            command(self)

    def _lend(self, version: int) -> None:
        if self.role.lends:
            header = Lend(version, self.index, self.role.until, self.role.lends)
            self._send(self.after, header, [t.contiguous() for t in self.trainer.lend(self.role.lends, version)])

    def _evaluate(self, action: Action) -> None:
        queued = self._forwards.popleft()
        header: Evaluate = queued.header
        if header.fresh:
            self._lend(FRESH)
        step = None if header.fresh else self.schedule.rule.step_of(self.schedule.forwards)
        if self.is_last_stage and header.positions:
            best = self.trainer.predict(step, action.version, self._inputs(queued), header.positions)
            self.observer.prediction(action.number, *best)
            self.schedule.done(action)
            return
        outputs = self.trainer.evaluate(step, action.version, self._inputs(queued))
        if self.is_last_stage:
            self.observer.evaluation(action.number, header.batch, [float(o) for o in outputs])
        else:
            self._send_outputs(header, outputs)
        self.schedule.done(action)

    @property
    def _is_steady(self) -> bool:
        """Whether it has made an update: times before that are not typical."""
        return self.schedule.updates > self.schedule.first_update

    def _record(self, action: Action, seconds: float) -> None:
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
    """Whether an outgoing message uses memory of an incoming one."""
    if sent and sent[0].device.type != "cpu":
        return False
    return bool({t.untyped_storage().data_ptr() for t in received} & {t.untyped_storage().data_ptr() for t in sent})
