"""Compares predicted and measured samples/s and memory of runs on nodes that CPU quotas make uneven.

Nodes are processes of this machine, each in a control group with a share of a core. Each share's speed is measured
first, under its quota, with `ravnest.profiling.speed`, as a volunteer's PC would be. The planner predicts with these
speeds. Then the run: workers are moved into their groups at their first update.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import ravnest
from benchmarks.pipeline.baselines import CONFIG, LR, SEQUENCES, batch
from benchmarks.report import Report, arguments
from ravnest.config import TrainingConfig
from ravnest.examples.gpt import GPT, next_token_loss
from ravnest.graph import trace
from ravnest.profiling.speed import Workload, measure_speed
from ravnest.run.job import Job, Run
from ravnest.run.metrics import Progress, ProgressView

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000  # short, so that the pipeline is slow rather than paused; shorter periods cost throughput
_WHOLE = 2.0  # a share without effect
_WARM_UP = 6  # updates that do not count: the first ones run without a quota


@dataclass(frozen=True)
class Case:
    """Nodes with these shares of their cores and, optionally, memory limits."""

    name: str
    shares: tuple[float, ...]
    cores: str
    memory: str | None = None

    @property
    def accumulate(self) -> int:
        return len(self.shares) + 1


# Shares of one core add up to less than 1: the process that feeds the pipeline needs some time too.
CASES = (
    Case("a fast node and a slow one", (0.9, 0.5), "0,1"),
    Case("three unlike nodes", (0.5, 0.4, 0.9), "0,0,1"),
    Case("little memory on the fastest", (0.4, 0.5, 0.9), "0,0,1", "2GB,2GB,450MB"),
)


def add_prediction(report: Report, *, quick: bool) -> None:
    """Add a row for each case; the worst is checked against the targets."""
    reason = CpuQuotas.missing()
    if reason:
        report.rows.append({"prediction": f"not measured: {reason}"})
        return
    cases = CASES[:1] if quick else CASES
    speeds = measure_speeds(sorted({share for case in cases for share in case.shares}), rounds=3 if quick else 5)
    turns = [turn(cases, speeds, steps=16 if quick else 20) for _ in range(1 if quick else 3)]
    rate_errors, memory_errors = [], []
    for case in cases:
        row = {name: statistics.median(t[case][name] for t in turns) for name in turns[0][case]}
        report.rows.append({"prediction": case.name, "shares of cores": str(case.shares), **row})
        rate_errors.append(abs(row["ratio"] - 1))
        memory_errors.append(abs(row["memory ratio"] - 1))
    report.check("worst |predicted / measured - 1|, samples/s", max(rate_errors), "<= 0.15")
    report.check("worst |predicted / measured - 1|, memory", max(memory_errors), "<= 0.15")


def turn(cases: Sequence[Case], speeds: Mapping[float, float], steps: int) -> dict[Case, dict[str, float]]:
    """Measure every case once; medians over turns remove the effect of other load."""
    results = {}
    for case in cases:
        results[case] = measure(case, [speeds[share] for share in case.shares], steps)
        sys.stderr.write(f"{case.name}: {results[case]}\n")
    return results


def measure_speeds(shares: Sequence[float], rounds: int) -> dict[float, float]:
    """The speed of a node with each share of a core, relative to a whole core: medians over rounds."""
    command = [sys.executable, "-m", "benchmarks.planner.prediction", "--probe"]
    with (
        CpuQuotas((*shares, _WHOLE)) as quotas,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe,
    ):
        assert probe.stdin is not None
        assert probe.stdout is not None
        ratios: dict[float, list[float]] = {share: [] for share in shares}
        try:
            for _ in range(rounds):
                gflops = []
                for index in range(len(shares) + 1):
                    quotas.add({index: probe.pid})
                    probe.stdin.write("again\n")
                    probe.stdin.flush()
                    gflops.append(float(probe.stdout.readline()))
                for share, slow in zip(shares, gflops[:-1], strict=True):
                    ratios[share].append(slow / gflops[-1])
        finally:
            probe.kill()
    speeds = {share: statistics.median(found) for share, found in ratios.items()}
    sys.stderr.write(f"speeds under a quota: {speeds}\n")
    return speeds


def run_probe() -> None:
    """Measure this process's speed at our program for each line of input."""
    os.sched_setaffinity(0, {0})
    work = Workload(trace(lambda: GPT(CONFIG), next_token_loss, batch(1)), SEQUENCES)
    for _ in sys.stdin:
        print(measure_speed(work, threads=1, budget_s=1.5).gflops, flush=True)


def measure(case: Case, speeds: Sequence[float], steps: int) -> dict[str, float]:
    """Train once; returns the predicted and the measured values."""
    data = [batch(case.accumulate, seed) for seed in range(4)]
    job = Job(lambda: GPT(CONFIG), next_token_loss, data, optimizer=ravnest.AdamW(LR))
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder, CpuQuotas(case.shares) as quotas:
        config = TrainingConfig(
            steps=steps, on=f"local:{len(case.shares)}", cores=case.cores, memory=case.memory,
            speeds=",".join(map(str, speeds)), run_dir=Path(folder) / "run",
        )  # fmt: skip
        run = job.train(config, show=_AddWorkers(quotas))
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    early, late = lines[_WARM_UP - 1], lines[-2]  # after the last step the pipeline drains
    samples = (late["step"] - early["step"]) * case.accumulate * SEQUENCES
    measured = samples / (late["seconds"] - early["seconds"])
    return {
        "predicted samples/s": run.plan.samples_per_s,
        "measured samples/s": measured,
        "ratio": run.plan.samples_per_s / measured,
        **_memory(run),
    }


def _memory(run: Run) -> dict[str, float]:
    """Memory of the stage with the largest error."""
    pairs = [(run.plan.plans[i].memory_bytes / 1e6, m.peak_memory_bytes / 1e6) for i, m in run.stages.items()]
    predicted, measured = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return {"predicted MB": predicted, "measured MB": measured, "memory ratio": predicted / measured}


class CpuQuotas:
    """A context with control groups, each with a share of a core."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._folders = [self._top() / f"ravnest-{os.getpid()}-{i}" for i in range(len(shares))]

    @staticmethod
    def _top() -> Path:
        """The folder of the cpu controller: version 1 has one of its own."""
        return _ROOT / "cpu" if (_ROOT / "cpu").is_dir() else _ROOT

    @classmethod
    def missing(cls) -> str:
        """Why quotas cannot be set on this machine; empty if they can."""
        try:
            with cls((0.5,)):
                return ""
        except OSError as error:
            return f"control groups cannot be created on this machine: {error}"

    def __enter__(self) -> CpuQuotas:
        try:
            for folder, share in zip(self._folders, self._shares, strict=True):
                folder.mkdir()
                quota = round(_PERIOD_US * share)
                if (folder / "cpu.cfs_quota_us").exists():
                    (folder / "cpu.cfs_period_us").write_text(f"{_PERIOD_US}")
                    (folder / "cpu.cfs_quota_us").write_text(f"{quota}")
                else:
                    (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        except OSError:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def add(self, pids: Mapping[int, int]) -> None:
        """Move processes, by index of their group, into the groups."""
        for index, pid in pids.items():
            (self._folders[index] / "cgroup.procs").write_text(f"{pid}")

    def _remove(self) -> None:
        until = time.monotonic() + 5
        for folder in self._folders:
            while folder.exists() and time.monotonic() < until:
                with contextlib.suppress(OSError):  # busy for a moment after its processes have exited
                    folder.rmdir()
                    break
                time.sleep(0.05)


class _AddWorkers(ProgressView):
    """Moves the workers into their groups at the first update, after the start-up."""

    def __init__(self, quotas: CpuQuotas) -> None:
        self._quotas, self._is_done = quotas, False

    def update(self, progress: Progress) -> None:
        if not self._is_done:
            self._is_done = True
            self._quotas.add(dict(enumerate(_workers())))


def _workers() -> Iterator[int]:
    """Pids of the workers in the order of their stages, which is the order of their start."""
    found: list[Any] = [worker for server in psutil.Process().children() for worker in server.children()]
    for process in sorted(found, key=lambda p: p.create_time()):
        if any(word.startswith("ravnest.worker.") for word in process.cmdline()):
            yield process.pid


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--probe", action="store_true", help="measure the speed for each line of input (used by the benchmark itself)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.probe:
        run_probe()
        return
    report = Report("prediction: predicted and measured samples/s and memory, on uneven nodes")
    add_prediction(report, quick=options.quick)
    report.finish(options.json)


if __name__ == "__main__":
    main()
