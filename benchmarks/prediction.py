"""What a plan predicts against what its run does: samples/s and memory, on nodes that a quota makes uneven.

Nodes are processes of this machine, each with a control group that gives it a share of a core. As a lender would, each
node measures its speed first, under its quota, with `profile.speed`. The plan is told of these speeds and predicts.
Then the run: workers are put into their groups as soon as they train.
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
from benchmarks.report import Report, arguments
from benchmarks.rivals import CONFIG, LR, SEQUENCES, batch
from ravnest.api import Job, Run, Training
from ravnest.examples.gpt import GPT, next_token_loss
from ravnest.graph import trace
from ravnest.profile.mix import Workload
from ravnest.profile.speed import measure_speed
from ravnest.progress import Progress, Show

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000  # short, so that the pipe sees slowness and not pauses; shorter ones cost work per second
_WHOLE = 2.0  # a share that is no limit
_WARM_UP = 6  # updates that do not count: the first ones are without a quota


@dataclass(frozen=True)
class Case:
    """Nodes with these shares of their cores, and perhaps with so much memory each."""

    name: str
    shares: tuple[float, ...]
    cores: str
    memory: str | None = None

    @property
    def accumulate(self) -> int:
        return len(self.shares) + 1


# Shares of one core leave a little of it: the process that feeds the pipe needs some time too.
CASES = (
    Case("a fast node and a slow one", (0.9, 0.5), "0,1"),
    Case("three unlike nodes", (0.5, 0.4, 0.9), "0,0,1"),
    Case("little memory on the fastest", (0.4, 0.5, 0.9), "0,0,1", "2GB,2GB,450MB"),
)


def add_prediction(report: Report, *, quick: bool) -> None:
    """A row for each configuration; the worst of them against the targets."""
    reason = Quotas.missing()
    if reason:
        report.rows.append({"prediction": f"not measured: {reason}"})
        return
    cases = CASES[:1] if quick else CASES
    speeds = measure_speeds(sorted({share for case in cases for share in case.shares}), rounds=3 if quick else 5)
    turns = [turn(cases, speeds, steps=16 if quick else 20) for _ in range(1 if quick else 3)]
    rate_off, memory_off = [], []
    for case in cases:
        row = {name: statistics.median(t[case][name] for t in turns) for name in turns[0][case]}
        report.rows.append({"prediction": case.name, "shares of cores": str(case.shares), **row})
        rate_off.append(abs(row["ratio"] - 1))
        memory_off.append(abs(row["memory ratio"] - 1))
    report.check("worst |predicted / measured - 1|, samples/s", max(rate_off), "<= 0.15")
    report.check("worst |predicted / measured - 1|, memory", max(memory_off), "<= 0.15")


def turn(cases: Sequence[Case], speeds: Mapping[float, float], steps: int) -> dict[Case, dict[str, float]]:
    """Every configuration once; medians over turns leave out what the machine does meanwhile."""
    found = {}
    for case in cases:
        found[case] = measure(case, [speeds[share] for share in case.shares], steps)
        sys.stderr.write(f"{case.name}: {found[case]}\n")
    return found


def measure_speeds(shares: Sequence[float], rounds: int) -> dict[float, float]:
    """How fast a node is that has this share of a core, next to one that has all of it: the median of rounds."""
    command = [sys.executable, "-m", "benchmarks.prediction", "--probe"]
    with (
        Quotas((*shares, _WHOLE)) as quotas,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe,
    ):
        assert probe.stdin is not None
        assert probe.stdout is not None
        ratios: dict[float, list[float]] = {share: [] for share in shares}
        try:
            for _ in range(rounds):
                gflops = []
                for index in range(len(shares) + 1):
                    quotas.enrol({index: probe.pid})
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


def be_probed() -> None:
    """Measure this process's speed at our program each time that a line comes."""
    os.sched_setaffinity(0, {0})
    work = Workload(trace(lambda: GPT(CONFIG), next_token_loss, batch(1)), SEQUENCES)
    for _ in sys.stdin:
        print(measure_speed(work, threads=1, budget_s=1.5).gflops, flush=True)


def measure(case: Case, speeds: Sequence[float], steps: int) -> dict[str, float]:
    """Train once: what was predicted, and what came."""
    data = [batch(case.accumulate, seed) for seed in range(4)]
    job = Job(lambda: GPT(CONFIG), next_token_loss, data, optimizer=ravnest.AdamW(LR))
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder, Quotas(case.shares) as quotas:
        how = Training(
            steps=steps, on=f"local:{len(case.shares)}", cores=case.cores, memory=case.memory,
            speeds=",".join(map(str, speeds)), folder=Path(folder) / "run",
        )  # fmt: skip
        run = job.train(how, show=_Enrol(quotas))
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    early, late = lines[_WARM_UP - 1], lines[-2]  # after the last the pipe drains
    samples = (late["step"] - early["step"]) * case.accumulate * SEQUENCES
    measured = samples / (late["seconds"] - early["seconds"])
    return {
        "predicted samples/s": run.plan.samples_per_s,
        "measured samples/s": measured,
        "ratio": run.plan.samples_per_s / measured,
        **_memory(run),
    }


def _memory(run: Run) -> dict[str, float]:
    """Of the stage whose memory is furthest from the plan."""
    pairs = [(run.plan.plans[i].memory_bytes / 1e6, m.peak_memory_bytes / 1e6) for i, m in run.stages.items()]
    predicted, measured = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return {"predicted MB": predicted, "measured MB": measured, "memory ratio": predicted / measured}


class Quotas:
    """Control groups with a share of a core each. A context: they are removed whatever happens."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._folders = [self._top() / f"ravnest-{os.getpid()}-{i}" for i in range(len(shares))]

    @staticmethod
    def _top() -> Path:
        """Where groups for processor time are: version 1 has a folder for them."""
        return _ROOT / "cpu" if (_ROOT / "cpu").is_dir() else _ROOT

    @classmethod
    def missing(cls) -> str:
        """Why there can be no quotas here; empty if there can."""
        try:
            with cls((0.5,)):
                return ""
        except OSError as error:
            return f"this machine lets us make no control groups ({error})"

    def __enter__(self) -> Quotas:
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

    def enrol(self, pids: Mapping[int, int]) -> None:
        """Put processes, by the number of their group, into it with all their threads."""
        for index, pid in pids.items():
            (self._folders[index] / "cgroup.procs").write_text(f"{pid}")

    def _remove(self) -> None:
        until = time.monotonic() + 5
        for folder in self._folders:
            while folder.exists() and time.monotonic() < until:
                with contextlib.suppress(OSError):  # its processes have ended, but the kernel may not have noticed
                    folder.rmdir()
                    break
                time.sleep(0.05)


class _Enrol(Show):
    """Puts the workers into their groups at the first update: what comes before is start-up."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas, self._is_done = quotas, False

    def update(self, progress: Progress) -> None:
        if not self._is_done:
            self._is_done = True
            self._quotas.enrol(dict(enumerate(_workers())))


def _workers() -> Iterator[int]:
    """Processes of our workers, in the order of their stages: they were started so."""
    found: list[Any] = psutil.Process().children()
    for process in sorted(found, key=lambda p: p.create_time()):
        if "ravnest.node.worker" in process.cmdline():
            yield process.pid


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--probe", action="store_true", help="measure our speed for each line that comes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.probe:
        be_probed()
        return
    report = Report("prediction: what plans say and what runs do, on uneven nodes")
    add_prediction(report, quick=options.quick)
    report.finish(options.json)


if __name__ == "__main__":
    main()
