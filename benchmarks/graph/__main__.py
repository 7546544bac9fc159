"""Compares models split into three stages with eager PyTorch, in the same run.

For each model: the size of the program, the time of tracing, the difference of three stages from eager (loss and
gradients), and the time of a training step through the interpreter relative to eager, steps alternating. For builders
with a billion parameters: the memory of tracing in a process of its own, and the size of the stage files.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import zoo
from benchmarks.report import Report, arguments
from benchmarks.zoo import Case
from ravnest.graph import Interpreter, Program, Stage, Tape, dump, legal_cuts, load, split, trace

BIG = {"gpt2_xl": zoo.gpt2_xl, "llama_1b": zoo.llama_1b}
INEXACT = ("llama",)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--big", choices=BIG, help="trace one big builder and print the result (used by the benchmark itself)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.big:
        sys.stdout.write(json.dumps(big(options.big)) + "\n")
        return
    report = Report("graph: a model in three stages against eager")
    cases = [zoo.gpt(), zoo.gpt2(), zoo.digits()] if options.quick else zoo.bench_cases()
    for case in cases:
        report.rows.append(measure(case, repeats=7 if options.quick else 15))
    add_checks(report)
    for name in ["llama_1b"] if options.quick else BIG:
        row = measure_big(name)
        report.rows.append(row)
        report.check(f"{name}: peak RSS above imports, MB", row["peak_mb"], "<= 300")
        report.check(f"{name}: largest stage file, bytes", row["file_bytes"], "<= 200000")
    report.finish(options.json)


def add_checks(report: Report) -> None:
    for row in report.rows:
        name = row["model"]
        report.check(f"{name}: |loss difference|", row["loss_diff"], "<= 0" if name not in INEXACT else "< 1e-5")
        report.check(f"{name}: gradient difference", row["grad_diff"], "<= 0" if name not in INEXACT else "< 1e-5")
    report.check("median step time / eager", statistics.median(r["step_ratio"] for r in report.rows), "<= 1.03")


def measure(case: Case, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = case.build().train()
    batch = case.batch(8 if case.name != "inception_v3" else 2)
    began = time.perf_counter()
    program = trace(model, case.loss, batch)
    seconds = time.perf_counter() - began
    cuts = legal_cuts(program)
    stages = split(program, [cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3]])
    files = [dump(stage) for stage in stages]
    loss_diff, grad_diff = differences(case, model, batch, program, [load(file) for file in files])
    return {
        "model": case.name,
        "ops": len(program.ops),
        "distinct": len({op.op for op in program.ops}),
        "trace_s": seconds,
        "file_bytes": max(map(len, files)),
        "loss_diff": loss_diff,
        "grad_diff": grad_diff,
        "step_ratio": step_ratio(case, model, batch, program, repeats),
    }


def eager(case: Case, model: nn.Module, batch: Any) -> Tensor:
    if case.loss is None:
        loss: Tensor = model(**batch).loss
        return loss
    inputs, targets = batch
    result = case.loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
    scalar: Tensor = result[0] if isinstance(result, tuple) else result
    return scalar


def copy_state(program: Program) -> dict[str, Tensor]:
    return {s.target: program.tensors[s.target].detach().clone().requires_grad_(s.trainable) for s in program.state}


def received(value: Any) -> Any:
    """A tensor as it is received from a link: contiguous, without autograd history."""
    return value.detach().clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value


def differences(
    case: Case, model: nn.Module, batch: Any, program: Program, stages: Sequence[Stage]
) -> tuple[float, float]:
    """Largest difference of the loss, and of a gradient relative to the largest element of that gradient."""
    state = copy_state(program)
    torch.manual_seed(1)
    loss = eager(case, model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    tapes: list[Tape] = []
    values: Sequence[Any] = program.feed(batch)
    for stage in stages:
        tapes.append(Tape(Interpreter(stage), state, values))
        values = [received(v) for v in tapes[-1].outputs]
    gradients = None
    for tape in reversed(tapes):
        gradients = [received(g) for g in tape.backward(gradients)]
    worst = 0.0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            other = state[name].grad
            assert other is not None
            scale = parameter.grad.abs().max().clamp_min(1e-30)
            worst = max(worst, float((other - parameter.grad).abs().max() / scale))
        parameter.grad = None
    return abs(float(values[0] - loss.detach())), worst


def step_ratio(case: Case, model: nn.Module, batch: Any, program: Program, repeats: int) -> float:
    """Median time of a forward and backward pass through the interpreter over eager's, alternating."""
    interpreter = Interpreter(split(program, [])[0])
    state = copy_state(program)
    inputs = program.feed(batch)

    def staged() -> None:
        Tape(interpreter, state, inputs).backward()

    def whole() -> None:
        eager(case, model, batch).backward()  # type: ignore[no-untyped-call]

    def zero() -> None:
        for tensor in (*state.values(), *model.parameters()):
            tensor.grad = None

    return median_ratio(staged, whole, zero, repeats)


def median_ratio(
    measured: Callable[[], None], baseline: Callable[[], None], reset: Callable[[], None], repeats: int
) -> float:
    """Median of the ratios of adjacent runs, so that a slow period of the machine affects both."""
    ratios = []
    for i in range(repeats + 2):
        seconds = []
        for action in (measured, baseline) if i % 2 else (baseline, measured):
            reset()
            began = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - began)
        if i >= 2:
            ratios.append(seconds[0] / seconds[1] if i % 2 else seconds[1] / seconds[0])
    return statistics.median(ratios)


def measure_big(name: str) -> dict[str, Any]:
    """Trace a big builder in a process of its own, for its peak memory."""
    command = [sys.executable, "-m", "benchmarks.graph", "--big", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def memory_kb(field: str) -> int:
    """A field of /proc/self/status (getrusage would include the parent's peak)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0])


def reset_peak_kb() -> int:
    """Reset the peak of resident memory; returns the resident memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_kb("VmRSS")


def big(name: str) -> dict[str, Any]:
    case = BIG[name]()
    trace(
        nn.Linear(2, 1), lambda y, t: y.sum(), (torch.ones(2, 2), torch.ones(2))
    )  # so that imports and caches do not count
    before = reset_peak_kb()
    began = time.perf_counter()
    program = trace(case.build, case.loss, case.batch(2))
    seconds = time.perf_counter() - began
    cuts = legal_cuts(program)
    files = [dump(stage) for stage in split(program, [cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3]])]
    return {
        "model": name,
        "parameters": program.num_parameters,
        "ops": len(program.ops),
        "distinct": len({op.op for op in program.ops}),
        "trace_s": seconds,
        "file_bytes": max(map(len, files)),
        "peak_mb": (memory_kb("VmHWM") - before) / 1000,
    }


if __name__ == "__main__":
    main()
