"""Renders the progress and the summary of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from ravnest.core.metrics import StageMetrics, bubble
from ravnest.core.units import format_bytes, format_seconds, format_throughput
from ravnest.run.job import Run
from ravnest.run.metrics import Progress, ProgressView
from ravnest.run.plan import PipelinePlan

__all__ = ["progress_view", "summary"]

_REFRESH_S = 2.0
_MAX_CONTRIBUTIONS = 50


def progress_view(console: Console, steps: int | None) -> ProgressView:
    """Return the progress view for a console."""
    return LiveView(console, steps) if console.is_terminal else PlainView(console)


def plan_table(plan: PipelinePlan, cluster: str = "") -> Table:
    expected = f"about {format_throughput(plan.samples_per_s)}"
    title = f"cluster {cluster}" if cluster else "the plan"
    table = Table(title=f"{title}: {len(plan.plans)} stages, {plan.accumulate} microbatches a step, {expected}")
    for name in ("node", "ops", "parameters", "memory", "ms a microbatch", "sends", "in flight", "delay"):
        table.add_column(name, justify="left" if name == "node" else "right")
    for p in plan.plans:
        table.add_row(
            p.node, f"{p.first_op}-{p.first_op + p.num_ops - 1}", format_bytes(p.parameter_bytes),
            format_bytes(p.memory_bytes), f"{p.seconds * 1000:.1f}", format_bytes(p.sends_bytes), str(p.depth),
            str(p.delay),
        )  # fmt: skip
    return table


def invite(console: Console, ticket: str) -> None:
    """Print the command that adds a PC to the run."""
    console.print("on every PC that should join:\n", highlight=False)
    console.print(f"    ravnest join {ticket}\n", highlight=False, markup=False, soft_wrap=True)


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
    return "  ".join([*parts, f"{progress.samples_per_s:.1f} samples/s"])


class PlainView(ProgressView):
    """Prints a line every two seconds, for logs."""

    def __init__(self, console: Console) -> None:
        self._console, self._rates, self._next = console, _Rates(), 0.0
        self._last: Progress | None = None

    def planned(self, plan: PipelinePlan, cluster: str = "") -> None:
        self._console.print(plan_table(plan, cluster))

    def invited(self, ticket: str) -> None:
        invite(self._console, ticket)

    def dashboard(self, link: str) -> None:
        self.message(f"dashboard: {link}")

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

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
        stages += "  ".join(f"[{name}] {text}" for name, text in progress.clusters.items())
        self._console.print(f"{_line(progress)}  {stages}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._last is not None:
            self._print(self._last)


class LiveView(ProgressView):
    """Shows a live table of the stages and a progress bar."""

    def __init__(self, console: Console, steps: int | None) -> None:
        self._console, self._rates = console, _Rates()
        self._plan: PipelinePlan | None = None
        columns = ("{task.description}", BarColumn(), "{task.completed}/{task.total}", TimeRemainingColumn())
        self._bar = Bar(*columns, console=console)
        self._task = self._bar.add_task("training", total=steps)
        self._bubbles: dict[int, float] = {}
        self._next = 0.0
        self._live = Live(self._bar, console=console, refresh_per_second=4)

    def planned(self, plan: PipelinePlan, cluster: str = "") -> None:
        self._plan = plan
        self._console.print(plan_table(plan, cluster))
        if not self._live.is_started:
            self._live.start()

    def invited(self, ticket: str) -> None:
        invite(self._console, ticket)

    def dashboard(self, link: str) -> None:
        self.message(f"dashboard: {link}")

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, progress: Progress) -> None:
        self._bar.update(self._task, completed=progress.step)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REFRESH_S / 4
            self._bubbles = self._rates.bubbles(progress) if progress.stages else {}
        self._live.update(Group(_line(progress), self._stages(progress), self._bar))

    def _stages(self, progress: Progress) -> Table:
        table = Table()
        if progress.clusters:
            table.add_column("cluster")
            table.add_column("")
            for name, text in progress.clusters.items():
                table.add_row(name, text)
            return table
        assert self._plan is not None
        for name in ("node", "updates", "in flight", "bubble", "staleness", "memory", "sent"):
            table.add_column(name, justify="left" if name == "node" else "right")
        for i, m in sorted(progress.stages.items()):
            table.add_row(
                self._plan.plans[i].node, str(m.updates), str(m.in_flight), f"{self._bubbles.get(i, 0.0):.1%}",
                str(max(m.staleness, default=0)), format_bytes(m.memory_bytes), format_bytes(m.sent_bytes),
            )  # fmt: skip
        return table

    def close(self) -> None:
        self._live.stop()


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
