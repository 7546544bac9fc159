"""The worker process: receives a stage as data, computes it, holds the links to its neighbours.

    python -m ravnest.node.worker --control 5 --before 6 --after 7

The numbers are open sockets that the parent hands down. The worker leaves when it is told to, when a link breaks,
and when its parent is gone; nothing else ends it but a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from ..core.errors import LinkClosed, LinkError, RavnestError
from ..core.messages import Backward, Data, Forward
from ..core.metrics import StageMetrics
from ..core.orders import EndAfter, Evaluated, Failed, Lost, Ready, Save, Saved, Stop, Updated
from ..core.schedule import Schedule
from ..graph import Limits, Stage, initialise, load, read_weights, write_weights
from ..graph.rehearse import rehearse_batch
from ..net.link import LinkConfig
from ..net.pump import Pump
from ..net.unix import unix_link
from ..runtime.freight import Freight, Freights
from ..runtime.loop import Inbox, Loop, Wiring
from ..runtime.trainer import Trainer, squares
from ..runtime.windows import Windows
from .allocator import keep_freed_memory
from .orders import Assign, Orders
from .ports import Port, Wall

__all__ = ["main"]

_ASSIGN_S = 300.0
_log = logging.getLogger("ravnest.worker")


class _Observer:
    """Tells the parent what the loop did."""

    def __init__(self, control: Pump, patience_s: float) -> None:
        self._control, self._patience_s = control, patience_s
        self.ports: tuple[Port | Wall, ...] = ()
        self._process = psutil.Process()

    def tell(self, report: Any) -> None:
        self._control.put(report, deadline_s=self._patience_s)

    def loss(self, microbatch: int, values: list[float]) -> None:
        self.tell(Lost(microbatch, _finite(values)))

    def evaluation(self, number: int, batch: int, values: list[float]) -> None:
        self.tell(Evaluated(number, batch, _finite(values)))

    def updated(self, metrics: StageMetrics) -> None:
        metrics.sending = sum(port.depth for port in self.ports)
        metrics.sent_bytes = sum(port.sent_bytes for port in self.ports)
        metrics.received_bytes = sum(port.received_bytes for port in self.ports)
        metrics.memory_bytes = self._process.memory_info().rss
        metrics.peak_memory_bytes = max(peak_memory_bytes(), metrics.memory_bytes, metrics.peak_memory_bytes)
        self.tell(Updated(metrics))


def _finite(values: list[float]) -> tuple[float | None, ...]:
    return tuple(v if math.isfinite(v) else None for v in values)


def peak_memory_bytes() -> int:
    """The most memory this process ever had resident, where the system tells."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def run(control_fd: int, before_fd: int, after_fd: int | None) -> None:
    """Be a worker until told to stop."""
    inbox = Inbox()
    link = unix_link(socket.socket(fileno=control_fd), LinkConfig(headers=Orders), peer="parent")
    file: list[bytearray] = []

    def place(header: Any, lengths: tuple[int, ...]) -> list[memoryview]:
        file[:] = [bytearray(n) for n in lengths if n <= Limits().text_bytes]
        return [memoryview(b) for b in file]

    assign = link.receive(place, deadline_s=_ASSIGN_S)
    assert isinstance(assign, Assign)
    torch.set_num_threads(assign.threads)
    if assign.core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {assign.core})
    limits = Limits(batch=assign.max_batch)
    stage = load(bytes(file[0]), limits)
    control = Pump(link, place, lambda header, _: inbox.call(_command(header)), _breaks(inbox, "the parent"))
    observer = _Observer(control, assign.settings.patience_s)
    ports = _ports(stage, assign, inbox, before_fd, after_fd)
    observer.ports = ports.before, ports.after
    admit = _admission(stage, limits)
    loop = _loop(stage, assign, Wiring(inbox, ports.before, ports.after, observer, ports.freights, admit))
    for part in (control, *observer.ports):
        part.start()
    observer.tell(Ready(stage.index))
    _log.info("stage %d of %d is ready: %d ops", stage.index, stage.count, len(stage.ops))
    try:
        loop.run()
    except Exception as error:  # the supervisor of this stage: the parent must know why, whatever it was
        text = str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(LinkError):  # the parent may be what is gone
            observer.tell(Failed(text[:2000], is_consequence=isinstance(error, LinkClosed)))
        control.close(flush_s=2.0)
        raise
    for port in observer.ports:
        port.close(flush_s=5.0)
    control.close(flush_s=5.0)


def _admission(stage: Stage, limits: Limits) -> Callable[[int], None]:
    """Rehearses each microbatch size once, before it is run."""
    admitted = {limits.batch}

    def admit(batch: int) -> None:
        if batch not in admitted:
            rehearse_batch(stage, batch, limits)
            admitted.add(batch)

    return admit


class _Ports(NamedTuple):
    before: Port
    after: Port | Wall
    freights: Freights


def _ports(stage: Stage, assign: Assign, inbox: Inbox, before_fd: int, after_fd: int | None) -> _Ports:
    """The links to the neighbours, each knowing what may come from its side."""
    freights = Freights.of(stage, assign.settings.compression, assign.max_batch)

    def port(fd: int, expected: dict[type, Freight], index: int) -> Port:
        peer = f"stage {index}" if index >= 0 else "the feeder"
        link = unix_link(socket.socket(fileno=fd), LinkConfig(headers=Data), peer=peer)
        on_error = _breaks(inbox, peer)
        return Port(link, inbox, expected, assign.role.tied, on_error, assign.settings.patience_s)

    before = port(before_fd, {Forward: freights.inputs}, stage.index - 1)
    after = Wall() if after_fd is None else port(after_fd, {Backward: freights.gradients_in}, stage.index + 1)
    return _Ports(before, after, freights)


def _loop(stage: Stage, assign: Assign, wiring: Wiring) -> Loop:
    settings, is_leaf = assign.settings, stage.index == stage.count - 1
    state = read_weights(stage, assign.weights) if assign.weights else initialise(stage, settings.seed)
    windows = Windows(
        is_root=stage.index == 0,
        is_leaf=is_leaf,
        clips=settings.optimizer.clip_norm is not None,
        borrowers=assign.role.borrowers,
        squares=squares,
    )
    schedule = Schedule(assign.rule, is_leaf=is_leaf, steps_need_permission=windows.needs_permission)
    return Loop(Trainer(stage, state, settings, delay=assign.rule.delay), schedule, windows, assign.role, wiring)


def _breaks(inbox: Inbox, peer: str) -> Any:
    """A handler that makes the loop fail with the reason why a link broke."""

    def on_error(error: Exception) -> None:
        def fail(loop: Loop) -> None:
            kind = LinkClosed if isinstance(error, LinkClosed) else LinkError
            raise kind(f"the link to {peer} broke: {error}")

        inbox.call(fail)

    return on_error


def _command(order: Any) -> Any:
    def carry_out(loop: Loop) -> None:
        match order:
            case EndAfter(updates=updates):
                loop.end_after(updates)
            case Save(path=path):
                save(loop, path)
            case Stop():
                loop.stop()

    return carry_out


def save(loop: Loop, path: str) -> None:
    """Write the stage's own tensors, complete or not at all."""
    tensors = loop.trainer.weights()
    with write_weights(path, [s for s in loop.trainer.stage.state if s.target in tensors]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    observer = loop.observer
    assert isinstance(observer, _Observer)
    observer.tell(Saved(loop.index))


def _watch_parent(parent: int) -> None:
    """End with the parent even in the middle of a long computation."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--before", type=int, required=True)
    parser.add_argument("--after", type=int)
    options = parser.parse_args()
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    try:
        run(options.control, options.before, options.after)
    except RavnestError as error:
        _log.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
