"""A job: a model, a loss, an optimizer and data. Training it returns a run.

job = ravnest.Job(model=lambda: GPT(config), loss=loss_fn, optimizer=ravnest.AdamW(3e-4), data=loader)
run = job.train(steps=1000, on="local:4")
run.state_dict()

Each run has a directory, by default a new one under `runs/`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ravnest.config import TrainingConfig
from ravnest.core.config import require
from ravnest.errors import FixedBatchSize, TraceError, WeightsError
from ravnest.events import Callback
from ravnest.graph import Program, trace
from ravnest.graph.batch import batch_size_of, flatten, split_batch
from ravnest.graph.pretrained import Pretrained
from ravnest.graph.verify import verify
from ravnest.pipeline.optimizers import AdamW, Optimizer
from ravnest.profiling.speed import Workload
from ravnest.run.callback_thread import CallbackThread
from ravnest.run.checkpoint.format import Checkpoint
from ravnest.run.checkpoint.resume import check_same, open_checkpoint
from ravnest.run.checkpoint.writer import fetch_checkpoint, is_url
from ravnest.run.data import Batches, Weight, sample_weights
from ravnest.run.driver import train
from ravnest.run.event_feed import EventFeed
from ravnest.run.metrics import ProgressView
from ravnest.run.model_check import CannotVerify, check_model, progress_messages, verification_folder
from ravnest.run.result import Run
from ravnest.run.stop import StopRequest
from ravnest.run.stream import EventStream
from ravnest.run.traced_job import TracedJob
from ravnest.trackers import make_trackers

__all__ = ["Job", "Run"]

_MAX_BATCH_EFFECT, _NOTED_BATCH_EFFECT = 0.1, 0.005  # of the loss
_FEW_SAMPLES = 2  # of a model that is verified on the disk; layers such as batch norm do not take 1


def new_folder(folder: Path | str | None, name: str) -> Path:
    """Return the directory of a new run: the given one, or a new one under `runs/`."""
    try:
        return _new_folder(folder, name)
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        raise ValueError(f"the directory of the run cannot be made: {where}; choose another with --run-dir") from error


def _new_folder(folder: Path | str | None, name: str) -> Path:
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


def _described(given: Any) -> str:
    is_plain = given is None or isinstance(given, str | int | float | type)
    return repr(given) if is_plain else f"a {type(given).__module__}.{type(given).__name__}"


@dataclass
class Job:
    """A training job.

    Args:
        model: A module, a function that builds one, or `ravnest.pretrained(folder, function)`; without a module, no
            process holds the whole model.
        loss: A function of the model's output and the targets that returns the loss, or the loss and a dict of further
            values to report, as tensors. None: a batch is the inputs alone, and the model returns the loss.
        data: An iterable of batches `(inputs, targets)`; see the page on data for other forms. A list or loader starts
            over when it ends; an iterator ends the run.
        optimizer: The optimizer. Default: AdamW.
        validation: An iterable of held-out batches, in the form of `data`. Default: none.
        weight: A function of a batch that returns the weight of each sample in the loss of its batch, as a tensor. For
            a loss that is a mean over tokens: the number of tokens of each sample. Default: 1 for every sample.
        name: The name of the job, for its directory. Default: "run".
        config: How to train; see `TrainingConfig`.
        tokenizer: For `ravnest generate`: an object with `encode(text)` and `decode(ids)`, such as a tokenizer of
            `transformers`. Default: none.
        source: The file that defines the job, if one does.
        arguments: The command-line arguments of that file. Default: none.
        callbacks: Callbacks of every training of this job. Default: none.
    """

    model: nn.Module | Callable[[], nn.Module] | Pretrained
    loss: Callable[..., Any] | None
    data: Iterable[Any]
    optimizer: Optimizer = field(default_factory=AdamW)
    validation: Iterable[Any] | None = None
    weight: Weight | None = None
    name: str = "run"
    config: TrainingConfig = field(default_factory=TrainingConfig)
    tokenizer: Any = None
    source: Path | None = None
    arguments: Sequence[str] = ()
    callbacks: Sequence[Callback] = ()

    def train(
        self, config: TrainingConfig | None = None, *, show: ProgressView | None = None,
        callbacks: Iterable[Callback] = (), **changes: Any,
    ) -> Run:  # fmt: skip
        """Train on this machine or on PCs that join, and wait for the end.

        Args:
            config: How to train. Default: the job's own configuration.
            show: A view that shows the progress. Default: none.
            callbacks: Callbacks besides those of the job. Default: none.
            **changes: Fields of `TrainingConfig` that replace those of `config`.

        Returns:
            The finished run.

        Raises:
            ValueError: The job or the configuration is wrong; the message says what to change.
            RavnestError: Something outside the job went wrong, such as a worker that keeps failing.
        """
        return self._train(config, changes, show or ProgressView(), callbacks, StopRequest())

    def stream(
        self, config: TrainingConfig | None = None, *, show: ProgressView | None = None,
        callbacks: Iterable[Callback] = (), **changes: Any,
    ) -> EventStream:  # fmt: skip
        """Return the events of a training as an iterable. Training starts with the loop over it.

        Args:
            config: How to train. Default: the job's own configuration.
            show: A view that shows the progress. Default: none.
            callbacks: Callbacks besides those of the job. Default: none.
            **changes: Fields of `TrainingConfig` that replace those of `config`.

        Returns:
            The stream; its `run` is the finished run after the loop.
        """
        view = show or ProgressView()
        return EventStream(lambda forward, stop: self._train(config, changes, view, [forward, *callbacks], stop))

    def _train(
        self, config: TrainingConfig | None, changes: dict[str, Any], view: ProgressView,
        callbacks: Iterable[Callback], stop: StopRequest,
    ) -> Run:  # fmt: skip
        try:
            chosen = TrainingConfig(**{**vars(config or self.config), **changes})
            for given in (callbacks, self.callbacks):
                require(isinstance(given, Iterable), f"callbacks must be a list of callbacks, got {given!r}")
            every = [*callbacks, *self.callbacks, *make_trackers(chosen.track)]
            with CallbackThread(every, stop) as thread:
                return self._train_with(chosen, changes, view, EventFeed(self.name, thread.put), stop)
        finally:
            view.close()

    def _train_with(
        self, chosen: TrainingConfig, changes: dict[str, Any], view: ProgressView, feed: EventFeed, stop: StopRequest
    ) -> Run:
        if chosen.resume is not None and is_url(chosen.resume):
            folder = new_folder(chosen.run_dir, self.name)
            view.message(f"fetching the newest checkpoint from {chosen.resume}")
            chosen = replace(chosen, resume=fetch_checkpoint(str(chosen.resume), folder).parent.parent, run_dir=None)
        check_model(self.model)
        require(
            isinstance(self.optimizer, Optimizer),
            f"optimizer must be one of Ravnest's, such as ravnest.AdamW(lr=1e-3), got {_described(self.optimizer)}",
        )
        batches = Batches(self.data, chosen.epochs)
        try:
            job = self._traced(chosen, batches.examples, changes, view)
            return train(job, batches, self._validation(job.program, job.config), view, feed, stop)
        finally:
            batches.close()

    def _traced(
        self, config: TrainingConfig, examples: Sequence[Any], changes: dict[str, Any], view: ProgressView
    ) -> TracedJob:
        batch_size = self._batch_size(examples, config)
        if config.listens:
            view.message("tracing the model")
        with progress_messages(view, "building and tracing the model"):
            program = self._trace(config, examples)
        if program.pretrained is not None:
            for text in program.pretrained.notes:
                view.message(text)
            with progress_messages(view, f"reading the weights in {program.pretrained.folder.folder}"):
                program.pretrained.check_values((*program.state, *program.idle))
        start = self._resumed(config, program, changes, view)
        if start is not None:
            config = replace(config, seed=start.manifest.seed)
        is_verified = False
        if config.verify:
            with progress_messages(view, "comparing the traced program with the model"):
                is_verified = self._verify(program, examples, config, view)
        if program.untraced and not is_verified:
            view.message(f"autograd replaces a backward pass of the model's own: {'; '.join(program.untraced)}")
        folder = self._folder(config, start)
        if self.source is not None:
            arguments = f"{json.dumps(list(self.arguments))}\n" if self.arguments else ""
            (folder / "job.txt").write_text(f"{self.source.resolve()}\n{arguments}")  # for `ravnest export`
        return TracedJob(program, self.optimizer, config, batch_size, folder, start, self.weight)

    def _trace(self, config: TrainingConfig, examples: Sequence[Any]) -> Program:
        """Trace the model; batches that are not split may have a fixed size."""
        first, *others = examples
        try:
            program = trace(self.model, self.loss, first, others=others, max_length=config.max_length)
        except FixedBatchSize:
            if config.microbatches_per_step != 1:
                raise
            program = trace(
                self.model, self.loss, first, others=others, max_length=config.max_length, dynamic_batch=False
            )
        if not program.outputs[0].grad:
            raise ValueError(
                "the loss does not depend on any trainable parameter: check that it uses the model's output, without "
                ".detach() and torch.no_grad(), and that a parameter has requires_grad=True"
            )
        return program

    def _verify(self, program: Program, examples: Sequence[Any], config: TrainingConfig, view: ProgressView) -> bool:
        """Compare the program with the model on one microbatch; returns False if it is too big for this machine."""
        batch_size = self._batch_size(examples, config)
        samples = config.microbatch_of(batch_size)
        try:
            folder = verification_folder(program, config.run_dir or config.resume)
        except CannotVerify as error:
            view.message(f"not verified: {error}")
            return False
        if folder is not None:
            samples = min(samples, _FEW_SAMPLES) if program.has_batch_dimension else samples
            view.message(f"the model is too big for the free memory: comparing it with the traced program in {folder}")
        batches = [program.feed(batch) for batch in examples]
        first = batches[0]
        size = program.feed.size_of(first)
        second = program.feed.slice(first, samples, 2 * samples) if size > samples else None
        weights = sample_weights(program, first, self.weight, size)
        result = verify(
            program, self.model, self.loss, program.feed.slice(first, 0, samples), seed=config.seed, second=second,
            weights=(float(weights[:samples].sum()), float(weights[samples : 2 * samples].sum())), folder=folder,
        )  # fmt: skip
        if not isfinite(result.loss) and bool(weights[:samples].sum()):
            raise ValueError(
                f"the loss of the first batch is {result.loss}: check the data and the loss, for example for a "
                "division by zero or a logarithm of 0"
            )
        if result.gradient_effect > _MAX_BATCH_EFFECT:
            raise ValueError(
                "a backward pass of the model's own, of an autograd function or a hook, depends on the batch as a "
                f"whole: the gradient of two microbatches is {result.gradient_effect:.0%} off the sum of theirs, so "
                "splitting batches would change what is trained. Make it linear in the gradient of each sample, or use "
                "microbatches_per_step=1 (--microbatches-per-step 1), which does not split batches"
            )
        self._check_batch_effect(result.batch_effect, view)
        smallest = min(batches, key=lambda leaves: sum(leaf.numel() for leaf in leaves))
        if [leaf.shape for leaf in smallest] != [leaf.shape for leaf in first]:
            self._verify_smallest(program, smallest, -(-batch_size // samples), config.seed, folder)
        return True

    def _verify_smallest(
        self, program: Program, leaves: Sequence[Tensor], count: int, seed: int, folder: Path | None
    ) -> None:
        """Compare the program with the model on the smallest microbatch of another batch, split into `count`."""
        size = program.feed.size_of(leaves)
        samples = max(1, size // count)
        try:
            verify(program, self.model, self.loss, program.feed.slice(leaves, 0, samples), seed=seed, folder=folder)
        except TraceError as error:
            raise TraceError(
                f"a batch of {size} samples, split into microbatches of {samples}, cannot be trained: {error}. Leave "
                "smaller batches out (drop_last=True), or use fewer microbatches (--microbatches-per-step)"
            ) from error

    def _check_batch_effect(self, effect: float, view: ProgressView) -> None:
        if effect > _MAX_BATCH_EFFECT:
            raise ValueError(
                f"the loss depends on the batch as a whole: that of two microbatches is {effect:.0%} off the mean of "
                "their losses, so splitting batches would change what is trained. Use a mean over samples, give the "
                "weights of the samples with ravnest.Job(weight=...), or set "
                "microbatches_per_step=1 (--microbatches-per-step 1), which does not split batches"
            )
        if effect > _NOTED_BATCH_EFFECT:
            view.message(
                f"the loss of two microbatches together is {effect:.1%} off the mean of their losses, for example "
                "because padding is left out of its mean; ravnest.Job(weight=...) gives the weights of the samples, "
                "--microbatches-per-step 1 does not split batches"
            )

    def _resumed(
        self, config: TrainingConfig, program: Program, changes: dict[str, Any], view: ProgressView
    ) -> Checkpoint | None:
        """Return the checkpoint to resume from, if there is one and it belongs to this job."""
        if config.resume is None:
            return None
        try:
            start = open_checkpoint(config.resume, config.run_dir, view)
        except WeightsError:
            if not config.listens:
                raise
            return None  # its nodes may have replicas
        seed = start.manifest.seed
        require(changes.get("seed", seed) == seed, f"the run has seed {seed}, which cannot be changed")
        require(
            config.steps is None or config.steps >= start.step,
            f"steps must be >= {start.step}, the steps that the run has made, got {config.steps}",
        )
        for text in check_same(start, program, self.optimizer):
            view.message(text)
        return start

    def _folder(self, config: TrainingConfig, start: Checkpoint | None) -> Path:
        """Return the run's directory."""
        if config.resume is None:
            return new_folder(config.run_dir, self.name)
        return Path(config.resume).resolve() if start is None else resumed_folder(config.run_dir, start)

    def workload(self) -> Workload:
        """Return the job's program at the size of a microbatch, to measure the speed of a machine."""
        check_model(self.model)
        batches = Batches(self.data)
        try:
            batch_size = self._batch_size(batches.examples, self.config)
            return Workload(self._trace(self.config, batches.examples), self.config.microbatch_of(batch_size))
        finally:
            batches.close()

    def _batch_size(self, examples: Sequence[Any], config: TrainingConfig) -> int:
        """Return the number of samples in the largest batch: the declared one, or that of the first batches."""
        has_loss = self.loss is not None
        sizes = [batch_size_of(flatten(split_batch(batch, has_loss), "batch")[1]) for batch in examples]
        largest = max(sizes)
        require(min(sizes) > 0, "a batch must have at least one sample, got 0")
        require(
            config.max_batch_size is None or config.max_batch_size >= largest,
            f"a batch has {largest} samples, max_batch_size is {config.max_batch_size}",
        )
        return config.max_batch_size or largest

    def _validation(self, program: Program, config: TrainingConfig) -> Callable[[], Sequence[Any]] | None:
        """Return a function that returns the held-out batches; the first one is checked now."""
        if self.validation is None:
            return None
        held_out = self.validation
        if isinstance(held_out, Iterator):  # it can be read once
            held_out = list(islice(held_out, config.validation_batches))
        for batch in islice(held_out, 1):
            try:
                program.feed(batch)
            except ValueError as error:
                raise ValueError(f"the held-out data do not match the data: {error}") from error
        return lambda: list(islice(held_out, config.validation_batches))
