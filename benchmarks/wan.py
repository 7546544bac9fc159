"""A GPT in stages over home lines: ours against torch's schedules over gloo and against what no pipeline can beat.

Four PCs of the testbed (two for --quick), each with a share of a core and a line of 100 Mbit/s up and down; any two are
25 ms apart, one way. What crosses a cut takes 63 ms on the line, a stage computes about twice as long as its line is
busy (`wan_task`): whoever does one after the other, or waits for answers, loses. All train the same model on the same
batches with as many microbatches an update: torch in plain TCP, ours in TLS, by `ravnest train --listen` and `ravnest
join`. The seconds of the bound are measured in the same run, stage by stage, each alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import wan_ours
from benchmarks.report import Report, arguments
from benchmarks.wan_bystanders import Bystanders
from benchmarks.wan_task import CPU, bound, hosts, line_seconds, topology
from ravnest.testbed import Testbed, missing

PATIENCE_S = 300.0


def main() -> None:
    options = arguments(__doc__).parse_args()
    stages = 2 if options.quick else 4
    report = Report(f"wan: a GPT in {stages} stages, {CPU[stages]} cores each, lines of 100 Mbit/s, 25 ms apart")
    lacking = missing()
    if lacking:
        report.rows.append({"who": f"not measured: this machine cannot have a testbed, it lacks {'; '.join(lacking)}"})
    else:
        measure(report, stages, quick=options.quick)
    report.finish(options.json)


def measure(report: Report, stages: int, *, quick: bool) -> None:
    with Testbed(topology(stages)) as bed:
        others = Bystanders(bed)
        found = rivals(bed, stages, ("1F1B",) if quick else ("1F1B", "GPipe"), steps=1 if quick else 2)
        busy = others.cores()
    sys.stderr.write(f"torch: {found}\n")
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder, Testbed(topology(stages)) as bed:
        others = Bystanders(bed)
        ours = wan_ours.train(bed, Path(folder), stages, steps=5 if quick else 12)
        busy_later = others.cores()
    sys.stderr.write(f"{ours}\n")
    compute_s = [stage["compute_s"] for stage in found]
    most = bound(compute_s)
    rates = [(f"torch {name}, gloo", rate, busy) for name, rate in found[0]["samples_per_s"].items()]
    for who, rate, others_cores in (*rates, ("ours, TLS", ours.samples_per_s, busy_later), ("the bound", most, busy)):
        row = {"who": who, "samples/s": rate, "of the bound": rate / most, "cores that others used": others_cores}
        report.rows.append(row)
    for stage, seconds in enumerate(compute_s):
        report.rows.append(
            {"stage": stage, "compute, ms": 1e3 * seconds, "line, ms": 1e3 * line_seconds(stage, stages),
             "idle in ours": ours.bubbles[stage]}
        )  # fmt: skip
    report.check("ours / bound", ours.samples_per_s / most, ">= 0.9")
    report.check("ours / torch 1F1B", ours.samples_per_s / found[0]["samples_per_s"]["1F1B"], "> 1")
    report.check("cores that others used", max(busy, busy_later), "<= 0.3")


def rivals(bed: Testbed, stages: int, schedules: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """What the process of each host found: see `wan_rival`."""
    command = [sys.executable, "-m", "benchmarks.wan_rival", "--stages", str(stages), "--steps", str(steps)]
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
