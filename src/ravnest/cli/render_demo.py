"""Renders the demo: its acts as lines, and at the end a summary and a picture of the loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ravnest.cli.demo_acts import ACTS, AddNode, CrashNode, DemoActs, EndRun, Say
from ravnest.coordinator.events import Event, LeaseSettled
from ravnest.run.control import RunControl
from ravnest.run.local import LocalNode
from ravnest.run.metrics import Progress, ProgressView
from ravnest.run.reference import Reference

__all__ = ["Comparison", "DemoView", "loss_picture", "smoothed", "staleness_of", "summary"]

_PROGRESS_S = 10.0


class DemoView(ProgressView):
    """Plays the acts of the demo while the run trains, and prints a line for each."""

    def __init__(
        self,
        console: Console,
        acts: DemoActs,
        new_node: LocalNode,
        reference: Reference,
        on_link: Callable[[str], None],
    ) -> None:
        self._console, self._acts, self._new_node = console, acts, new_node
        self._reference, self._on_link = reference, on_link
        self._start_s = time.monotonic()
        self._next_s = 0.0

    _control: RunControl

    def started(self, control: RunControl) -> None:
        self._control = control

    def dashboard(self, link: str) -> None:
        self._on_link(link)

    def message(self, text: str) -> None:
        self.line(text)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def line(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        self._console.print(f"{self.seconds:4.0f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    def event(self, kind: str, text: str) -> None:
        """Show nothing: the acts tell what happened."""

    def handle_event(self, event: Event) -> None:
        for action in self._acts.handle(event):
            match action:
                case Say(text=text, act=act):
                    self.line(f"[{ACTS.index(act) + 1}/{len(ACTS)}] {text}" if act else f"      {text}")
                case CrashNode(name=name):
                    self._acts.crashed(self._control.crash_node(name))
                case AddNode():
                    self._control.add_node(self._new_node)
                case EndRun():
                    self._control.stop("the last act is over" if self._acts.is_complete else "the time is over")
        if isinstance(event, LeaseSettled):
            self._reference.allow(self._acts.batches.trained)

    def update(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s and not math.isnan(progress.loss):
            self._next_s = now_s + _PROGRESS_S
            self.line(f"      step {progress.step}  loss {progress.loss:.3f}  {progress.samples_per_s:.0f} samples/s")


@dataclass(frozen=True)
class Comparison:
    """The held-out loss of the run, and of one synchronous process on the same samples (None: not known).

    `reached` are the batches that this process had trained when the time was over, its training loss there, and that of
    the run.
    """

    run: float
    reference: float | None
    reached: tuple[float, float, float] | None = None

    @property
    def text(self) -> str:
        if self.reference is None and self.reached is not None:
            batches, theirs, ours = self.reached
            return (
                f"{self.run:.3f}; one synchronous process had trained {batches:.0f} batches when the time was over: "
                f"training loss {theirs:.3f}, this run at that point {ours:.3f}"
            )
        if self.reference is None:
            return f"{self.run:.3f}; one synchronous process did not finish in time"
        return f"{self.run:.3f}; one synchronous process: {self.reference:.3f} ({self.run / self.reference - 1:+.1%})"


def staleness_of(lines: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Count the gradients by the steps that they were late, from the lines of `metrics.jsonl`."""
    latest = {
        (line["cluster"], stage["stage"]): stage["staleness"]
        for line in lines
        if "stages" in line
        for stage in line["stages"]
    }
    counts: dict[int, int] = {}
    for staleness in latest.values():
        for late, count in staleness.items():
            counts[int(late)] = counts.get(int(late), 0) + count
    return counts


def summary(acts: DemoActs, staleness: Mapping[int, int], held_out: Comparison) -> Table:
    """Return the table at the end of the demo."""
    batches = acts.batches
    table = Table(title="what happened", show_header=False, title_justify="left")
    balance = "each exactly once" if batches.is_balanced else f"not balanced: {batches.repeated} more than once"
    table.add_row("acts", ", ".join(act if act in acts.happened else f"{act} (did not happen)" for act in ACTS))
    table.add_row(
        "batches",
        f"{batches.leased} handed out, {batches.returned} returned after the crash or a new plan, "
        f"{batches.trained} trained, {balance}",
    )
    total = max(sum(staleness.values()), 1)
    late = ", ".join(f"{steps} {count / total:.0%}" for steps, count in sorted(staleness.items()))
    table.add_row("staleness", f"optimizer steps that gradients were late: {late}" if staleness else "none")
    mean_s = acts.round_s / max(acts.rounds, 1)
    table.add_row("averaging", f"{acts.rounds} rounds over up to {acts.num_rings} rings at once, {mean_s:.2f} s each")
    recovery = "no repair" if acts.recovery_s is None else f"{acts.recovery_s:.1f} s"
    table.add_row("recovery", f"{recovery} from the crash to the next batch of the repaired cluster")
    table.add_row("held-out loss", held_out.text)
    return table


_RUN, _REFERENCE = "●", "·"


def loss_picture(
    run: Sequence[tuple[float, float]], reference: Sequence[tuple[float, float]], *, width: int = 72, height: int = 14
) -> str:
    """Draw the losses over batches: of the run, and of the reference."""
    points = [*run, *reference]
    if not points:
        return "no loss was reported"
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    last = max(max(batch for batch, _ in points), 1.0)
    cells = [[" "] * width for _ in range(height)]
    for series, mark in ((reference, _REFERENCE), (run, _RUN)):
        for batch, loss in series:
            row = round((high - loss) / max(high - low, 1e-9) * (height - 1))
            cells[row][min(round(batch / last * (width - 1)), width - 1)] = mark
    labels = [f"{high:6.2f} │", *["       │"] * (height - 2), f"{low:6.2f} │"]
    rows = [label + "".join(row).rstrip() for label, row in zip(labels, cells, strict=True)]
    axis = f"       └{'─' * width}"
    end = f"{last:.0f} batches"
    legend = (
        f"        {_RUN} this run   {_REFERENCE} one synchronous process: the same samples, "
        "a batch of each cluster in an update"
    )
    return "\n".join(["loss", *rows, axis, " " * max(8 + width - len(end), 0) + end, legend])


def smoothed(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Return the points with the mean of each value and of up to `window` - 1 values before it."""
    values = [value for _, value in points]
    return [(at, sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1)) for i, (at, _) in enumerate(points)]
