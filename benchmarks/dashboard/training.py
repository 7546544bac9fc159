"""Measures how much a flood of requests to the dashboard slows a local run.

The workers compute on one core, the coordinator and the flood share the others: what is measured is what the flood
takes from the run by way of the coordinator, not what any program takes from a processor.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.control.child import Child
from benchmarks.local_runs.job import job
from ravnest.run.control import RunControl
from ravnest.run.metrics import Progress, ProgressView


class _View(ProgressView):
    """Counts the steps."""

    def __init__(self) -> None:
        self.link, self.steps = "", 0
        self.is_training, self.control = threading.Event(), threading.Event()
        self._control: RunControl | None = None

    def started(self, control: RunControl) -> None:
        self._control = control

    def dashboard(self, link: str) -> None:
        self.link = link

    def update(self, progress: Progress) -> None:
        self.steps = progress.step
        if progress.step >= 5:
            self.is_training.set()

    def stop(self) -> None:
        assert self._control is not None
        self._control.stop("the measurement is over")


def measure_flood(seconds: float, turns: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Train two nodes with and without a flood, in turns; returns rates and the answers to the flood."""
    usable = sorted(os.sched_getaffinity(0))
    view = _View()
    with tempfile.TemporaryDirectory() as folder:
        os.sched_setaffinity(0, set(usable[1:]) or set(usable))
        try:
            return _measure(Path(folder), view, usable, seconds, turns, log)
        finally:
            os.sched_setaffinity(0, set(usable))


def _measure(
    folder: Path, view: _View, usable: list[int], seconds: float, turns: int, log: Callable[[str], None]
) -> dict[str, Any]:
    os.sched_setaffinity(0, set(usable))  # the option below checks it
    training = threading.Thread(
        target=job.train,
        kwargs={"show": view, "on": "local:2", "cores": f"{usable[0]},{usable[0]}", "run_dir": folder / "run",
                "verify": False},
    )  # fmt: skip
    training.start()
    rates: dict[str, list[float]] = {"quiet": [], "flood": []}
    answers: dict[str, int] = {}
    with Child("benchmarks.dashboard.viewers") as client:
        try:
            if not view.is_training.wait(180):
                raise RuntimeError("the run has not started")
            _pin_threads(set(usable[1:]) or set(usable))
            for turn in range(2 * turns):
                kind = ("quiet", "flood")[turn % 2]
                if kind == "flood":
                    client.request("flood", link=view.link)
                rates[kind].append(_rate(view, seconds))
                if kind == "flood":
                    for status, count in client.request("stop")["statuses"].items():
                        answers[status] = answers.get(status, 0) + count
                log(f"{kind}: {rates[kind][-1]:.2f} steps/s")
        finally:
            view.stop()
            training.join(120)
    return {"rates": rates, "answers": answers, "seconds": seconds * turns}


def _pin_threads(cores: set[int]) -> None:
    """Keep all threads of this process, and the processes that it starts from now on, off the workers' core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def _rate(view: _View, seconds: float) -> float:
    """Steps per second, from one step to another, so that no part of a step is lost."""
    first, began_s = _next_step(view)
    last, ended_s = first, began_s
    while ended_s < began_s + seconds:
        last, ended_s = _next_step(view)
    return (last - first) / (ended_s - began_s)


def _next_step(view: _View) -> tuple[int, float]:
    before, until_s = view.steps, time.monotonic() + 60
    while view.steps == before:
        if time.monotonic() > until_s:
            raise RuntimeError("the run stands still")
        time.sleep(0.002)
    return view.steps, time.monotonic()
