"""A job: a model, a loss, an optimizer and data. Training it returns a run.

job = ravnest.Job(model=lambda: GPT(config), loss=loss_fn, optimizer=ravnest.AdamW(3e-4), data=loader)
run = job.train(steps=1000, on="local:4")
run.state_dict()

A job file is an ordinary Python file that defines `job`. It runs on the requester's machine and nowhere else. Each run
has a directory, by default a new one under `runs/`.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ravnest.config import TrainingConfig
from ravnest.core.config import require
from ravnest.core.units import format_bytes
from ravnest.errors import FixedBatchSize, WeightsError
from ravnest.graph import Program, trace
from ravnest.graph.batch import batch_size_of, flatten, split_batch
from ravnest.graph.verify import verify
from ravnest.pipeline.optimizers import AdamW, Optimizer
from ravnest.profiling.host import host_memory
from ravnest.profiling.speed import Workload
from ravnest.run.checkpoint.format import Checkpoint
from ravnest.run.checkpoint.resume import check_same, open_checkpoint
from ravnest.run.checkpoint.writer import fetch_checkpoint, is_url
from ravnest.run.data import Batches, limited
from ravnest.run.driver import train
from ravnest.run.metrics import ProgressView
from ravnest.run.result import Run
from ravnest.run.traced_job import TracedJob

__all__ = ["Job", "Run", "JobFile", "load_job"]

_MAX_BATCH_EFFECT, _NOTED_BATCH_EFFECT = 0.1, 0.005  # of the loss
_VERIFY_COPIES = 4  # of the parameters: the model, the program's own, and the gradients of both


def new_folder(folder: Path | str | None, name: str) -> Path:
    """Return the directory of a new run: the given one, or a new one under `runs/`."""
    if folder is not None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if (path / "model.safetensors").exists():
            raise ValueError(f"{path} holds a finished run: choose another directory or remove it")
        return path.resolve()
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):
        path = base if not attempt else base.with_name(f"{base.name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path.resolve()
    raise ValueError(f"{base} and {base.name}-1 to {base.name}-999 exist: choose another directory")


def resumed_folder(folder: Path | str | None, start: Checkpoint) -> Path:
    """Return the directory of a resumed run: its own, or the given one."""
    if folder is None or Path(folder).resolve() == start.run:
        return start.run
    return new_folder(folder, "")


@dataclass
class Job:
    """A training job.

    Args:
        model: A module, or a function that builds one; with a function, no process holds the whole model.
        loss: A function of the model's output and the targets that returns the loss, or a dict whose first value is
            the loss. None: a batch is the inputs alone, and the model returns the loss.
        data: An iterable of batches `(inputs, targets)`. A list or loader starts over when it ends; an iterator ends
            the run.
        optimizer: The optimizer. Default: AdamW.
        validation: An iterable of held-out batches, in the form of `data`. Default: none.
        name: The name of the job, for its directory. Default: "run".
        config: How to train; see `TrainingConfig`.
        tokenizer: For `ravnest generate`: an object with `encode(text)` and `decode(ids)`, such as a tokenizer of
            `transformers`. Default: none.
        source: The file that defines the job, if one does.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[..., Any] | None
    data: Iterable[Any]
    optimizer: Optimizer = field(default_factory=AdamW)
    validation: Iterable[Any] | None = None
    name: str = "run"
    config: TrainingConfig = field(default_factory=TrainingConfig)
    tokenizer: Any = None
    source: Path | None = None

    def train(self, config: TrainingConfig | None = None, *, show: ProgressView | None = None, **changes: Any) -> Run:
        """Train on this machine or on PCs that join, and wait for the end.

        Args:
            config: How to train. Default: the job's own configuration.
            show: A view that shows the progress. Default: none.
            **changes: Fields of `TrainingConfig` that replace those of `config`.

        Returns:
            The finished run.

        Raises:
            ValueError: The job or the configuration is wrong; the message says what to change.
            RavnestError: Something outside the job went wrong, such as a worker that keeps failing.
        """
        chosen = TrainingConfig(**{**vars(config or self.config), **changes})
        view = show or ProgressView()
        try:
            if chosen.resume is not None and is_url(chosen.resume):
                folder = new_folder(chosen.run_dir, self.name)
                view.message(f"fetching the newest checkpoint from {chosen.resume}")
                chosen = replace(
                    chosen, resume=fetch_checkpoint(str(chosen.resume), folder).parent.parent, run_dir=None
                )
            batches = Batches(self.data)
            job = self._traced(chosen, batches.first, changes, view)
            return train(job, limited(batches, job.config.epochs), self._validation(job.config), view)
        finally:
            view.close()

    def _traced(self, config: TrainingConfig, example: Any, changes: dict[str, Any], view: ProgressView) -> TracedJob:
        if config.listens:
            view.message("tracing the model")
        program = self._trace(config, example)
        start, folder = self._resumed(config, program, changes, view)
        if start is not None:
            config = replace(config, seed=start.manifest.seed)
        is_verified = config.verify and self._verify(program, example, config, view)
        if program.untraced and not is_verified:
            view.message(f"autograd replaces a backward pass of the model's own: {'; '.join(program.untraced)}")
        if self.source is not None:
            (folder / "job.txt").write_text(f"{self.source.resolve()}\n")  # for `ravnest export`
        return TracedJob(program, self.optimizer, config, self.batch_size(example), folder, start)

    def _trace(self, config: TrainingConfig, example: Any) -> Program:
        """Trace the model; batches that are not split may have a fixed size."""
        try:
            return trace(self.model, self.loss, example)
        except FixedBatchSize:
            if config.microbatches_per_step != 1:
                raise
            return trace(self.model, self.loss, example, dynamic_batch=False)

    def _verify(self, program: Program, example: Any, config: TrainingConfig, view: ProgressView) -> bool:
        """Compare the program with the model on one microbatch; returns False if it is too big for this machine."""
        state_bytes = sum(item.num_bytes for item in (*program.state, *program.idle))
        needed_bytes, usable_bytes = _VERIFY_COPIES * state_bytes, host_memory().usable_bytes
        if needed_bytes > usable_bytes:
            view.message(
                f"not verified: comparing the traced program with the model needs {format_bytes(needed_bytes)} of "
                f"memory, {format_bytes(usable_bytes)} are free"
            )
            return False
        batch_size = self.batch_size(example)
        samples = config.microbatch_of(batch_size)

        def part(start: int) -> list[Tensor]:
            return [
                leaf[start : start + samples] if value.shape and isinstance(value.shape[0], tuple) else leaf
                for leaf, value in zip(program.feed(example), program.inputs, strict=True)
            ]

        second = part(samples) if batch_size > samples else None
        result = verify(program, self.model, self.loss, part(0), seed=config.seed, second=second)
        if result.batch_effect > _MAX_BATCH_EFFECT:
            raise ValueError(
                f"the loss depends on the batch as a whole: that of two microbatches is {result.batch_effect:.0%} off "
                "the mean of their losses, so splitting batches would change what is trained. Use a mean over samples, "
                "or microbatches_per_step=1 (--microbatches-per-step 1), which does not split batches"
            )
        if result.gradient_effect > _MAX_BATCH_EFFECT:
            raise ValueError(
                "a backward pass of the model's own, of an autograd function or a hook, depends on the batch as a "
                f"whole: the gradient of two microbatches is {result.gradient_effect:.0%} off the sum of theirs, so "
                "splitting batches would change what is trained. Make it linear in the gradient of each sample, or use "
                "microbatches_per_step=1 (--microbatches-per-step 1), which does not split batches"
            )
        if result.batch_effect > _NOTED_BATCH_EFFECT:
            view.message(
                f"the loss of two microbatches together is {result.batch_effect:.1%} off the mean of their losses, for "
                "example because padding is left out of its mean; --microbatches-per-step 1 does not split batches"
            )
        return True

    def _resumed(
        self, config: TrainingConfig, program: Program, changes: dict[str, Any], view: ProgressView
    ) -> tuple[Checkpoint | None, Path]:
        """Return the checkpoint to resume from, if it belongs to this job, and the run's directory."""
        if config.resume is None:
            return None, new_folder(config.run_dir, self.name)
        try:
            start = open_checkpoint(config.resume, config.run_dir, view)
        except WeightsError:
            if not config.listens:
                raise
            return None, Path(config.resume).resolve()  # its nodes may have replicas
        seed = start.manifest.seed
        require(changes.get("seed", seed) == seed, f"the run has seed {seed}, which cannot be changed")
        require(
            config.steps is None or config.steps >= start.step,
            f"steps must be >= {start.step}, the steps that the run has made, got {config.steps}",
        )
        for text in check_same(start, program, self.optimizer):
            view.message(text)
        return start, resumed_folder(config.run_dir, start)

    def workload(self) -> Workload:
        """Return the job's program at the size of a microbatch, to measure the speed of a machine."""
        example = Batches(self.data).first
        return Workload(trace(self.model, self.loss, example), self.config.microbatch_of(self.batch_size(example)))

    def batch_size(self, example: Any) -> int:
        """Return the number of samples in a batch."""
        return batch_size_of(flatten(split_batch(example, self.loss is not None), "batch")[1])

    def _validation(self, config: TrainingConfig) -> Callable[[], Sequence[Any]] | None:
        if self.validation is None:
            return None
        held_out = self.validation
        return lambda: list(islice(held_out, config.validation_batches))


@dataclass(frozen=True)
class JobFile:
    """The job of a file, and its optional `after(run)`, which returns a text to print at the end."""

    job: Job
    after: Callable[[Any], str] | None


def load_job(path: Path) -> JobFile:
    """Run a job file; raises `ValueError` if it does not define a job."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist or is not a file")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        names = runpy.run_path(str(path), run_name="ravnest_job")
    except SyntaxError as error:
        raise ValueError(f"{path} is not valid Python: {error}") from error
    job = names.get("job")
    if not isinstance(job, Job):
        problem = "it defines no 'job'" if job is None else f"its 'job' is a {type(job).__name__}"
        raise ValueError(f"{path}: {problem}. Write: job = ravnest.Job(model=..., loss=..., data=...)")
    return JobFile(job, names.get("after"))
