"""A training run on this machine: feeds a crew of workers, follows what they report, and keeps what they made.

The run folder has `plan.json` (who does what), `metrics.jsonl` (a line per update and per evaluation), a log per node,
`checkpoints` if they are wanted, and at the end `model.safetensors`. This process holds batches and losses, never
activations or optimizer state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch import Tensor

from .core.errors import NotFinite, RavnestError
from .core.messages import Evaluate, Forward
from .core.metrics import StageMetrics
from .core.orders import EndAfter, Evaluated, Lost, Ready, Save, Saved, Updated
from .crew import Acknowledged, Crew, Reported
from .data import Batches, Microbatches
from .graph import dump
from .interrupt import Interrupt
from .keeping import Keeping
from .localwork import Work, assigns
from .metricsfile import MetricsFile
from .modelfile import gather, unused_tensors
from .progress import Progress, Show
from .record import Record
from .runtime.freight import Freight

__all__ = ["LocalRun"]

_START_S = 300.0


class LocalRun:
    """Feeds, follows, saves. `show` is told of every update."""

    def __init__(self, work: Work, show: Show) -> None:
        self.work, self.show = work, show
        self.progress = Progress(step=work.first)
        self.losses: list[float] = []
        self._freight = Freight(work.program.inputs, "none", max_batch=work.max_batch)
        self._accumulate = work.rules[0].accumulate
        self._microbatches = Microbatches(work.program, self._accumulate, work.max_batch)
        labels = [v.name for v in work.program.outputs]
        self._record = Record(labels, self._accumulate, len(work.stages), first=work.first)
        self.evaluations = self._record.evaluations
        self._fed = self._acknowledged = work.first * self._accumulate
        self._samples = 0
        self._ready: set[int] = set()
        self._saved: set[int] = set()
        self._stop = Interrupt()
        self._began = 0.0
        self._is_log_full = False
        self._keeping: Keeping | None = None
        if work.checkpoints.every:
            unused = unused_tensors(work.program, work.settings.seed)
            self._keeping = Keeping(work.folder, work.checkpoints, work.about, len(work.stages), unused)

    def run(
        self, batches: Batches, steps: int | None, validate: Callable[[], Sequence[Any]] | None, validate_every: int
    ) -> None:
        """Train for `steps` updates, or until the batches end.

        Ctrl-C ends after the window that is being fed, and saves; a second one ends at once. What goes wrong with
        the data is told after what was trained before it has been saved.
        """
        work = self.work
        try:
            metrics = MetricsFile(work.folder / "metrics.jsonl", after=work.first)
            with Crew(work.names, work.folder) as crew, metrics as log:
                self._crew, self._log = crew, log
                crew.start([dump(s) for s in work.stages], assigns(work))
                self._until(lambda: len(self._ready) == len(work.stages), _START_S)
                self._began = time.monotonic()
                with Interrupt() as self._stop:
                    wrong = self._feed_all(batches, steps, validate, validate_every)
                    self._finish(None if wrong else validate)
        finally:
            if self._keeping is not None:
                self._keeping.close()
            for path in work.folder.glob(".*.safetensors"):
                path.unlink(missing_ok=True)
        if wrong is not None:
            wrong.add_note(f"The {len(self.losses)} steps before it are saved in {work.folder / 'model.safetensors'}.")
            raise wrong

    def _feed_all(
        self, batches: Batches, steps: int | None, validate: Callable[[], Sequence[Any]] | None, every: int
    ) -> Exception | None:
        """Feed until the end; what went wrong with the user's data, if anything did."""
        window = self.work.first
        while (steps is None or window < steps) and self._record.bad is None and not self._stop.asked:
            try:
                if validate is not None and every and window and window % every == 0:
                    self._evaluate(validate(), step=window, fresh=False)
                batch = batches.next()
                if batch is None:
                    break
                parts = self._microbatches.of(batch)
            except RavnestError:
                raise
            except Exception as error:  # the user's own iterator, or a batch that does not fit
                return error
            self._order_checkpoint(window, steps)
            self._feed(parts)
            window += 1
        return None

    def _feed(self, parts: Sequence[tuple[Sequence[Tensor], float]]) -> None:
        """Send one window."""
        for part, share in parts:
            self._record.fed(self._fed, share)
            self._until(lambda: self._fed - self._acknowledged < self._ahead or self._record.bad is not None)
            self._crew.feed(Forward(self._fed, self._microbatches.size(part), share), self._freight, part)
            self._fed += 1
            self._samples += self._microbatches.size(part) if share else 0

    def _order_checkpoint(self, window: int, steps: int | None) -> None:
        """Before a window is fed that the next checkpoint depends on, so that no stage can be past its update."""
        every = self.work.checkpoints.every
        if self._keeping is not None and (window % every == 0 or window == self.work.first):
            step = (window // every + 1) * every
            if steps is None or step <= steps:
                self._tell_each(self._keeping.order(step, batches=step))

    @property
    def _ahead(self) -> int:
        """How many microbatches may be on their way: enough that the root never waits for us."""
        return self.work.rules[0].depth + 2

    def _evaluate(self, batches: Sequence[Any], *, step: int, fresh: bool) -> None:
        """Send held-out batches through, a few at a time."""
        evaluation = self._record.begin_evaluation(step)
        for batch in batches:
            for part in self._microbatches.held_out(batch):
                self._until(lambda: evaluation.num_waiting < self._ahead or self._record.bad is not None)
                if self._record.bad is not None or (self._stop.asked and not fresh):
                    break
                number, size = evaluation.first + evaluation.sent, self._microbatches.size(part)
                self._crew.feed(Evaluate(number, size, fresh), self._freight, part)
                evaluation.sent += 1
        evaluation.is_all_sent = True
        self._evaluated(self._record.conclude(evaluation))

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
            case Reported(report=Lost(values=values)):
                if (window := self._record.lost(values)) is not None:
                    self._crew.tell(EndAfter(window))
            case Reported(report=Updated(metrics=metrics)):
                self._updated(metrics)
            case Reported(report=Evaluated(number=number, batch=batch, values=values)):
                self._evaluated(self._record.evaluated(number, batch, values))
            case Reported(report=Saved(stage=stage, updates=step, failure=failure)):
                if self._keeping is not None and self._keeping.expects(step):
                    self._keeping.saved(stage, step, failure)
                else:
                    self._saved.add(stage)

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
        self.show.update(progress)
        self._tell_news()

    def _evaluated(self, found: dict[str, float] | None) -> None:
        if found is None:
            return
        self.progress.validation = {name: value for name, value in found.items() if name != "step"}
        self._write({"evaluation": found["step"], **self.progress.validation, "seconds": self._seconds()})
        self.show.update(self.progress)

    def _seconds(self) -> float:
        return round(self._log.seconds + time.monotonic() - self._began, 3)

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._log.write(line)
        except OSError as error:
            if not self._is_log_full:
                self.show.told(f"metrics.jsonl cannot be written, training goes on: {error}")
            self._is_log_full = True

    def _tell_news(self) -> None:
        for sentence in self._keeping.news() if self._keeping is not None else ():
            self.show.told(sentence)

    def _tell_each(self, orders: Sequence[Save]) -> None:
        for index, order in enumerate(orders):
            self._crew.tell_one(index, order)

    _crew: Crew
    _log: MetricsFile

    def _finish(self, validate: Callable[[], Sequence[Any]] | None) -> None:
        """Let what was fed come to its end, evaluate, and gather the weights."""
        bad = self._record.bad_window
        end = self._fed // self._accumulate if bad is None else bad
        self._crew.tell(EndAfter(end))
        self._until(lambda: self._record.bad is not None or self.progress.step >= end)
        if (bad := self._record.bad_window) is not None:
            end = bad
            self._until(lambda: all(self._record.updates_of(i) >= end for i in range(len(self.work.stages))))
        elif validate is not None and end:
            self._evaluate(validate(), step=end, fresh=True)
            self._until(lambda: not self._record.is_evaluating or self._record.bad is not None)
        self._keep_last(end)
        self._save(end)
        if self._record.bad is not None:
            raise NotFinite(
                f"the loss is not a finite number in step {end + 1}, batch {end}, microbatch {self._record.bad}: "
                f"the weights before that step are in {self.work.folder / 'model.safetensors'}. "
                "Try a smaller learning rate, warm-up or clip_norm, and look at that batch"
            )

    def _keep_last(self, end: int) -> None:
        """The last state is a checkpoint too, so that the run can be gone on with."""
        keeping = self._keeping
        if keeping is None:
            return
        keeping.forget_after(end)
        self._until(lambda: not keeping.is_waiting)
        keeping.join()
        if end > self.work.first and keeping.newest != end:
            self._tell_each(keeping.order(end, batches=end, now=True))
            self._until(lambda: not keeping.is_waiting)
            keeping.join()
        self._tell_news()

    def _save(self, step: int) -> None:
        folder, stages = self.work.folder, self.work.stages
        parts = [folder / f".part-{stage.index}.safetensors" for stage in stages]
        self._tell_each([Save(str(part)) for part in parts])
        self._until(lambda: len(self._saved) == len(stages))
        gather(self.work.program, stages, parts, folder / "model.safetensors", self.work.settings.seed, step=step)
