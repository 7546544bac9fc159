"""A training run on this machine: feeds a crew of workers, follows what they report, and keeps what they made.

The run folder has `plan.json` (who does what), `metrics.jsonl` (a line per update and per evaluation), a log per node,
and at the end `model.safetensors`. This process holds batches and losses, never activations or optimizer state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
from torch import Tensor

from .core.errors import NotFinite, RavnestError
from .core.messages import Evaluate, Forward
from .core.metrics import StageMetrics
from .core.orders import EndAfter, Evaluated, Lost, Ready, Save, Saved, Updated
from .core.schedule import Rule
from .crew import Acknowledged, Crew, Reported
from .data import Batches, pieces
from .graph import Program, Stage, dump
from .interrupt import Interrupt
from .modelfile import gather, write_first_weights
from .node.orders import Assign
from .progress import Progress
from .record import Record, Values
from .runtime.freight import Freight
from .runtime.roles import roles
from .runtime.settings import Settings

__all__ = ["LocalRun", "Work"]

_START_S = 300.0


@dataclass(frozen=True)
class Work:
    """All that a run needs to know."""

    program: Program
    stages: Sequence[Stage]
    names: Sequence[str]
    rules: Sequence[Rule]
    settings: Settings
    threads: int
    max_batch: int
    folder: Path
    cores: Sequence[int] | None = None
    patience_s: float = 600.0


class LocalRun:
    """Feeds, follows, saves. `show` is called after every update."""

    def __init__(self, work: Work, show: Callable[[Progress], None]) -> None:
        self.work, self.show = work, show
        self.progress = Progress()
        self.losses: list[float] = []
        self._freight = Freight(work.program.inputs, "none", max_batch=work.max_batch)
        self._batched = [bool(v.shape) and isinstance(v.shape[0], tuple) for v in work.program.inputs]
        self._accumulate = work.rules[0].accumulate
        self._record = Record([v.name for v in work.program.outputs], self._accumulate, len(work.stages))
        self.evaluations = self._record.evaluations
        self._fed = self._acknowledged = self._samples = 0
        self._ready: set[int] = set()
        self._saved: set[int] = set()
        self._stop = Interrupt()
        self._began = 0.0

    def run(
        self, batches: Batches, steps: int | None, validate: Callable[[], Sequence[Any]] | None, validate_every: int
    ) -> None:
        """Train for `steps` updates, or until the batches end.

        Ctrl-C ends after the window that is being fed, and saves; a second one ends at once. What goes wrong with
        the data is told after what was trained before it has been saved.
        """
        work = self.work
        try:
            with Crew(work.names, work.folder) as crew, (work.folder / "metrics.jsonl").open("w") as log:
                self._crew, self._log = crew, log
                crew.start([dump(s) for s in work.stages], self._assigns())
                self._until(lambda: len(self._ready) == len(work.stages), _START_S)
                self._began = time.monotonic()
                with Interrupt() as self._stop:
                    wrong = self._feed_all(batches, steps, validate, validate_every)
                    self._finish(None if wrong else validate)
        finally:
            for path in work.folder.glob(".*.safetensors"):
                path.unlink(missing_ok=True)
        if wrong is not None:
            wrong.add_note(f"The {len(self.losses)} steps before it are saved in {work.folder / 'model.safetensors'}.")
            raise wrong

    def _assigns(self) -> list[Assign]:
        work = self.work
        given = roles(work.stages, [r.delay for r in work.rules])
        return [
            Assign(
                settings=work.settings, rule=rule, role=role, max_batch=work.max_batch, threads=work.threads,
                core=work.cores[stage.index] if work.cores else -1, weights=self._first_weights(stage),
            )
            for stage, rule, role in zip(work.stages, work.rules, given, strict=True)
        ]  # fmt: skip

    def _first_weights(self, stage: Stage) -> str:
        path = self.work.folder / f".first-{stage.index}.safetensors"
        return str(path) if write_first_weights(self.work.program, stage, path) else ""

    def _feed_all(
        self, batches: Batches, steps: int | None, validate: Callable[[], Sequence[Any]] | None, every: int
    ) -> Exception | None:
        """Feed until the end; what went wrong with the user's data, if anything did."""
        window = 0
        while (steps is None or window < steps) and self._record.bad is None and not self._stop.asked:
            try:
                if validate is not None and every and window and window % every == 0:
                    self._evaluate(validate(), step=window, fresh=False)
                batch = batches.next()
                if batch is None:
                    break
                parts = self._parts(batch)
            except RavnestError:
                raise
            except Exception as error:  # the user's own iterator, or a batch that does not fit
                return error
            self._feed(window, parts)
            window += 1
        return None

    def _parts(self, batch: Any) -> list[list[Tensor]]:
        """A batch in microbatches that the workers expect."""
        parts = pieces(self.work.program.feed(batch), self._batched, self._accumulate)
        if (largest := max(map(self._size, parts))) > self.work.max_batch:
            raise ValueError(
                f"a batch has microbatches of {largest} samples, the first had {self.work.max_batch}: "
                "no batch may be larger than the first"
            )
        return parts

    def _feed(self, window: int, parts: Sequence[Sequence[Tensor]]) -> None:
        """Send one window. One with fewer samples than microbatches is filled up with the last, at no weight."""
        sizes = [self._size(part) for part in parts]
        missing = self._accumulate - len(parts)
        shares = [size / sum(sizes) for size in sizes] + [0.0] * missing
        for part, share in zip([*parts, *[parts[-1]] * missing], shares, strict=True):
            self._record.fed(self._fed, share)
            self._until(lambda: self._fed - self._acknowledged < self._ahead or self._record.bad is not None)
            self._crew.feed(Forward(self._fed, self._size(part), share), self._freight, part)
            self._fed += 1
        self._samples += sum(sizes)

    @property
    def _ahead(self) -> int:
        """How many microbatches may be on their way: enough that the root never waits for us."""
        return self.work.rules[0].depth + 2

    def _evaluate(self, batches: Sequence[Any], *, step: int, fresh: bool) -> None:
        """Send held-out batches through, a few at a time."""
        evaluation = self._record.begin_evaluation(step)
        for batch in batches:
            leaves = self.work.program.feed(batch)
            for part in pieces(leaves, self._batched, -(-self._size(leaves) // self.work.max_batch)):
                self._until(lambda: evaluation.num_waiting < self._ahead or self._record.bad is not None)
                if self._record.bad is not None or (self._stop.asked and not fresh):
                    break
                self._crew.feed(
                    Evaluate(evaluation.first + evaluation.sent, self._size(part), fresh), self._freight, part
                )
                evaluation.sent += 1
        evaluation.is_all_sent = True
        self._evaluated(self._record.conclude(evaluation))

    def _size(self, leaves: Sequence[Tensor]) -> int:
        """How many samples a batch has."""
        return len(next(t for t, is_batched in zip(leaves, self._batched, strict=True) if is_batched))

    def _until(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Handle events until something is so."""
        while not is_so():
            self._handle(self._crew.next(timeout_s or self.work.patience_s))

    def _handle(self, event: Any) -> None:
        match event:
            case Acknowledged():
                self._acknowledged += 1
            case Reported(report=Ready(stage=stage)):
                self._ready.add(stage)
            case Reported(report=Lost(microbatch=microbatch, values=values)):
                self._lost(microbatch, values)
            case Reported(report=Updated(metrics=metrics)):
                self._updated(metrics)
            case Reported(report=Evaluated(number=number, batch=batch, values=values)):
                self._evaluated(self._record.evaluated(number, batch, values))
            case Reported(report=Saved(stage=stage)):
                self._saved.add(stage)

    def _lost(self, microbatch: int, values: Values) -> None:
        if self._record.lost(microbatch, values):
            self._crew.tell(EndAfter(microbatch // self._accumulate))

    def _updated(self, metrics: StageMetrics) -> None:
        self.progress.stages[metrics.stage] = metrics
        for window, means in self._record.updated(metrics):
            self._window_done(window, means)

    def _window_done(self, window: int, means: list[float]) -> None:
        progress = self.progress
        progress.step = window + 1
        progress.loss, progress.metrics = means[0], dict(zip(self._record.labels[1:], means[1:], strict=True))
        progress.samples_per_s = self._samples / max(time.monotonic() - self._began, 1e-9)
        self.losses.append(means[0])
        self._write({"step": progress.step, "loss": means[0], **progress.metrics, "seconds": self._seconds(),
                     "stages": [msgspec.structs.asdict(m) for m in progress.stages.values()]})  # fmt: skip
        self.show(progress)

    def _evaluated(self, found: dict[str, float] | None) -> None:
        if found is None:
            return
        self.progress.validation = {name: value for name, value in found.items() if name != "step"}
        self._write({"evaluation": found["step"], **self.progress.validation, "seconds": self._seconds()})
        self.show(self.progress)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _write(self, line: dict[str, Any]) -> None:
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()

    _crew: Crew
    _log: IO[str]

    def _finish(self, validate: Callable[[], Sequence[Any]] | None) -> None:
        """Let what was fed come to its end, evaluate, and gather the weights."""
        end = self._fed // self._accumulate if self._record.bad is None else self._record.bad // self._accumulate
        self._crew.tell(EndAfter(end))
        self._until(lambda: self._record.bad is not None or self.progress.step >= end)
        if self._record.bad is not None:
            end = self._record.bad // self._accumulate
            self._until(lambda: all(self._record.updates_of(i) >= end for i in range(len(self.work.stages))))
        elif validate is not None and end:
            self._evaluate(validate(), step=end, fresh=True)
            self._until(lambda: not self._record.is_evaluating or self._record.bad is not None)
        self._save()
        if self._record.bad is not None:
            raise NotFinite(
                f"the loss is not a finite number in step {end + 1}, batch {end}, microbatch {self._record.bad}: "
                f"the weights before that step are in {self.work.folder / 'model.safetensors'}. "
                "Try a smaller learning rate, warm-up or clip_norm, and look at that batch"
            )

    def _save(self) -> None:
        folder, stages = self.work.folder, self.work.stages
        parts = [folder / f".part-{stage.index}.safetensors" for stage in stages]
        for stage, part in zip(stages, parts, strict=True):
            self._crew.tell_one(stage.index, Save(str(part)))
        self._until(lambda: len(self._saved) == len(stages))
        gather(self.work.program, stages, parts, folder / "model.safetensors", self.work.settings.seed)
