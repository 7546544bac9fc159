"""A GPT in stages over home lines: ours against torch's schedules over gloo and against what no pipeline can beat.

Four PCs of the testbed (two for --quick), each with a share of a core and a line of 100 Mbit/s up and down; any two are
25 ms apart, one way. What crosses a cut takes 63 ms on the line, so a PC between two others needs its line for 126 ms a
microbatch. Three models (`wan_task`): stages compute for about half as long (the line is the limit), as long (both),
and nearly twice as long. Whoever does one after the other, or waits for answers, loses. All train the same model on the
same batches with as many microbatches an update: torch in plain TCP, ours in TLS, by `ravnest train --listen` and
`ravnest join`. The seconds of the bound are measured in the same run, stage by stage, each alone.
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

from benchmarks import wan_ours
from benchmarks.report import Report, arguments
from benchmarks.wan_bystanders import Bystanders
from benchmarks.wan_ours import Ours
from benchmarks.wan_task import CPU, POINTS, Point, bound, hosts, line_seconds, topology
from ravnest.testbed import Testbed, missing

PATIENCE_S = 300.0


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=POINTS, help="what limits the pipeline; default: all")
    options = parser.parse_args()
    stages = 2 if options.quick else 4
    report = Report(f"wan: a GPT in {stages} stages, {CPU[stages]} cores each, lines of 100 Mbit/s, 25 ms apart")
    lacking = missing()
    if lacking:
        report.rows.append({"who": f"not measured: this machine cannot have a testbed, it lacks {'; '.join(lacking)}"})
    else:
        limits = options.only or (["both"] if options.quick else POINTS)
        add_rows(report, [measure(POINTS[limit], stages, quick=options.quick) for limit in limits])
    report.finish(options.json)


@dataclass(frozen=True)
class Measured:
    """What everybody reached with one model; `others_cores` while torch and while ours was measured."""

    point: Point
    compute_s: tuple[float, ...]
    torch_samples_per_s: dict[str, float]
    ours: Ours
    others_cores: tuple[float, float]

    @property
    def bound(self) -> float:
        return bound(self.point, self.compute_s)


def measure(point: Point, stages: int, *, quick: bool) -> Measured:
    with Testbed(topology(stages)) as bed:
        others = Bystanders(bed)
        found = rivals(bed, point, stages, ("1F1B",) if quick else ("1F1B", "GPipe"), steps=1 if quick else 2)
        busy = others.cores()
    sys.stderr.write(f"{point.limit}: torch: {found}\n")
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder, Testbed(topology(stages)) as bed:
        others = Bystanders(bed)
        ours = wan_ours.train(bed, Path(folder), point, stages, steps=5 if quick else 12)
        busy_later = others.cores()
    sys.stderr.write(f"{point.limit}: {ours}\n")
    compute_s = tuple(stage["compute_s"] for stage in found)
    return Measured(point, compute_s, found[0]["samples_per_s"], ours, (busy, busy_later))


def add_rows(report: Report, measured: Sequence[Measured]) -> None:
    for one in measured:
        busy, busy_later = one.others_cores
        rates = [(f"torch {name}, gloo", rate, busy) for name, rate in one.torch_samples_per_s.items()]
        rates += [("ours, TLS", one.ours.samples_per_s, busy_later), ("the bound", one.bound, busy)]
        for who, rate, cores in rates:
            report.rows.append(
                {"the limit": one.point.limit, "who": who, "samples/s": rate, "of the bound": rate / one.bound,
                 "cores that others used": cores}
            )  # fmt: skip
    for one in measured:
        for stage, seconds in enumerate(one.compute_s):
            line_s = line_seconds(one.point, stage, len(one.compute_s))
            report.rows.append(
                {"the limit": one.point.limit, "stage": stage, "compute, ms": 1e3 * seconds, "line, ms": 1e3 * line_s,
                 "idle in ours": one.ours.bubbles[stage]}
            )  # fmt: skip
    for one in measured:
        limit, rate = one.point.limit, one.ours.samples_per_s
        report.check(f"ours / bound, limit: {limit}", rate / one.bound, ">= 0.9")
        report.check(f"ours / torch 1F1B, limit: {limit}", rate / one.torch_samples_per_s["1F1B"], "> 1")
    report.check(
        "cores that others used, at most", max(cores for one in measured for cores in one.others_cores), "<= 0.3"
    )


def rivals(bed: Testbed, point: Point, stages: int, schedules: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """What the process of each host found: see `wan_rival`."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.wan_rival",
        "--limit",
        point.limit,
        "--stages",
        str(stages),
        "--steps",
        str(steps),
    ]
    command += ["--master", bed.address(hosts(stages)[0]), "--schedules", *schedules]
    processes = [
        bed.hosts[host].run([*command, "--rank", str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank, host in enumerate(hosts(stages))
    ]
    said = [process.communicate(timeout=PATIENCE_S) for process in processes]
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"torch on {process.host}: {errors[-1500:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


if __name__ == "__main__":
    main()
