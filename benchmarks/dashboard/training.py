"""Measures how much a flood of requests to the dashboard slows a local run.

The workers compute on one core, the coordinator and the flood share the others: what is measured is what the flood
takes from the run by way of the coordinator, not what any program takes from a processor.

The speed of a shared machine varies by several percent from one minute to the next. Turns are therefore short, each
turn with a flood has one without beside it, the order changes from pair to pair, and the result is a median of ratios.

    share           median over pairs of (steps/s in the flood / steps/s without)
    standard error  1.25 * standard deviation of the ratios / sqrt(pairs)

Beside it, the same from processor time, on which other programs have little influence. Where they keep the workers'
core busy, waiting of the workers is not seen in it:

    share           (1 - idle share of the workers' core) / (processor seconds of the workers per step), flood / quiet
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.control.child import Child
from benchmarks.local_runs.job import job
from ravnest.run.control import RunControl
from ravnest.run.metrics import Progress, ProgressView

_WARM_UP_STEPS = 20


class _View(ProgressView):
    """Counts the steps, with the time of the last one."""

    def __init__(self) -> None:
        self.link = ""
        self.last = 0, 0.0
        self.is_training = threading.Event()
        self._control: RunControl | None = None

    def started(self, control: RunControl) -> None:
        self._control = control

    def dashboard(self, link: str) -> None:
        self.link = link

    def update(self, progress: Progress) -> None:
        if progress.step != self.last[0]:
            self.last = progress.step, time.monotonic()
        if progress.step >= _WARM_UP_STEPS:
            self.is_training.set()

    def stop(self) -> None:
        assert self._control is not None
        self._control.stop("the measurement is over")


@dataclass
class _Turns:
    """Sums over turns of one kind, and the rate of each turn."""

    rates: list[float] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    idle_s: float = 0.0
    worker_s: float = 0.0
    own_s: float = 0.0

    @property
    def work(self) -> float:
        """Steps that the workers' core makes in a second, if it computes whenever it is not idle."""
        return (1 - self.idle_s / self.seconds) / (self.worker_s / self.steps)


@dataclass(frozen=True)
class Flood:
    """The turns of each kind, and the answers to the flood by status."""

    quiet: _Turns
    flood: _Turns
    answers: Counter[str]

    @property
    def ratios(self) -> list[float]:
        return [flood / quiet for quiet, flood in zip(self.quiet.rates, self.flood.rates, strict=True)]

    @property
    def share(self) -> float:
        return statistics.median(self.ratios)

    @property
    def standard_error(self) -> float:
        return 1.25 * statistics.stdev(self.ratios) / math.sqrt(len(self.ratios))

    @property
    def share_of_work(self) -> float:
        return self.flood.work / self.quiet.work


def measure_flood(seconds: float, pairs: int, log: Callable[[str], None]) -> Flood:
    """Train two nodes with and without a flood, `pairs` times `seconds` each."""
    usable = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _measure(Path(folder), usable, seconds, pairs, log)
        finally:
            os.sched_setaffinity(0, set(usable))


def _measure(folder: Path, usable: Sequence[int], seconds: float, pairs: int, log: Callable[[str], None]) -> Flood:
    view, result = _View(), Flood(_Turns(), _Turns(), Counter())
    training = threading.Thread(
        target=job.train,
        kwargs={"show": view, "on": "local:2", "cores": f"{usable[0]},{usable[0]}", "run_dir": folder / "run",
                "verify": False},
    )  # fmt: skip
    training.start()
    try:
        if not view.is_training.wait(180):
            raise RuntimeError("the run has not started")
        workers = [worker for server in psutil.Process().children() for worker in server.children()]
        _pin_threads(set(usable[1:]) or set(usable))
        with Child("benchmarks.dashboard.viewers") as client:
            for pair in range(pairs):
                for kind in ("quiet", "flood") if pair % 2 else ("flood", "quiet"):
                    if kind == "flood":
                        client.request("flood", link=view.link)
                    _add_turn(getattr(result, kind), view, workers, usable[0], seconds)
                    if kind == "flood":
                        result.answers.update(client.request("stop")["statuses"])
                log(f"pair {pair + 1} of {pairs}: {result.ratios[-1]:.3f}")
    finally:
        view.stop()
        training.join(120)
    return result


def _pin_threads(cores: set[int]) -> None:
    """Keep all threads of this process, and the processes that it starts from now on, off the workers' core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def _add_turn(turns: _Turns, view: _View, workers: Sequence[psutil.Process], core: int, seconds: float) -> None:
    """Measure from one step to another, so that no part of a step is lost."""
    (first, began_s), before = _next_step(view), _processor_times(workers, core)
    last, ended_s = first, began_s
    while ended_s < began_s + seconds:
        last, ended_s = _next_step(view)
    idle_s, worker_s, own_s = (b - a for a, b in zip(before, _processor_times(workers, core), strict=True))
    turns.rates.append((last - first) / (ended_s - began_s))
    turns.steps += last - first
    turns.seconds += ended_s - began_s
    turns.idle_s += idle_s
    turns.worker_s += worker_s
    turns.own_s += own_s


def _processor_times(workers: Sequence[psutil.Process], core: int) -> tuple[float, float, float]:
    """Seconds in which the core was idle, and processor seconds of the workers and of this process."""
    times = [worker.cpu_times() for worker in workers]
    return psutil.cpu_times(percpu=True)[core].idle, sum(t.user + t.system for t in times), time.process_time()


def _next_step(view: _View) -> tuple[int, float]:
    before, until_s = view.last, time.monotonic() + 60
    while view.last == before:
        if time.monotonic() > until_s:
            raise RuntimeError("the run stands still")
        time.sleep(0.005)
    return view.last
