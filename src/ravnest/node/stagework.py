"""One stage at work between its two links, from its file to its end; whoever started it hears what it did.

The same for a worker of one machine and for one that serves a fleet: they differ in where stages and links come from.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec
import psutil
from torch import Tensor

from ..core.errors import LinkClosed, LinkError, RavnestError
from ..core.messages import Backward, Forward
from ..core.metrics import StageMetrics
from ..core.orders import EndAfter, Evaluated, Failed, Lost, Order, Ready, Reports, Save, Saved, Stop, Updated
from ..core.schedule import Schedule
from ..graph import Limits, Stage, initialise, read_weights, write_weights
from ..graph.rehearse import rehearse_batch
from ..net.deadline import Deadline
from ..net.link import Link
from ..net.pace import Pace
from ..net.pump import OnError
from ..runtime.freight import Freight, Freights
from ..runtime.loop import Inbox, Loop, Wiring
from ..runtime.state import StageState, owned
from ..runtime.statefile import read_state, write_state
from ..runtime.trainer import Trainer, squares
from ..runtime.windows import Windows
from .orders import Assign
from .ports import Feed, Port, Wall

__all__ = ["StageWork", "Tell", "failure_of"]

Tell: TypeAlias = Callable[[Reports], None]

_YIELD_S = 1.0


class StageWork:
    """Owns the links, once it is made. `run` trains in the calling thread; orders come from any."""

    def __init__(
        self,
        stage: Stage,
        assign: Assign,
        limits: Limits,
        before: Link,
        after: Link | None,
        tell: Tell,
        pace: Pace | None = None,
        *,
        begin: StageState | None = None,
        is_fed: bool = False,
    ) -> None:
        """`begin` is a state in memory to go on from, which is taken over; else the assignment says what there is.

        `is_fed`: before this stage is a coordinator, without which it trains on as long as it has something to train.
        """
        self._tell, self._inbox = tell, Inbox()
        self._writing: threading.Thread | None = None
        self._is_writing = False
        self._freights = Freights.of(stage, assign.settings.compression, assign.max_batch)

        def port(link: Link, expected: dict[type, Freight], *, is_feed: bool = False) -> Port:
            breaks = self._feed_breaks if is_feed else self.breaks(f"the link to {link.peer}")
            kind = Feed if is_feed else Port
            return kind(link, self._inbox, expected, assign.role.tied, breaks, assign.settings.patience_s, pace)

        self._before = port(before, {Forward: self._freights.inputs}, is_feed=is_fed)
        self._after = Wall() if after is None else port(after, {Backward: self._freights.gradients_in})
        self._observer = _Observer(tell, (self._before, self._after))
        try:
            self._loop = self._make_loop(stage, assign, limits, begin)
        except BaseException:
            self.close(flush_s=0.0)
            raise

    def run(self) -> None:
        """Train until an order says stop; raises what ends the stage."""
        self._before.start()
        self._after.start()
        self._tell(Ready(self._loop.index))
        self._loop.run()

    def order(self, order: Order) -> None:
        """Have it carried out between two actions."""

        def carry_out(loop: Loop) -> None:
            match order:
                case EndAfter(updates=updates):
                    loop.end_after(updates)
                case Save(path=path, state=""):
                    _save(loop, path)
                    self._tell(Saved(loop.index, loop.schedule.updates))
                case Save():
                    self._save_state(loop, order)
                case Stop():
                    loop.stop()

        self._inbox.call(carry_out)

    def state(self) -> StageState:
        """All that was learnt, when the stage does not run any more."""
        return self._loop.trainer.state(whole=False, copies=False)

    def ask(self, command: Callable[[Loop], None]) -> None:
        """Have the loop do something between two actions."""
        self._inbox.call(command)

    def wait(self, timeout_s: float, /) -> bool:
        """Wait until nothing is to be sent over the stage's own links, but not for long: who else sends goes then."""
        until = Deadline(min(timeout_s, _YIELD_S))
        for port in (self._before, self._after):
            port.drain(until.left_s())
        return True

    def breaks(self, what: str) -> OnError:
        """A handler that makes the stage fail with the reason why something broke."""

        def on_error(error: Exception) -> None:
            def fail(loop: Loop) -> None:
                kind = LinkClosed if isinstance(error, LinkClosed) else LinkError
                raise kind(f"{what} broke: {error}")

            self._inbox.call(fail)

        return on_error

    def _feed_breaks(self, error: Exception) -> None:
        gone = LinkClosed(f"the coordinator is gone, and all that was to be trained is trained: {error}")
        self._inbox.call(lambda loop: loop.end_with(gone))

    def close(self, *, flush_s: float) -> None:
        """End the links, both at once."""
        closing = threading.Thread(target=self._after.close, args=(flush_s,), daemon=True)
        closing.start()
        self._before.close(flush_s)
        closing.join()
        if self._writing is not None:
            self._writing.join(flush_s)

    def _save_state(self, loop: Loop, order: Save) -> None:
        """Copy what was learnt at that update, and write it in a thread of its own: training goes on."""

        def begin(loop: Loop) -> None:
            updates = loop.schedule.updates
            if self._is_writing:  # one copy of all that was learnt takes memory enough
                self._tell(Saved(loop.index, updates, "the state before is still being written", is_state=True))
                return
            state = loop.trainer.state(whole=order.state == "whole")
            self._is_writing = True
            self._writing = threading.Thread(target=write, args=(state,), name="save", daemon=True)
            self._writing.start()

        def write(state: StageState) -> None:
            failure = ""
            try:
                write_state(state, order.path)
            except (OSError, RavnestError) as error:
                failure = str(error)[:1000] or type(error).__name__
            self._is_writing = False
            with contextlib.suppress(LinkError):  # who asked may be gone
                self._tell(Saved(loop.index, state.updates, failure, is_state=True))

        updates = loop.schedule.updates
        if not loop.at_update(updates if order.at < 0 else order.at, begin):
            failure = f"update {order.at} is past: there have been {updates}"
            self._tell(Saved(loop.index, order.at, failure, is_state=True))

    def _make_loop(self, stage: Stage, assign: Assign, limits: Limits, begin: StageState | None) -> Loop:
        settings, is_leaf = assign.settings, stage.index == stage.count - 1
        start = _start(stage, assign, begin)
        windows = Windows(
            is_root=stage.index == 0,
            is_leaf=is_leaf,
            clips=settings.optimizer.clip_norm is not None,
            borrowers=assign.role.borrowers,
            squares=squares,
        )
        schedule = Schedule(
            assign.rule,
            is_leaf=is_leaf,
            steps_need_permission=windows.needs_permission,
            first_update=start.updates,
        )
        trainer = Trainer(stage, _first_weights(stage, assign, start), settings, delay=assign.rule.delay, start=start)
        admit = _admission(stage, limits)
        wiring = Wiring(self._inbox, self._before, self._after, self._observer, self._freights, admit)
        return Loop(trainer, schedule, windows, assign.role, wiring)


class _Observer:
    """Tells what the loop did; of losses, those of a window together, unless one is not finite."""

    def __init__(self, tell: Tell, ports: tuple[Port | Wall, ...]) -> None:
        self._tell, self._ports = tell, ports
        self._process = psutil.Process()
        self._losses: dict[int, tuple[float | None, ...]] = {}

    def loss(self, microbatch: int, values: list[float]) -> None:
        self._losses[microbatch] = told = _finite(values)
        if None in told:
            self._tell_losses()

    def _tell_losses(self) -> None:
        if self._losses:
            self._tell(Lost(self._losses))
            self._losses = {}

    def evaluation(self, number: int, batch: int, values: list[float]) -> None:
        self._tell(Evaluated(number, batch, _finite(values)))

    def updated(self, metrics: StageMetrics) -> None:
        metrics.sending = sum(port.depth for port in self._ports)
        metrics.sent_bytes = sum(port.sent_bytes for port in self._ports)
        metrics.received_bytes = sum(port.received_bytes for port in self._ports)
        metrics.memory_bytes = self._process.memory_info().rss
        metrics.peak_memory_bytes = max(peak_memory_bytes(), metrics.memory_bytes, metrics.peak_memory_bytes)
        self._tell_losses()
        told = msgspec.structs.replace(metrics, staleness=dict(metrics.staleness))  # it goes on changing, this waits
        self._tell(Updated(told))


def failure_of(error: Exception) -> Failed:
    """Why a stage ended, for those who must know."""
    text = str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
    return Failed(text[:2000], is_consequence=isinstance(error, LinkClosed))


def _finite(values: list[float]) -> tuple[float | None, ...]:
    return tuple(v if math.isfinite(v) else None for v in values)


def peak_memory_bytes() -> int:
    """The most memory this process ever had resident, where the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _admission(stage: Stage, limits: Limits) -> Callable[[int], None]:
    """Rehearses each microbatch size once, before it is run."""
    admitted = {limits.batch}

    def admit(batch: int) -> None:
        if batch not in admitted:
            rehearse_batch(stage, batch, limits)
            admitted.add(batch)

    return admit


def _start(stage: Stage, assign: Assign, begin: StageState | None) -> StageState:
    """What there is to go on from. The assignment says at which update: a state may come from another cluster."""
    if begin is None and assign.state:
        begin = read_state(stage, assign.state)
    return StageState(assign.begin, {} if begin is None else begin.tensors)


def _first_weights(stage: Stage, assign: Assign, start: StageState) -> dict[str, Tensor]:
    """As at the beginning, if anything that the stage owns has not been learnt."""
    if owned(stage).keys() <= start.weights.keys():
        return {}
    return read_weights(stage, assign.weights) if assign.weights else initialise(stage, assign.settings.seed)


def _save(loop: Loop, path: str) -> None:
    """Write the stage's own tensors, complete or not at all."""
    tensors = loop.trainer.weights()
    with write_weights(path, [s for s in loop.trainer.stage.state if s.target in tensors]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
