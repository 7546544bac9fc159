"""Fixtures of all tests. Every test process computes with one thread, for speed and for the same bits each time."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

from ravnest.cli.main import main
from ravnest.graph import Costs, Program, timing
from ravnest.graph.timing import OpSeconds
from ravnest.profiling import overhead, speed
from ravnest.profiling.overhead import StageOverhead
from ravnest.run import plan as job_plan
from tests.accelerator import devices
from tests.accelerator.backend import register
from tests.accelerator.devices import TestAccelerator

torch.set_num_threads(1)
register()  # before the first backward pass, which starts autograd's threads; it is present in some tests only
devices.accelerator.disappear()
gc.set_threshold(100_000, 50, 50)  # tracing makes many objects and few cycles: 8 % of its time
settings.register_profile("fixed", derandomize=True)  # the same examples every time
settings.register_profile("random")  # `make test ARGS=--hypothesis-profile=random` searches for new ones
settings.load_profile("fixed")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background


def pytest_configure(config: pytest.Config) -> None:
    """Agents of a user share this PC through a directory: not with those of other test processes."""
    directory = tempfile.mkdtemp(prefix="ravnest-test-")
    os.environ["XDG_RUNTIME_DIR"] = directory
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no test process is left with one at the end."""
    items.sort(key=lambda item: -_timeout_s(item))


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is not None and marker.args[0] > 100:
        return float(marker.args[0])
    return 1.0 if item.get_closest_marker("slow") is not None else 0.0


GFLOPS = 10.0  # of the machine that operations are timed on


def _seconds_by_flops(program: Program, costs: Costs) -> list[OpSeconds]:
    return [OpSeconds(op.forward_flops / GFLOPS / 1e9, op.backward_flops / GFLOPS / 1e9) for op in costs.ops]


@pytest.fixture
def fixed_op_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operation times that follow from the work alone, so that no plan depends on this machine's speed."""
    monkeypatch.setattr(job_plan, "time_ops", _seconds_by_flops)


@pytest.fixture
def fixed_times(fixed_op_times: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fixed_op_times`, with a fixed overhead: local runs with the same options have the same cuts."""
    fixed = StageOverhead(1e-10, 5e-10, 1e-10)
    monkeypatch.setattr(job_plan, "measure_overhead", lambda *args, **options: fixed)


@pytest.fixture
def processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of speed read the processor time of this process: other processes do not change it."""
    clock = SimpleNamespace(
        perf_counter=time.process_time, process_time=time.process_time, thread_time=time.thread_time
    )
    for module in (timing, overhead, speed):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `ravnest` in this process with the given arguments; returns its exit code, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ravnest", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            main()
        printed = capsys.readouterr()
        return int(exit_.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def accelerator() -> Iterator[TestAccelerator]:
    """The test accelerator, present in this process for one test; its devices are `testacc:0`, `testacc:1`."""
    devices.accelerator.appear(2)
    yield devices.accelerator
    devices.accelerator.disappear()
