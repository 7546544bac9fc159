"""Measures the loss of training with late gradients, with and without corrections, against synchronous training.

A small GPT on the standard library's source, in one process, with the numbers that a pipeline would compute: each
microbatch runs on the weight version that the pipeline would use, and each stage is updated by the pipeline's own
optimizers and corrections. `delay 1` is the default mode (double-buffered weights, every gradient one update old);
`delays 6 4 2 0` is an update per microbatch on four stages. The result is the loss of the master weights on held-out
text at the end, the mean over seeds; the gap is relative to the synchronous run of the same optimizer, and `seeds` is
the range of the losses.

Learning rates are chosen for synchronous training: `--sweep` compares several.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from benchmarks.report import Report, arguments
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.pipeline.optimizers import AdamW, Muon, NAdam, Optimizer, Stepper, cosine
from ravnest.pipeline.staleness import DEFAULT, Correction, Corrector, delay_compensation, look_ahead, lr_discount, none

MODEL = GPTConfig(vocab=128, context=64, layers=4, width=96, heads=4, dropout=0.0)
BATCH = 8
STEPS, QUICK_STEPS = 600, 120
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
EMBEDDINGS = ("tokens.weight", "positions.weight")
ONE_LATE = (1,)
EVERY_MICROBATCH = (6, 4, 2, 0)
SYNCHRONOUS = (0,)

# The best for synchronous training over these updates, mean of two seeds (`--sweep`): AdamW 2.310, 2.183, 2.091, 2.110
# at 1, 2, 4, 8 e-3; Muon 2.312, 2.124, 1.889, 1.753, 1.754, 1.871 at 1, 2, 4, 8, 16, 32 e-3.
ADAMW_LR = 4e-3
MUON_LR = 8e-3
RATE = cosine(STEPS, warmup_steps=50, final_ratio=0.1)


@dataclass(frozen=True)
class Setting:
    """One row: the optimizer, the delay of each stage and the correction."""

    optimizer: Optimizer
    delays: tuple[int, ...] = SYNCHRONOUS
    correction: Correction = none()  # noqa: RUF009  (immutable)
    note: str = ""

    @property
    def label(self) -> dict[str, str]:
        names: dict[tuple[int, ...], str] = {SYNCHRONOUS: "synchronous", ONE_LATE: "delay 1"}
        mode = names.get(self.delays)
        return {
            "optimizer": self.note or f"{self.optimizer.name} {self.optimizer.lr:g}",
            "mode": mode or "delays " + " ".join(map(str, self.delays)),
            "correction": self.correction.name if self.delays != SYNCHRONOUS else "",
        }


class Text:
    """Training batches, and held-out sequences that are the same for every run."""

    def __init__(self, num_held_out: int) -> None:
        text = library_text().clamp(max=MODEL.vocab - 1)
        cut = len(text) * 9 // 10
        self._train = text[:cut]
        self.held_out = list(islice(batches(text[cut:], 64, MODEL.context, seed=1), num_held_out // 64))

    def train(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self._train, BATCH, MODEL.context, 1000 + seed)

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        return statistics.fmean(float(next_token_loss(model(x), y)) for x, y in self.held_out)


class DelayedStage:
    """The parameters of one stage, where microbatch m runs on version max(0, m - delay), as in the pipeline."""

    def __init__(self, setting: Setting, delay: int, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._corrector = Corrector(setting.correction, delay)
        self._master = {name: p.detach().clone() for name, p in parameters.items()}
        self._stepper = Stepper(setting.optimizer, self._master, fallback_names=EMBEDDINGS)
        self._versions = deque([_copy(self._master)], maxlen=delay + 1)  # the oldest is what runs now

    def load(self) -> None:
        """Load the compute weights of the next microbatch."""
        self._set(self._versions[0])

    def update(self, step: int) -> None:
        """Update the master weights after a backward pass, and queue the compute weights that follow."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._corrector.adjust_gradient(gradients, self._master, self._versions[0])
        following = _copy(self._master)
        self._stepper.step(self._master, gradients, step, lr_factor=self._corrector.lr_factor)
        if self._corrector.needs_buffer:
            following = self._corrector.compute_weights(self._master, following)
        else:
            following = _copy(self._master)
        self._versions.append(following)

    def finish(self) -> None:
        """Load the master weights after the last microbatch."""
        self._set(self._master)

    def _set(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = weights[name]
            parameter.grad = None


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def stage_of(name: str, count: int) -> int:
    """The stage of a parameter: embeddings with the first block, the head with the last."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) * count // MODEL.layers
    return 0 if name in EMBEDDINGS else count - 1


def train(setting: Setting, text: Text, seed: int, steps: int) -> float:
    """The held-out loss after `steps` updates."""
    torch.manual_seed(seed)
    model = GPT(MODEL)
    count = len(setting.delays)
    named = dict(model.named_parameters())
    stages = [
        DelayedStage(setting, delay, {n: p for n, p in named.items() if stage_of(n, count) == index})
        for index, delay in enumerate(setting.delays)
    ]
    for step, (inputs, targets) in enumerate(islice(text.train(seed), steps)):
        for stage in stages:
            stage.load()
        next_token_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        for stage in stages:
            stage.update(step)
    for stage in stages:
        stage.finish()
    return text.loss(model)


def settings(*, quick: bool) -> list[Setting]:
    """All settings to compare, each optimizer's synchronous run first."""
    adamw, clipped = AdamW(ADAMW_LR, schedule=RATE), AdamW(ADAMW_LR, schedule=RATE, clip_norm=1.0)
    compared = [Setting(adamw), Setting(adamw, ONE_LATE), Setting(adamw, ONE_LATE, DEFAULT)]
    if quick:
        return compared
    nadam = NAdam(ADAMW_LR / 4, betas=(0.99, 0.999), schedule=RATE)
    muon = Muon(MUON_LR, weight_decay=0.01, schedule=RATE)
    compared += [Setting(adamw, ONE_LATE, c) for c in (look_ahead(1.0), look_ahead(1.5), lr_discount(0.5))]
    compared += [Setting(adamw, ONE_LATE, delay_compensation(1.0))]
    compared += [Setting(clipped, d, c, "AdamW, clip 1") for d, c in ((SYNCHRONOUS, none()), (ONE_LATE, DEFAULT))]
    compared += [Setting(nadam, ONE_LATE, c, "NAdam 0.99") for c in (none(), look_ahead(0.5))]
    compared += [Setting(muon, d, c) for d, c in ((SYNCHRONOUS, none()), (ONE_LATE, none()), (ONE_LATE, DEFAULT))]
    return compared + [Setting(adamw, EVERY_MICROBATCH, c) for c in (none(), look_ahead(0.5), DEFAULT)]


def sweep(text: Text) -> None:
    """Train synchronously at several learning rates."""
    for lr in (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3):
        for optimizer in (AdamW(lr, schedule=RATE), Muon(lr, weight_decay=0.01, schedule=RATE)):
            losses = [train(Setting(optimizer), text, seed, STEPS) for seed in SEEDS[:2]]
            sys.stderr.write(f"{optimizer.name} {lr:g}: {statistics.fmean(losses):.4f}\n")


def _job(job: tuple[Setting, int, int, int]) -> float:
    """Train once, in a process with one thread."""
    setting, seed, steps, num_held_out = job
    torch.set_num_threads(1)
    return train(setting, Text(num_held_out), seed, steps)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="only compare learning rates for synchronous training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, seeds = (QUICK_STEPS, QUICK_SEEDS) if options.quick else (STEPS, SEEDS)
    text = Text(num_held_out=1024 if options.quick else 8192)
    if options.sweep:
        sweep(text)
        return
    report = Report(f"late gradients: held-out loss after {steps} updates, mean of {len(seeds)} seeds")
    reference: dict[str, float] = {}
    compared = settings(quick=options.quick)
    jobs = [(setting, seed, steps, len(text.held_out) * 64) for setting in compared for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        results: list[float] = []
        for loss, (setting, seed, *_) in zip(pool.imap(_job, jobs), jobs, strict=True):
            sys.stderr.write(
                f"{len(results) + 1} of {len(jobs)}: {' '.join(setting.label.values())}, seed {seed}: {loss:.4f}\n"
            )
            results.append(loss)
    for i, setting in enumerate(compared):
        losses = results[i * len(seeds) : (i + 1) * len(seeds)]
        mean = statistics.fmean(losses)
        against = reference.setdefault(setting.note or setting.optimizer.name, mean)
        if setting.note == "NAdam 0.99":
            against = reference["AdamW"]
        gap = mean / against - 1
        report.rows.append({**setting.label, "loss": round(mean, 4), "gap": f"{gap:+.2%}",
                            "seeds": f"{min(losses):.3f} to {max(losses):.3f}"})  # fmt: skip
        sys.stderr.write(f"{report.rows[-1]}\n")
        if setting.delays == ONE_LATE and setting.correction == DEFAULT and not options.quick:
            target = "<= 0.01" if setting.optimizer.name == "AdamW" and not setting.note else "<= 0.02"
            report.check(f"{setting.note or setting.optimizer.name}, default against synchronous: gap", gap, target)
    if options.quick:
        none_gap, default_gap = (float(report.rows[i]["loss"]) / reference["AdamW"] - 1 for i in (1, 2))
        report.check("default's gap / gap without correction (short run)", default_gap / none_gap, "< 1")
    report.finish(options.json)


if __name__ == "__main__":
    main()
