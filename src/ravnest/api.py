"""What a user writes: a job is a model, a loss, an optimizer and data; training it gives a run.

job = ravnest.Job(model=lambda: GPT(config), loss=loss_fn, optimizer=ravnest.AdamW(3e-4), data=loader)
run = job.train(steps=1000, on="local:4")
run.state_dict()
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from .checkpoints import Checkpoint
from .core.config import require
from .core.metrics import StageMetrics
from .data import Batches
from .graph import Program, trace
from .graph.batch import batch_size_of, flatten, split_batch
from .keeping import CheckpointWishes
from .local import LocalRun
from .localplan import LocalPlan, Wishes, plan_local
from .localrate import Cores
from .localwork import Work
from .profile.mix import Workload
from .progress import Show
from .remote import bring, is_url
from .resuming import check_same, describe, open_checkpoint, plan_as_before
from .runtime.optimizers import AdamW, Optimizer
from .runtime.settings import Settings
from .training import Training, num_cores

__all__ = ["Job", "Run", "Training", "limited", "new_folder"]


@dataclass
class Job:
    """What to train. `model` is a module, or a function that builds one (then nobody ever holds it whole).

    `data` is an iterable of batches `(inputs, targets)`; `validation` is too. With `loss=None` a batch is the inputs
    alone and the model returns the loss.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[..., Any] | None
    data: Iterable[Any]
    optimizer: Optimizer = field(default_factory=AdamW)
    validation: Iterable[Any] | None = None
    name: str = "run"
    training: Training = field(default_factory=Training)
    source: Path | None = None  # the file that defines it, if one does

    def train(self, training: Training | None = None, *, show: Show | None = None, **changes: Any) -> Run:
        """Train, here or on whoever joins, and wait for the end. `changes` are fields of `Training`."""
        how = Training(**{**vars(training or self.training), **changes})
        shown = show or Show()
        if how.resume is not None and is_url(how.resume):
            folder = new_folder(how.folder, self.name)
            shown.told(f"bringing the newest checkpoint from {how.resume}")
            how = replace(how, resume=bring(str(how.resume), folder).parent.parent, folder=None)
        if how.listens:
            from .onfleet import train_on_fleet  # which needs all that a coordinator needs

            return train_on_fleet(self, how, shown)
        batches = Batches(self.data)
        program = trace(self.model, self.loss, batches.first)
        start = None
        if how.resume is not None:
            start = self._take_up(how, program, changes, shown)
            how = replace(how, seed=start.manifest.seed)
        plan = plan_local(program, self.optimizer, how.correction, self._wishes(how, batches.first))
        if start is not None:
            plan = _go_on(start, program, plan, batches, shown, plan_anew=how.memory is not None)
        folder = new_folder(how.folder, self.name) if start is None else resumed_folder(how.folder, start)
        plan.write(folder / "plan.json")
        if self.source is not None:
            (folder / "job.txt").write_text(f"{self.source.resolve()}\n")  # for `ravnest export`
        settings = self.settings(how)
        work = Work(
            program=program, stages=plan.stages, names=[p.node for p in plan.plans], rules=plan.rules,
            settings=settings, threads=how.num_threads, max_batch=plan.max_microbatch, folder=folder,
            cores=how.core_of, about=describe(program, self.optimizer, plan, how.seed), start=start,
            checkpoints=CheckpointWishes(every=how.checkpoint_every, keep=how.keep_checkpoints, to=how.checkpoint_to),
        )  # fmt: skip
        shown.planned(plan)
        run = LocalRun(work, shown)
        validate = self.validate(how)
        try:
            run.run(limited(batches, how.epochs), how.steps, validate, how.validate_every)
        finally:
            shown.close()
        return Run(folder, plan, run.losses, run.evaluations, dict(run.progress.stages), run.progress.samples_per_s)

    def _take_up(self, how: Training, program: Program, changes: Mapping[str, Any], show: Show) -> Checkpoint:
        """The checkpoint to go on from, if it is of this job."""
        assert how.resume is not None
        start = open_checkpoint(how.resume, how.folder, show)
        seed = start.manifest.seed
        require(changes.get("seed", seed) == seed, f"the run has seed {seed}, which cannot be changed")
        require(
            how.steps is None or how.steps >= start.step,
            f"{start.step} steps have been made already: {how.steps} in all is less",
        )
        for sentence in check_same(start, program, self.optimizer):
            show.told(sentence)
        return start

    def settings(self, how: Training) -> Settings:
        return Settings(
            optimizer=self.optimizer, correction=how.correction, seed=how.seed, recompute=how.recompute,
            autocast=how.autocast, compression=how.compression,
        )  # fmt: skip

    def workload(self) -> Workload:
        """Its program, at the size of a microbatch: what a machine's speed can be measured on."""
        example, how = Batches(self.data).first, self.training
        size = self.batch_size(example)
        return Workload(trace(self.model, self.loss, example), how.microbatch_of(size))

    def batch_size(self, example: Any) -> int:
        return batch_size_of(flatten(split_batch(example, self.loss is not None), "batch")[1])

    def _wishes(self, how: Training, example: Any) -> Wishes:
        return Wishes(
            nodes=how.num_nodes, batch_size=self.batch_size(example), accumulate=how.accumulate,
            microbatch=how.microbatch, synchronous=how.mode == "sync", max_staleness=how.max_staleness,
            memory_bytes=how.memory_bytes, recompute=how.recompute, speeds=how.speed_of,
            cores=Cores(count=num_cores(), threads=how.num_threads, pinned=how.core_of),
        )  # fmt: skip

    def validate(self, how: Training) -> Callable[[], Sequence[Any]] | None:
        """What gives the held-out batches, if there are any."""
        if self.validation is None:
            return None
        held_out = self.validation
        return lambda: list(islice(held_out, how.validation_batches))


@dataclass(frozen=True)
class Run:
    """What a training left: its folder, its plan, its losses step by step, and each stage's last account."""

    folder: Path
    plan: LocalPlan
    losses: list[float]
    evaluations: list[dict[str, float]]
    stages: dict[int, StageMetrics]
    samples_per_s: float

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights under the model's own names, tied ones included."""
        return read_model(self.folder / "model.safetensors")


def read_model(path: Path | str) -> dict[str, Tensor]:
    """The weights in a `model.safetensors` of a run."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        ties = json.loads((file.metadata() or {}).get("ties", "{}"))
    tensors: dict[str, Tensor] = load_file(path)
    return {**tensors, **{name: tensors[kept] for name, kept in ties.items()}}


def new_folder(folder: Path | str | None, name: str) -> Path:
    """The run's folder: the one asked for, or a new one under `runs/`."""
    if folder is not None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if (path / "model.safetensors").exists():
            raise ValueError(f"{path} holds a finished run already: choose another folder or remove it")
        return path.resolve()
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):
        path = base if not attempt else base.with_name(f"{base.name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path.resolve()
    raise ValueError(f"{base} and a thousand like it exist already")


def _go_on(
    start: Checkpoint, program: Program, plan: LocalPlan, batches: Batches, show: Show, *, plan_anew: bool
) -> LocalPlan:
    """The plan that the run had, if it can be, and the data at the place where they were."""
    if not plan_anew:
        plan, sentence = plan_as_before(plan, program, start.manifest)
        show.told(sentence)
    if start.manifest.batches:
        show.told(f"passing over {start.manifest.batches} batches of the data, which were used before")
        batches.skip(start.manifest.batches)
    return plan


def resumed_folder(folder: Path | str | None, start: Checkpoint) -> Path:
    """The run's own folder, or another that was asked for."""
    if folder is None or Path(folder).resolve() == start.run:
        return start.run
    return new_folder(folder, "")


class _Epochs(Batches):
    """Batches that end after a number of epochs."""

    def __init__(self, batches: Batches, epochs: int) -> None:
        self._inner, self._most = batches, epochs
        self.first = batches.first

    def next(self) -> Any | None:
        batch = self._inner.next()
        return None if self._inner.epochs >= self._most else batch


def limited(batches: Batches, epochs: int | None) -> Batches:
    return batches if epochs is None else _Epochs(batches, epochs)
