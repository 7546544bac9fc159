"""Local runs of this tree and of another, in turns: `python -m benchmarks.local_runs --other ../old/src`.

Each turn trains the same job with both trees, one after the other, and compares samples/s after the first steps,
seconds from the command to the first step, the peak memory of workers, and, where both cut the model alike, the bits of
the final weights.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.report import Report, arguments

_JOB = Path(__file__).with_name("job.py")
_WARM_UP = 10  # steps
_BATCH = 24
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class _Result:
    samples_per_s: float
    start_s: float
    memory_bytes: int
    cuts: tuple[int, ...]
    weights: dict[str, torch.Tensor]


def _train(tree: Path, folder: Path, nodes: int, steps: int, mode: str) -> _Result:
    command = [
        sys.executable, "-m", "ravnest", "train", str(_JOB), "--local", str(nodes), "--threads", "1",
        "--steps", str(steps), "--mode", mode, "--folder", str(folder),
    ]  # fmt: skip
    began_s = time.monotonic()
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.DEVNULL, cwd=folder.parent
    ) as process:
        first_s = _first_step_s(folder / "metrics.jsonl", process) - began_s
        if process.wait(_TIMEOUT_S):
            raise RuntimeError(f"{tree}: the run ended with code {process.returncode}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    done = [line for line in lines if "step" in line]
    seconds = done[-1]["seconds"] - done[_WARM_UP]["seconds"]
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    plan = next(iter(plan["clusters"].values())) if "clusters" in plan else plan
    return _Result(
        samples_per_s=_BATCH * (len(done) - 1 - _WARM_UP) / seconds,
        start_s=first_s,
        memory_bytes=max(stage["peak_memory_bytes"] for stage in done[-1]["stages"]),
        cuts=tuple(plan["cuts"]),
        weights=load_file(folder / "model.safetensors"),
    )


def _first_step_s(path: Path, process: subprocess.Popen[bytes]) -> float:
    while process.poll() is None:
        if path.exists() and path.stat().st_size:
            return time.monotonic()
        time.sleep(0.01)  # the file of another process gives no sign
    raise RuntimeError(f"the run ended with code {process.returncode} before its first step")


def _is_equal(one: _Result, other: _Result) -> bool | None:
    """Return whether the weights are the same to the bit; None if the model was cut elsewhere."""
    if one.cuts != other.cuts:
        return None
    return all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--other", type=Path, required=True, metavar="SRC", help="the src folder of the other tree")
    options = parser.parse_args()
    trees = {"this": Path(__file__).parents[2] / "src", "other": options.other.resolve()}
    report = Report("local runs: this tree against another")
    settings = [(2, "async"), (4, "async"), (2, "sync")]
    for nodes, mode in settings:
        turns, steps = (1, 40) if options.quick else (4 if mode == "async" else 1, 150)
        ratios: dict[str, list[float]] = {"speed": [], "start": [], "memory": []}
        equal: list[bool] = []
        for turn in range(turns):
            found: dict[str, _Result] = {}
            for name in sorted(trees, reverse=bool(turn % 2)):
                with tempfile.TemporaryDirectory() as folder:
                    found[name] = _train(trees[name], Path(folder) / "run", nodes, steps, mode)
            this, other = found["this"], found["other"]
            ratios["speed"].append(this.samples_per_s / other.samples_per_s)
            ratios["start"].append(this.start_s / other.start_s)
            ratios["memory"].append(this.memory_bytes / other.memory_bytes)
            same = _is_equal(this, other)
            equal += [] if same is None else [same]
            report.rows.append({
                "nodes": nodes, "mode": mode, "samples/s": this.samples_per_s, "other": other.samples_per_s,
                "start s": this.start_s, "other start s": other.start_s, "memory MB": this.memory_bytes / 1e6,
                "other MB": other.memory_bytes / 1e6, "same cuts": str(this.cuts == other.cuts),
                "same bits": str(same),
            })  # fmt: skip
            print(report.rows[-1], flush=True)
        if mode == "async":
            report.check(f"samples/s, local:{nodes}", statistics.median(ratios["speed"]), ">= 0.98")
            report.check(f"peak memory of a worker, local:{nodes}", max(ratios["memory"]), "<= 1.02")
        if (nodes, mode) == (2, "async"):
            report.check("seconds to the first step, local:2", statistics.median(ratios["start"]), "<= 1.1")
        report.check(
            f"weights that differ, of {len(equal)} pairs, local:{nodes} {mode}", float(equal.count(False)), "== 0"
        )
    report.finish(options.json)


if __name__ == "__main__":
    main()
