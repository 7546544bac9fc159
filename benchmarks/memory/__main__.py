"""Measures the memory of local runs in every memory mode against the plan, their held-out loss and their speed.

Each run trains a GPT of GPT-2's shape, built on the nodes, in worker processes with one thread each. The memory of a
worker is the kernel's peak of its resident set (VmHWM) at the last update; checkpoints and replicas are written
meanwhile. Bytes per parameter are what remains of it after the planned activations, temporary tensors and message
buffers and 300 MB for the process, summed over the stages and divided by the model's parameters.

The loss is that of a small GPT on the standard library's source on held-out text, on two nodes, the mean over seeds,
relative to mode `exact`. The speed is the processor time of a worker for a step, relative to mode `exact`; it does not
depend on other load of the machine as wall time does.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

import ravnest
from benchmarks.report import Report, arguments
from ravnest.config import TrainingConfig
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.graph import split, trace
from ravnest.graph.weights import initialise
from ravnest.pipeline.config import TrainerConfig
from ravnest.pipeline.staleness import DEFAULT
from ravnest.pipeline.trainer import Trainer
from ravnest.run.job import Job
from ravnest.run.result import Run

PROCESS_BYTES = 300e6
TARGETS = {"compact": "<= 18", "small": "<= 10"}
MODELS = {
    "GPT-2 124M": GPTConfig(vocab=50257, context=128, layers=12, width=768, heads=12, dropout=0.0),
    "GPT-2 355M": GPTConfig(vocab=50257, context=128, layers=24, width=1024, heads=16, dropout=0.0),
}
QUICK_MODEL = "GPT of 29M"
QUICK_MODELS = {QUICK_MODEL: GPTConfig(vocab=8192, context=128, layers=8, width=512, heads=8, dropout=0.0)}
NODES = {"GPT-2 124M": 2, "GPT-2 355M": 4, QUICK_MODEL: 2}
TEXT_MODEL = GPTConfig(vocab=128, context=64, layers=4, width=96, heads=4, dropout=0.0)
SPEED_MODEL = GPTConfig(vocab=1024, context=128, layers=4, width=512, heads=8, dropout=0.0)
SPEED_TOKENS = 4096  # of a step


class Tokens:
    """Random batches."""

    def __init__(self, vocab: int, samples: int, length: int) -> None:
        self.vocab, self.samples, self.length = vocab, samples, length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(self.vocab, (self.samples, self.length + 1), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class MemoryResult:
    """Bytes of all stages of a run."""

    planned_bytes: int
    peak_bytes: int
    per_parameter: float
    worst_ratio: float  # planned to measured, of the stage where it is farthest from 1

    @staticmethod
    def of(run: Run) -> MemoryResult:
        plans = [(run.plan.plans[i], metrics.peak_memory_bytes) for i, metrics in run.stages.items()]
        parameters = sum(plan.parameter_bytes for plan, _ in plans) / 4
        besides = ("activations", "work", "links", "fixed", "rings")
        left = sum(peak - PROCESS_BYTES - sum(plan.memory[part] for part in besides) for plan, peak in plans)
        ratios = [plan.memory_bytes / peak for plan, peak in plans]
        return MemoryResult(
            sum(plan.memory_bytes for plan, _ in plans), sum(peak for _, peak in plans), left / parameters,
            max(ratios, key=lambda ratio: abs(ratio - 1)),
        )  # fmt: skip


def measure_memory(model: str, config: GPTConfig, mode: str, steps: int) -> MemoryResult:
    """Train a few steps with a checkpoint between."""
    nodes = NODES[model]
    job = Job(lambda: GPT(config), next_token_loss, Tokens(config.vocab, nodes + 1, 64), optimizer=ravnest.AdamW(1e-4))
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder:
        settings = TrainingConfig(
            steps=steps, on=f"local:{nodes}", threads=1, microbatches_per_step=nodes + 1, memory_mode=mode,
            checkpoint_every=steps // 2, keep_checkpoints=1, verify=False, run_dir=Path(folder) / "run",
        )  # fmt: skip
        return MemoryResult.of(job.train(settings))


def add_memory(report: Report, models: dict[str, GPTConfig], *, steps: int, with_exact: bool) -> None:
    for model, config in models.items():
        for mode in ("exact", "compact", "small") if with_exact else ("compact", "small"):
            sys.stderr.write(f"memory of {model} in mode {mode}\n")
            found = measure_memory(model, config, mode, steps)
            report.rows.append(
                {
                    "model": model, "nodes": NODES[model], "mode": mode,
                    "planned MB": round(found.planned_bytes / 1e6), "measured MB": round(found.peak_bytes / 1e6),
                    "planned / measured": round(found.worst_ratio, 3),
                    "bytes per parameter": round(found.per_parameter, 2),
                }
            )  # fmt: skip
            sys.stderr.write(f"{report.rows[-1]}\n")
            report.check(f"{model}, {mode}: |planned / measured - 1|", abs(found.worst_ratio - 1), "<= 0.1")
            if mode in TARGETS:
                report.check(f"{model}, {mode}: bytes per parameter", found.per_parameter, TARGETS[mode])


class Pipeline:
    """Stages of a model in this process, with the weight versions and updates of a pipeline with one update delay."""

    def __init__(self, config: GPTConfig, mode: str, seed: int, lr: float, num_stages: int) -> None:
        example = torch.zeros((1, config.context), dtype=torch.int64)
        program = trace(lambda: GPT(config), next_token_loss, (example, example))
        cuts = [i for i in range(1, len(program.ops)) if program.ops[i].op == "aten.layer_norm.default"][1:]
        chosen = [cuts[len(cuts) * k // num_stages] for k in range(1, num_stages)]
        self.delay = 0 if mode == "small" else 1
        settings = TrainerConfig(optimizer=ravnest.AdamW(lr), correction=DEFAULT, memory=mode)
        self.program = program
        self.trainers = [
            Trainer(stage, initialise(stage, seed), settings, delay=self.delay) for stage in split(program, chosen)
        ]
        self.updates = 0

    def step(self, batch: tuple[Tensor, Tensor], microbatches: int = 1) -> None:
        """One optimizer step."""
        step, version = self.updates, max(0, self.updates - self.delay)
        for k, part in enumerate(zip(*(t.chunk(microbatches) for t in batch), strict=True)):
            number = step * microbatches + k
            values = self._values(part)
            for trainer in self.trainers:
                inputs = [values[v.name] for v in trainer.stage.inputs]
                outputs = trainer.forward(number, step, version, inputs, 1 / microbatches)
                values |= {v.name: value for v, value in zip(trainer.stage.outputs, outputs, strict=True)}
            gradients: dict[str, Tensor | None] = {}
            for trainer in reversed(self.trainers):
                is_last = trainer is self.trainers[-1]
                given = None if is_last else [gradients.get(v.name) for v in trainer.stage.outputs]
                returned = trainer.backward(number, given)
                gradients |= {v.name: g for v, g in zip(trainer.stage.inputs, returned, strict=True)}
        for trainer in self.trainers:
            trainer.update(step, version, trainer.take_gradients(step, version)[0], None)
        self.updates += 1

    def loss(self, held_out: list[tuple[Tensor, Tensor]]) -> float:
        """The loss of the master weights."""
        results = []
        for batch in held_out:
            values = self._values(batch)
            for trainer in self.trainers:
                outputs = trainer.evaluate(None, -1, [values[v.name] for v in trainer.stage.inputs])
                values |= {v.name: value for v, value in zip(trainer.stage.outputs, outputs, strict=True)}
            results.append(float(outputs[0]))
        return statistics.fmean(results)

    def _values(self, batch: tuple[Tensor, ...]) -> dict[str, object]:
        return {v.name: value for v, value in zip(self.program.inputs, self.program.feed(batch), strict=True)}


def held_out_loss(mode: str, seed: int, steps: int) -> float:
    text = library_text().clamp(max=TEXT_MODEL.vocab - 1)
    cut = len(text) * 9 // 10
    pipeline = Pipeline(TEXT_MODEL, mode, seed, lr=2e-3, num_stages=2)
    for batch in islice(batches(text[:cut], 8, TEXT_MODEL.context, 1000 + seed), steps):
        pipeline.step(batch)
    return pipeline.loss(list(islice(batches(text[cut:], 64, TEXT_MODEL.context, seed=1), 32)))


def add_loss(report: Report, *, seeds: int, steps: int) -> None:
    losses = {
        mode: [held_out_loss(mode, seed, steps) for seed in range(seeds)] for mode in ("exact", "compact", "small")
    }
    for mode, found in losses.items():
        gap = statistics.fmean(loss / exact - 1 for loss, exact in zip(found, losses["exact"], strict=True))
        report.rows.append(
            {"loss of mode": mode, "steps": steps, "seeds": seeds, "held-out loss": round(statistics.fmean(found), 4),
             "against exact": f"{gap:+.2%}"}
        )  # fmt: skip
        if mode != "exact" and seeds > 1:
            report.check(f"{mode}: held-out loss against exact", gap, "<= 0.003")


def add_speed(report: Report, *, steps: int) -> None:
    """Take turns, so that a slow moment hits every mode."""
    microbatches = 4
    pipelines = {mode: Pipeline(SPEED_MODEL, mode, 0, 1e-4, num_stages=1) for mode in ("exact", "compact", "small")}
    data = islice(Tokens(SPEED_MODEL.vocab, SPEED_TOKENS // SPEED_MODEL.context, SPEED_MODEL.context), steps + 2)
    seconds: dict[str, list[float]] = {mode: [] for mode in pipelines}
    for batch in data:
        for mode, pipeline in pipelines.items():
            began = time.process_time()
            pipeline.step(batch, microbatches)
            seconds[mode].append(time.process_time() - began)
    medians = {mode: statistics.median(each[2:]) for mode, each in seconds.items()}
    for mode, median in medians.items():
        report.rows.append(
            {"speed of mode": mode, "tokens of a step": SPEED_TOKENS, "processor seconds of a step": round(median, 3),
             "speed against exact": round(medians["exact"] / median, 3)}
        )  # fmt: skip
    report.check("compact: speed against exact", medians["exact"] / medians["compact"], ">= 0.97")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=("memory", "loss", "speed"), default=("memory", "loss", "speed"))
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("memory of training: planned, measured, per parameter; loss and speed")
    if "memory" in options.only:
        chosen = QUICK_MODELS if options.quick else {name: MODELS[name] for name in options.models}
        add_memory(report, chosen, steps=4, with_exact=options.quick)
    if "loss" in options.only:
        add_loss(report, seeds=1 if options.quick else 4, steps=60 if options.quick else 400)
    if "speed" in options.only:
        add_speed(report, steps=3 if options.quick else 9)
    report.finish(options.json)


if __name__ == "__main__":
    main()
