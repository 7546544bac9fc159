"""Runs one stage between its two links, and reports its progress.

The caller provides the stage and its links. For the training loop, a link is a queue to send to; both links receive
into one inbox.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import psutil
import torch
from torch import Tensor

from ravnest.core.clock import Deadline
from ravnest.core.metrics import StageMetrics
from ravnest.core.rate_limit import RateLimiter
from ravnest.core.schedule import PipelineSchedule
from ravnest.core.units import format_bytes
from ravnest.errors import FrameError, LinkClosed, LinkError, RavnestError, WeightsError
from ravnest.graph import Stage, StageLimits, StateSpec, initialise, read_weights, write_weights
from ravnest.graph.device import CPU, device_name, is_out_of_memory, peak_device_bytes
from ravnest.graph.dry_run import dry_run_batch
from ravnest.graph.program import DTYPES
from ravnest.pipeline.accumulation import GradientAccumulator
from ravnest.pipeline.config import StageConfig
from ravnest.pipeline.gradient_buffers import squared_norm
from ravnest.pipeline.loop import Inbox, Loop, LoopContext
from ravnest.pipeline.state import StageState, owned, read_state, write_state
from ravnest.pipeline.tensor_codec import StageCodecs, TensorCodec, as_bytes
from ravnest.pipeline.trainer import Trainer
from ravnest.pipeline.transfers import can_pin
from ravnest.protocol.commands import (
    Command,
    EndAfter,
    EvaluationReport,
    LossReport,
    PredictionReport,
    Report,
    SaveState,
    StageFailed,
    StageReady,
    StateSaved,
    StepReport,
    StopStage,
)
from ravnest.protocol.pipeline import Backward, Data, Evaluate, Forward, Lend, Norm, Return
from ravnest.transport.link import Link
from ravnest.transport.pump import OnError, Pump, PumpConfig

__all__ = ["SendReport", "StageRunner", "failure_of", "StageLink"]


class StageLink:
    """A link to one neighbour, with a thread to send and one to receive into tensors of `TensorCodec`."""

    def __init__(
        self,
        link: Link,
        inbox: Inbox,
        codecs: dict[type, TensorCodec],
        tied: Sequence[StateSpec],
        on_error: Callable[[Exception], None],
        timeout_s: float,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        self._inbox, self._codecs, self._timeout_s = inbox, codecs, timeout_s
        self._tied = {s.target: s for s in tied}
        self._tensors: list[Tensor] = []
        self._link = link
        config = PumpConfig(capacity=16, frame_s=timeout_s, rate_limiter=rate_limiter)
        self._pump = Pump(link, self._place, self._received, on_error, config)

    def start(self) -> None:
        self._pump.start()

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        """Queue a message; blocks while the queue is full."""
        self._pump.put(header, [as_bytes(t) for t in tensors], deadline_s=self._timeout_s)

    def close(self, flush_s: float) -> None:
        self._pump.close(flush_s=flush_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until the queue is empty; false on timeout."""
        return self._pump.drain(deadline_s=timeout_s)

    @property
    def depth(self) -> int:
        return self._pump.depth

    @property
    def sent_bytes(self) -> int:
        return self._link.stats.sent.num_bytes

    @property
    def received_bytes(self) -> int:
        return self._link.stats.received.num_bytes

    def _place(self, header: msgspec.Struct, lengths: tuple[int, ...]) -> Sequence[memoryview]:
        self._tensors = self._allocate(header, lengths)
        return [as_bytes(t) for t in self._tensors]

    def _allocate(self, header: Any, lengths: tuple[int, ...]) -> list[Tensor]:
        """Allocate tensors for a message, if this neighbour may send one of its kind and size."""
        match header:
            case Forward() | Evaluate() if Forward in self._codecs:
                return self._codecs[Forward].allocate(header.batch, lengths, header.sizes)
            case Backward() if Backward in self._codecs:
                return self._codecs[Backward].allocate(header.batch, lengths, header.sizes)
            case Lend(names=names) | Return(names=names):
                return self._allocate_tied(names, lengths)
            case Norm() if not lengths:
                return []
        raise FrameError(f"unexpected {type(header).__name__} with {len(lengths)} buffers from this neighbour")

    def _allocate_tied(self, names: tuple[str, ...], lengths: tuple[int, ...]) -> list[Tensor]:
        known = [self._tied[name] for name in names if name in self._tied]
        expected = [prod(s.shape) * DTYPES[s.dtype].itemsize for s in known]
        if len(known) != len(names) or expected != list(lengths):
            raise FrameError(
                f"tied parameters {names!r:.100} of {lengths!r:.100} bytes, expected {expected!r:.100} bytes"
            )
        return [torch.empty(s.shape, dtype=DTYPES[s.dtype]) for s in known]

    def _received(self, header: msgspec.Struct, views: Sequence[memoryview]) -> None:
        tensors, self._tensors = self._tensors, []
        self._inbox.put(header, tensors)  # type: ignore[arg-type]


class FeedLink(StageLink):
    """A link from the coordinator to the first stage.

    The coordinator may end while there are microbatches left to train. Their acknowledgements are then dropped; the
    replica that the stage leaves records what was trained.
    """

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        with contextlib.suppress(LinkClosed):
            super().put(header, tensors)


class NullLink:
    """Stands for the missing neighbour after the last stage."""

    depth = sent_bytes = received_bytes = 0

    def start(self) -> None:
        pass

    def drain(self, timeout_s: float) -> bool:
        return True

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        raise AssertionError(f"the last stage cannot send a {type(header).__name__} onwards")

    def close(self, flush_s: float) -> None:
        pass


# the stage

SendReport: TypeAlias = Callable[[Report], None]

_MAX_WAIT_S = 1.0
_MAX_CHECKED = 10_000  # sizes of microbatches that are remembered


class StageRunner:
    """Owns the links once created. `run` trains in the calling thread; the other methods are for any thread."""

    def __init__(
        self,
        stage: Stage,
        config: StageConfig,
        limits: StageLimits,
        before: Link,
        after: Link | None,
        report: SendReport,
        rate_limiter: RateLimiter | None = None,
        *,
        begin: StageState | None = None,
        is_fed: bool = False,
        processor_share: float = 1.0,
    ) -> None:
        """`begin` is a state to resume from, which becomes the stage's own; without it, `config` names the files.

        `is_fed`: `before` leads to the coordinator; when it is lost, the stage still trains its pending microbatches.
        """
        self._report, self._inbox, self._processor_share = report, Inbox(), processor_share
        self._writing: threading.Thread | None = None
        self._is_writing = False
        device = torch.device(config.settings.device)
        self._codecs = StageCodecs.of(stage, config.settings.compression, config.max_batch, pinned=can_pin(device))

        def stage_link(link: Link, codecs: dict[type, TensorCodec], *, is_feed: bool = False) -> StageLink:
            on_error = self._feed_failed if is_feed else self._on_link_error(link.peer)
            kind = FeedLink if is_feed else StageLink
            return kind(link, self._inbox, codecs, config.role.tied, on_error, config.settings.timeout_s, rate_limiter)

        self._before = stage_link(before, {Forward: self._codecs.inputs}, is_feed=is_fed)
        self._after = NullLink() if after is None else stage_link(after, {Backward: self._codecs.gradients_in})
        self._observer = _Observer(report, (self._before, self._after), device)
        try:
            self._loop = self._make_loop(stage, config, limits, begin)
        except BaseException:
            self.close(flush_s=0.0)
            raise

    def run(self) -> None:
        """Train until a `StopStage` command; raises the reason if the stage fails."""
        self._before.start()
        self._after.start()
        self._report(StageReady(self._loop.index))
        self._loop.run()

    def command(self, command: Command) -> None:
        """Execute a command between two actions."""

        def execute(loop: Loop) -> None:
            match command:
                case EndAfter(updates=updates):
                    loop.end_after(updates)
                case SaveState(path=path, state=""):
                    _save(loop, path)
                    self._report(StateSaved(loop.index, loop.schedule.updates))
                case SaveState():
                    self._save_state(loop, command)
                case StopStage():
                    loop.stop()

        self._inbox.call(execute)

    def state(self) -> StageState:
        """Return weights, frozen ones included, and optimizer state; only once the stage has ended."""
        return self._loop.trainer.state(whole=False, copies=False, frozen=True)

    def call_in_loop(self, function: Callable[[Loop], None]) -> None:
        """Call a function in the training loop between two actions."""
        self._inbox.call(function)

    def wait(self, timeout_s: float, /) -> bool:
        """Wait briefly until the queues of the stage's own links are empty, which have priority over other traffic."""
        deadline = Deadline(min(timeout_s, _MAX_WAIT_S))
        for link in (self._before, self._after):
            link.drain(deadline.left_s())
        return True

    def _on_link_error(self, peer: str) -> OnError:
        """Return a handler that makes the stage fail."""

        def on_error(error: Exception) -> None:
            def fail(loop: Loop) -> None:
                kind = LinkClosed if isinstance(error, LinkClosed) else LinkError
                raise kind(f"lost the link to {peer}: {error}")

            self._inbox.call(fail)

        return on_error

    def _feed_failed(self, error: Exception) -> None:
        reason = LinkClosed(f"lost the coordinator's feed, and all microbatches are trained: {error}")
        self._inbox.call(lambda loop: loop.fail_when_idle(reason))

    def close(self, *, flush_s: float) -> None:
        """Close both links at the same time."""
        closing = threading.Thread(target=self._after.close, args=(flush_s,), daemon=True)
        closing.start()
        self._before.close(flush_s)
        closing.join()
        if self._writing is not None:
            self._writing.join(flush_s)

    def _save_state(self, loop: Loop, command: SaveState) -> None:
        """Write the state at the requested update in another thread.

        Training continues, but the next update waits until the state has been read: a copy might not fit in memory.
        """

        def begin(loop: Loop) -> None:
            updates = loop.schedule.updates
            if self._is_writing:
                self._report(StateSaved(loop.index, updates, "the last state is still being written", is_state=True))
                return
            state, is_read = loop.trainer.state(whole=command.state == "whole", copies=False), threading.Event()
            loop.trainer.read_until(is_read)
            self._is_writing = True
            self._writing = threading.Thread(target=write, args=(state, is_read), name="save", daemon=True)
            self._writing.start()

        def write(state: StageState, is_read: threading.Event) -> None:
            failure = ""
            try:
                write_state(state, command.path, on_read=is_read.set)
            except (OSError, RavnestError) as error:
                failure = str(error)[:1000] or type(error).__name__
            finally:
                is_read.set()
            self._is_writing = False
            with contextlib.suppress(LinkError):  # the receiver may have ended
                self._report(StateSaved(loop.index, state.updates, failure, is_state=True))

        updates = loop.schedule.updates
        if not loop.at_update(updates if command.at < 0 else command.at, begin):
            failure = f"update {command.at} is past: the stage has made {updates} updates"
            self._report(StateSaved(loop.index, command.at, failure, is_state=True))

    def _make_loop(self, stage: Stage, config: StageConfig, limits: StageLimits, begin: StageState | None) -> Loop:
        settings, is_last_stage = config.settings, stage.index == stage.count - 1
        start = _initial_state(stage, config, begin)
        accumulator = GradientAccumulator(
            is_first_stage=stage.index == 0,
            is_last_stage=is_last_stage,
            clips=settings.optimizer.clip_norm is not None,
            borrowers=config.role.borrowers,
            squared_norm=squared_norm,
        )
        schedule = PipelineSchedule(
            config.rule,
            is_last_stage=is_last_stage,
            steps_need_permission=accumulator.needs_permission,
            first_update=start.updates,
        )
        trainer = Trainer(stage, _initial_weights(stage, config, start), settings, delay=config.rule.delay, start=start)
        check_batch = _batch_check(stage, limits)
        context = LoopContext(
            self._inbox, self._before, self._after, self._observer, self._codecs, check_batch,
            processor_share=self._processor_share,
        )  # fmt: skip
        return Loop(trainer, schedule, accumulator, config.role, context)


class _Observer:
    """Reports the progress of the loop; losses once per step, or at once if one is not finite."""

    def __init__(self, report: SendReport, links: tuple[StageLink | NullLink, ...], device: torch.device) -> None:
        self._report, self._links, self._device = report, links, device
        self._process = psutil.Process()
        self._losses: dict[int, tuple[float | None, ...]] = {}

    def loss(self, microbatch: int, values: list[float]) -> None:
        self._losses[microbatch] = finite = _finite(values)
        if None in finite:
            self._report_losses()

    def _report_losses(self) -> None:
        if self._losses:
            self._report(LossReport(self._losses))
            self._losses = {}

    def evaluation(self, number: int, batch: int, values: list[float]) -> None:
        self._report(EvaluationReport(number, batch, _finite(values)))

    def prediction(self, number: int, tokens: list[list[int]], scores: list[list[float]]) -> None:
        finite = tuple(_finite(row) for row in scores)
        self._report(PredictionReport(number, tuple(map(tuple, tokens)), finite))

    def updated(self, metrics: StageMetrics) -> None:
        metrics.sending = sum(link.depth for link in self._links)
        metrics.sent_bytes = sum(link.sent_bytes for link in self._links)
        metrics.received_bytes = sum(link.received_bytes for link in self._links)
        metrics.memory_bytes = self._process.memory_info().rss
        peak_bytes = peak_device_bytes(self._device) or max(peak_memory_bytes(), metrics.memory_bytes)
        metrics.peak_memory_bytes = max(peak_bytes, metrics.peak_memory_bytes)
        self._report_losses()
        snapshot = msgspec.structs.replace(metrics, staleness=dict(metrics.staleness))  # the loop changes the original
        self._report(StepReport(snapshot))


def failure_of(error: Exception, device: torch.device = CPU) -> StageFailed:
    """Return the report of an error that ended a stage on this device."""
    if is_out_of_memory(error):
        used_bytes = peak_device_bytes(device) or psutil.Process().memory_info().rss
        return StageFailed(
            f"out of memory on {device} ({device_name(device)}) with {format_bytes(used_bytes)} in use: "
            "the node offers less from now on",
            exhausted_bytes=used_bytes,
        )
    text = str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
    return StageFailed(text[:2000], is_consequence=isinstance(error, LinkClosed))


def _finite(values: list[float]) -> tuple[float | None, ...]:
    return tuple(v if math.isfinite(v) else None for v in values)


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process; 0 where the system does not report it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _batch_check(stage: Stage, limits: StageLimits) -> Callable[[int, tuple[int, ...]], None]:
    """Return a function that dry-runs each size of microbatches once, before it is computed."""
    checked: set[tuple[int, ...]] = {(limits.batch,)}

    def check(batch: int, sizes: tuple[int, ...]) -> None:
        if (batch, *sizes) not in checked:
            dry_run_batch(stage, batch, limits, sizes)
            if len(checked) < _MAX_CHECKED:
                checked.add((batch, *sizes))

    return check


def _initial_state(stage: Stage, config: StageConfig, begin: StageState | None) -> StageState:
    """Return the state to resume from. `config` has the number of updates: a state may come from another cluster."""
    if begin is None and config.state:
        begin = read_state(stage, config.state)
    return StageState(config.first_update, {} if begin is None else begin.tensors)


def _initial_weights(stage: Stage, config: StageConfig, start: StageState) -> dict[str, Tensor]:
    """Return the weights that `start` does not have: from a file, or initialised."""
    missing = owned(stage).keys() - start.weights.keys()
    if not missing:
        return {}
    if config.weights:
        return read_weights(stage, config.weights, missing)
    if stage.init is None:
        raise WeightsError(f"the stage was given no value for {min(missing)}")
    return initialise(stage, config.settings.seed)


def _save(loop: Loop, path: str) -> None:
    """Write the stage's own weights that training changes, complete or not at all."""
    tensors = loop.trainer.weights(frozen=False)
    with write_weights(path, [s for s in loop.trainer.stage.state if s.target in tensors]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
