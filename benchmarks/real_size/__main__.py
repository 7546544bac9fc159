"""Trains a Llama of 1.1 billion parameters on eight PCs of the testbed that could not hold it, and exports it.

The kernel limits the memory of each PC. The limit is the least with which a plan exists, and a little more. Then the
exported model is loaded by `from_pretrained`, and its logits are compared with those of the run's own weights. With
--lora it is fine-tuned from that directory by LoRA, on PCs with less memory. --quick takes a small Llama on four PCs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import ravnest
from benchmarks import fleet_run
from benchmarks.real_size.task import REQUESTER, SIZES, Size, make_job, num_parameters
from benchmarks.report import Report, arguments
from ravnest.core.units import format_bytes
from ravnest.planner.fleet import Machine, plan_row
from ravnest.planner.node_file import NodeFile
from ravnest.planner.problem import PlanError
from ravnest.run.fleet_plan import make_plan_request
from ravnest.run.result import read_model
from testbed import Testbed, TestbedUnavailable, missing

MARGIN = 1.06  # of the memory that the plan needs
AGENT_BYTES = 110_000_000  # of a PC's agent, beside its worker
RESERVE = 0.1  # of a PC's memory, which an agent never lends
LEAST_BYTES = 850_000_000  # with which a PC can be measured; more than the small model needs
TIMEOUT_S = 3600.0


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--lora", action="store_true", help="also fine-tune the exported model by LoRA")
    parser.add_argument("--memory-mode", default="small", help="how the run keeps weights and optimizer state")
    options = parser.parse_args()
    size = SIZES["small" if options.quick else "1.1B"]
    parameters = num_parameters(size)
    report = Report(f"real size: a Llama of {parameters / 1e9:.3g} billion parameters on {size.pcs} PCs")
    if lacking := missing():
        report.rows.append({"not measured": str(TestbedUnavailable(lacking))})
        report.finish(options.json)
        return
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as name:
        folder = Path(name)
        trained = measure(size, folder / "train", "", options.memory_mode)
        add_rows(report, "training", size, parameters, trained)
        exported = folder / "exported"
        difference = export_and_compare(size, trained.run, exported)
        report.check("largest difference of a logit after the export", difference, "<= 0.001")
        if options.lora:
            tuned = measure(size, folder / "lora", str(exported), "compact")
            add_rows(report, "LoRA", size, parameters, tuned)
            report.check("LoRA: memory of all PCs / training", tuned.limit_bytes / trained.limit_bytes, "<= 0.75")
    report.finish(options.json)


@dataclass(frozen=True)
class Trained:
    """A run, the memory limit of each PC, and what the kernel measured."""

    run: Path
    limit_bytes: int
    planned_samples_per_s: float
    peak_bytes: dict[str, int]
    killed: int
    steps: Sequence[dict[str, Any]]

    @property
    def samples_per_s(self) -> float:
        """Between the second step and the last."""
        first, last = self.steps[1], self.steps[-1]
        return float((last["step"] - first["step"]) / (last["seconds"] - first["seconds"]))


def measure(size: Size, folder: Path, model: str, mode: str) -> Trained:
    folder.mkdir(parents=True)
    needed = least_memory(size, make_job(size.name, folder=model), mode)
    lent = max(int(MARGIN * needed), LEAST_BYTES)
    sys.stderr.write(f"each of {size.pcs} PCs needs {format_bytes(needed)} and lends {format_bytes(lent)}\n")
    job = f"from benchmarks.real_size.task import make_job\n\njob = make_job({size.name!r}, folder={model!r})\n"
    options = ["--steps", str(size.steps), "--memory-mode", mode, "--replicas", "0", "--no-verify",
               "--average-every", "0"]  # fmt: skip
    limit = int((lent + AGENT_BYTES) / (1 - RESERVE))
    with Testbed(size.topology(limit)) as testbed:
        run = fleet_run.train(
            testbed, folder, job, REQUESTER, size.hosts, memory=f"{lent}B", options=options, timeout_s=TIMEOUT_S
        )
        peak_bytes = {host: testbed.usage(host).peak_memory_bytes for host in size.hosts}
        killed = sum((folder / f"{host}.log").read_text().count("killed by signal") for host in size.hosts)
    (plan,) = json.loads((run / "plan.json").read_text())["clusters"].values()
    return Trained(run, limit, plan["samples_per_s"] / size.samples, peak_bytes, killed, fleet_run.read_metrics(run))


def least_memory(size: Size, job: ravnest.Job, mode: str) -> int:
    """The least memory with which equal PCs, all of them in one pipeline, can train the job."""
    job = replace(job, config=replace(job.config, memory_mode=mode, average_every=0))
    nodes = NodeFile(tuple(Machine(name=name, speed=1.0) for name in size.hosts), far_s=0.0, lan_bytes_per_s=125e6)
    task = make_plan_request(job, nodes).task
    low, high = 1e8, 64e9
    while high / low > 1.005:
        middle = (low * high) ** 0.5
        machines = tuple(replace(machine, memory_bytes=middle) for machine in task.fleet.machines)
        try:
            plan_row(replace(task, fleet=replace(task.fleet, machines=machines)), size.hosts)
            high = middle
        except PlanError:
            low = middle
    return int(high)


def export_and_compare(size: Size, run: Path, folder: Path) -> float:
    """The largest difference between the logits of the exported model and of the run's own weights."""
    command = [sys.executable, "-m", "ravnest", "export", str(run), "--to", str(folder), "--max-shard-size", "500MB"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    example = size.example()
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        loaded = model(example).logits
        model.load_state_dict(read_model(run / "model.safetensors"))
        return float((model(example).logits - loaded).abs().max())


def add_rows(report: Report, name: str, size: Size, parameters: int, trained: Trained) -> None:
    losses = [step["loss"] for step in trained.steps]
    model_bytes = 4 * parameters
    for host in size.hosts:
        report.rows.append(
            {"run": name, "PC": host, "peak, MB": trained.peak_bytes[host] / 1e6,
             "limit, MB": trained.limit_bytes / 1e6, "limit / model": trained.limit_bytes / model_bytes}
        )  # fmt: skip
    report.rows.append(
        {"run": name, "steps": len(losses), "first loss": losses[0], "last loss": losses[-1],
         "seconds a step": 1 / trained.samples_per_s, "planned": 1 / trained.planned_samples_per_s,
         "bytes a parameter, all PCs": size.pcs * trained.limit_bytes / parameters}
    )  # fmt: skip
    report.check(f"{name}: steps", len(losses), f">= {size.steps}")
    report.check(f"{name}: last loss / first loss", losses[-1] / losses[0], "< 0.9")
    report.check(f"{name}: workers that were killed", trained.killed, "== 0")
    report.check(f"{name}: largest peak / limit", max(trained.peak_bytes.values()) / trained.limit_bytes, "<= 1")
    report.check(f"{name}: limit of a PC / weights of the model", trained.limit_bytes / model_bytes, "<= 0.5")
    ratio = trained.planned_samples_per_s / trained.samples_per_s
    report.check(f"{name}: seconds a step / planned", ratio, "<= 1.15")
    report.check(f"{name}: planned / seconds a step", 1 / ratio, "<= 1.15")


if __name__ == "__main__":
    main()
