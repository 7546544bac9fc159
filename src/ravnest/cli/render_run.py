"""Renders the progress and the summary of a run: a live view on a terminal, plain lines or JSON elsewhere."""

from __future__ import annotations

import re
import time

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ravnest.cli.live_region import is_live
from ravnest.cli.live_run import LiveView, invite, plan_table
from ravnest.cli.options import Output
from ravnest.core.metrics import StageMetrics, bubble
from ravnest.core.units import format_bytes, format_seconds, format_throughput
from ravnest.run.job import Run
from ravnest.run.metrics import Progress, ProgressView
from ravnest.run.plan import PipelinePlan

__all__ = ["JsonView", "progress_view", "summary"]

_REFRESH_S = 2.0
_MAX_CONTRIBUTIONS = 50


def progress_view(console: Console, steps: int | None, output: Output = "auto") -> ProgressView:
    """Return the progress view for a console: live on a terminal, else lines; or quiet; or lines of JSON."""
    if output == "json":
        return JsonView(console)
    if output == "quiet":
        return QuietView(console)
    return LiveView(console, steps) if is_live(console) else PlainView(console)


class _Rates:
    """Computes the bubble of each stage since the previous call."""

    def __init__(self) -> None:
        self._before: dict[int, StageMetrics] = {}

    def bubbles(self, progress: Progress) -> dict[int, float]:
        bubbles = {i: bubble(self._before.get(i, StageMetrics()), m) for i, m in progress.stages.items()}
        self._before = dict(progress.stages)
        return bubbles


def _line(progress: Progress) -> str:
    parts = [f"step {progress.step}", f"loss {progress.loss:.4f}"]
    parts += [f"{name} {value:.4f}" for name, value in progress.metrics.items()]
    parts += [f"validation {name} {value:.4f}" for name, value in progress.validation.items()]
    return "  ".join([*parts, format_throughput(progress.samples_per_s)])


def _without_numbers(reason: str) -> str:
    """Return a reason without its numbers: a countdown is not a line per second."""
    return re.sub(r"\d+", "", reason)


class PlainView(ProgressView):
    """Prints a line every two seconds, for logs."""

    def __init__(self, console: Console) -> None:
        self._console, self._rates, self._next = console, _Rates(), 0.0
        self._last: Progress | None = None
        self._waiting = ""

    def planned(self, plan: PipelinePlan, cluster: str = "") -> None:
        self._console.print(plan_table(plan, cluster))

    def invited(self, ticket: str) -> None:
        invite(self._console, ticket)

    def dashboard(self, link: str) -> None:
        self.message(f"dashboard: {link}")

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def waiting(self, reason: str) -> None:
        if reason and _without_numbers(reason) != self._waiting:
            self.message(f"no cluster trains: {reason}")
        self._waiting = _without_numbers(reason)

    def update(self, progress: Progress) -> None:
        self._last = progress
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REFRESH_S
            self._print(progress)

    def _print(self, progress: Progress) -> None:
        bubbles = self._rates.bubbles(progress)
        stages = "  ".join(
            f"[{i}] {format_bytes(m.memory_bytes)} bubble {bubbles[i]:.1%} staleness {max(m.staleness, default=0)}"
            for i, m in sorted(progress.stages.items())
        )
        if not progress.stages:
            stages = "  ".join(f"[{name}] {training.summary()}" for name, training in progress.clusters.items())
        self._console.print(f"{_line(progress)}  {stages}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._last is not None:
            self._print(self._last)


class QuietView(ProgressView):
    """Prints the ticket, which others need, and nothing else."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def invited(self, ticket: str) -> None:
        self._console.print(ticket, highlight=False, markup=False, soft_wrap=True)


class JsonView(ProgressView):
    """Prints a JSON object per line; `docs/reference/log-json.md` describes the fields."""

    def __init__(self, console: Console) -> None:
        self._console, self._step, self._waiting = console, 0, ""

    def write(self, kind: str, **fields: object) -> None:
        """Print a line of this type; numbers that are not finite become null."""
        line = msgspec.json.encode({"type": kind, "time": round(time.time(), 3), **fields})
        self._console.file.write(line.decode() + "\n")
        self._console.file.flush()

    def planned(self, plan: PipelinePlan, cluster: str = "") -> None:
        self.write("plan", cluster=cluster, **plan.content())

    def invited(self, ticket: str) -> None:
        self.write("ticket", ticket=ticket)

    def dashboard(self, link: str) -> None:
        self.write("dashboard", link=link)

    def message(self, text: str) -> None:
        self.write("message", text=text)

    def event(self, kind: str, text: str) -> None:
        self.write("event", event=kind, text=text)

    def waiting(self, reason: str) -> None:
        if _without_numbers(reason) != self._waiting:
            self.write("waiting", reason=reason)
        self._waiting = _without_numbers(reason)

    def update(self, progress: Progress) -> None:
        if progress.step == self._step:
            self.write("evaluation", step=progress.validation_step, values=progress.validation)
            return
        self._step = progress.step
        self.write(
            "step", step=progress.step, loss=progress.loss, values=progress.metrics, samples=progress.samples,
            samples_per_s=progress.samples_per_s,
        )  # fmt: skip


def summary(run: Run) -> Group:
    """Return the totals of a finished run: what each node has contributed, and the stages of the model's cluster."""
    title = "no step was finished"
    if run.losses:
        loss = f"final loss {run.losses[-1]:.4f}"
        title = f"{run.steps:,} steps, {loss}, {format_throughput(run.samples_per_s)}"
    return Group(_stages(run, title), _contributions(run))


def _stages(run: Run, title: str) -> Table:
    table = Table(title=title)
    for name in ("node", "microbatches", "busy", "bubble", "staleness", "peak memory", "expected", "sent"):
        table.add_column(name, justify="left" if name == "node" else "right")
    for i, m in sorted(run.stages.items()):
        staleness = ", ".join(f"{late}: {count}" for late, count in sorted(m.staleness.items()))
        table.add_row(
            run.plan.plans[i].node, str(m.microbatches), f"{m.busy_s:.1f} s", f"{bubble(StageMetrics(), m):.1%}",
            staleness, format_bytes(m.peak_memory_bytes), format_bytes(run.plan.plans[i].memory_bytes),
            format_bytes(m.sent_bytes),
        )  # fmt: skip
    return table


def _contributions(run: Run) -> RenderableType:
    """Return a table of all nodes of the whole run, if it had others than the stages of the model's cluster."""
    nodes = run.contributions
    if set(nodes) <= {row.node for row in run.plan.plans} and run.steps == len(run.losses):
        return Text(end="")
    table, total = Table(title="contributed to the whole run"), sum(node.work for node in nodes.values())
    for name in ("node", "batches", "samples", "share of the work", "training", "sent", "received"):
        table.add_column(name, justify="left" if name == "node" else "right")
    for name, node in sorted(nodes.items(), key=lambda item: -item[1].work)[:_MAX_CONTRIBUTIONS]:
        table.add_row(
            name, f"{node.batches:,}", f"{node.samples:,}", f"{node.work / max(total, 1e-9):.1%}",
            format_seconds(node.seconds), format_bytes(node.sent_bytes), format_bytes(node.received_bytes),
        )  # fmt: skip
    if len(nodes) > _MAX_CONTRIBUTIONS:
        table.caption = f"and {len(nodes) - _MAX_CONTRIBUTIONS} more: `ravnest dashboard` shows all of them"
    return table
