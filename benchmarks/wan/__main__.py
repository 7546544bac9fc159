"""Compares a GPT in stages over home lines with torch's schedules over gloo and with an upper bound.

Four PCs of the testbed (two with --quick), each with a CPU quota and a line of 100 Mbit/s up and down; any two are 25
ms apart, one way. The tensors of a cut take 63 ms on the line, so a PC between two others needs its line for 126 ms a
microbatch. Three models (`benchmarks.wan.task`): stages compute for about half as long (the line is the limit), as long
(both), and nearly twice as long. Computing and transferring one after the other, or waiting for answers, loses time.
All train the same model on the same batches with the same number of microbatches per update: torch over plain TCP,
Ravnest over TLS, by `ravnest train --listen` and `ravnest join`. The compute times of the bound are measured in the
same run, one stage at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import fleet_run
from benchmarks.report import Report, arguments
from benchmarks.wan.background_load import BackgroundLoad
from benchmarks.wan.task import CPU, MICROBATCHES, POINTS, REQUESTER, Point, bound, hosts, line_seconds, topology
from testbed import Testbed, TestbedUnavailable, missing

TIMEOUT_S = 300.0
MEMORY = "1GB"
WARM_UP = 2  # updates that do not count


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=POINTS, help="measure only these limits of the pipeline; default: all"
    )
    options = parser.parse_args()
    stages = 2 if options.quick else 4
    report = Report(f"wan: a GPT in {stages} stages, {CPU[stages]} cores each, lines of 100 Mbit/s, 25 ms apart")
    lacking = missing()
    if lacking:
        report.rows.append({"not measured": str(TestbedUnavailable(lacking))})
    else:
        limits = options.only or (["both"] if options.quick else POINTS)
        add_rows(report, [measure(POINTS[limit], stages, quick=options.quick) for limit in limits])
    report.finish(options.json)


@dataclass(frozen=True)
class RunResult:
    """Samples per second of a run, and the idle share of each stage."""

    samples_per_s: float
    bubbles: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """Results with one model; `background_cores` while torch and while Ravnest was measured."""

    point: Point
    compute_s: tuple[float, ...]
    torch_samples_per_s: dict[str, float]
    ravnest: RunResult
    background_cores: tuple[float, float]

    @property
    def bound(self) -> float:
        return bound(self.point, self.compute_s)


def measure(point: Point, stages: int, *, quick: bool) -> Measured:
    with Testbed(topology(stages)) as testbed:
        load = BackgroundLoad(testbed)
        results = run_torch(testbed, point, stages, ("1F1B",) if quick else ("1F1B", "GPipe"), steps=1 if quick else 2)
        busy = load.cores()
    sys.stderr.write(f"{point.limit}: torch: {results}\n")
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder, Testbed(topology(stages)) as testbed:
        load = BackgroundLoad(testbed)
        ravnest = run_ravnest(testbed, Path(folder), point, stages, steps=5 if quick else 12)
        busy_later = load.cores()
    sys.stderr.write(f"{point.limit}: {ravnest}\n")
    compute_s = tuple(stage["compute_s"] for stage in results)
    return Measured(point, compute_s, results[0]["samples_per_s"], ravnest, (busy, busy_later))


def add_rows(report: Report, measured: Sequence[Measured]) -> None:
    for one in measured:
        busy, busy_later = one.background_cores
        rates = [(f"torch {name}, gloo", rate, busy) for name, rate in one.torch_samples_per_s.items()]
        rates += [("Ravnest, TLS", one.ravnest.samples_per_s, busy_later), ("upper bound", one.bound, busy)]
        for system, rate, cores in rates:
            report.rows.append(
                {"limit": one.point.limit, "system": system, "samples/s": rate, "of the bound": rate / one.bound,
                 "background cores": cores}
            )  # fmt: skip
    for one in measured:
        for stage, seconds in enumerate(one.compute_s):
            line_s = line_seconds(one.point, stage, len(one.compute_s))
            report.rows.append(
                {"limit": one.point.limit, "stage": stage, "compute, ms": 1e3 * seconds, "line, ms": 1e3 * line_s,
                 "idle in Ravnest": one.ravnest.bubbles[stage]}
            )  # fmt: skip
    for one in measured:
        limit, rate = one.point.limit, one.ravnest.samples_per_s
        report.check(f"Ravnest / bound, limit: {limit}", rate / one.bound, ">= 0.9")
        report.check(f"Ravnest / torch 1F1B, limit: {limit}", rate / one.torch_samples_per_s["1F1B"], "> 1")
    report.check(
        "background cores, at most", max(cores for one in measured for cores in one.background_cores), "<= 0.3"
    )


def run_ravnest(testbed: Testbed, folder: Path, point: Point, stages: int, steps: int) -> RunResult:
    """The rate is that of the run's own log, after the pipeline has filled and before it drains."""
    job = f"from benchmarks.wan.task import make_job\n\njob = make_job({point.limit!r}, stages={stages})\n"
    options = ["--steps", str(steps)]
    run = fleet_run.train(testbed, folder, job, REQUESTER, hosts(stages), memory=MEMORY, options=options)
    updates = fleet_run.read_metrics(run)
    first, last = updates[WARM_UP - 1], updates[-2]
    samples = (last["step"] - first["step"]) * MICROBATCHES * point.sequences
    early, late = ({m["stage"]: m for m in line["stages"]} for line in (first, last))
    if len(late) != stages:
        raise RuntimeError(f"the model was trained in {len(late)} stages, not {stages}")
    bubbles = []
    for stage, now in sorted(late.items()):
        busy_s, idle_s = (now[name] - early[stage][name] for name in ("steady_busy_s", "idle_s"))
        bubbles.append(idle_s / (busy_s + idle_s))
    return RunResult(samples / (last["seconds"] - first["seconds"]), tuple(bubbles))


def run_torch(
    testbed: Testbed, point: Point, stages: int, schedules: Sequence[str], steps: int
) -> list[dict[str, Any]]:
    """The result of each host's process: see `benchmarks.wan.baseline`."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.wan.baseline",
        "--limit",
        point.limit,
        "--stages",
        str(stages),
        "--steps",
        str(steps),
    ]
    command += ["--master", testbed.address(hosts(stages)[0]), "--schedules", *schedules]
    processes = [
        testbed.hosts[host].run([*command, "--rank", str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank, host in enumerate(hosts(stages))
    ]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"torch on {process.host}: {errors[-1500:]}")
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


if __name__ == "__main__":
    main()
