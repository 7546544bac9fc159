"""The live view of a run on a terminal: a ticket, the progress, a row per stage, and the last events."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ravnest.cli.figures import LossCurve, Pace, clock_time
from ravnest.cli.live_region import EventLines, LiveRegion, wrap
from ravnest.core.metrics import StageMetrics, bubble
from ravnest.core.units import format_bytes, format_throughput
from ravnest.run.metrics import Progress, ProgressView
from ravnest.run.plan import PipelinePlan

__all__ = ["LiveView", "invite", "plan_table"]

_ROWS_S = 0.5
_MAX_EVENT_LINES = 8
_WIDE = 80  # columns
_PLAN_WIDTH = 96
_MAX_HELD = 20


def plan_table(plan: PipelinePlan, cluster: str = "", *, width: int = 120) -> Table:
    """Return the stages of a plan; a narrow terminal has room for the first columns only."""
    expected = f"about {format_throughput(plan.samples_per_s)}"
    title = f"cluster {cluster}" if cluster else "the plan"
    table = Table(title=f"{title}: {len(plan.plans)} stages, {plan.accumulate} microbatches a step, {expected}")
    columns = ["node", "ops", "memory", "ms a microbatch", "parameters", "sends", "in flight", "delay"]
    columns = columns if width >= _PLAN_WIDTH else columns[:4]
    for name in columns:
        table.add_column(name, justify="left" if name == "node" else "right", no_wrap=True)
    for p in plan.plans:
        cells = (
            p.node, f"{p.first_op}-{p.first_op + p.num_ops - 1}", format_bytes(p.memory_bytes),
            f"{p.seconds * 1000:.1f}", format_bytes(p.parameter_bytes), format_bytes(p.sends_bytes), str(p.depth),
            str(p.delay),
        )  # fmt: skip
        table.add_row(*cells[: len(columns)])
    return table


def invite(console: Console, ticket: str) -> None:
    """Print the command that adds a PC to the run."""
    console.print("on every PC that should join:\n", highlight=False)
    console.print(f"    ravnest join {ticket}\n", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _StageRow:
    cluster: str
    node: str
    metrics: StageMetrics
    bubble: float  # since the row before


class LiveView(ProgressView):
    """Shows a run in a region of the terminal.

    Where nodes join, nothing is printed between the ticket and the region, so that the ticket stays on the screen:
    messages are events of the region, and are printed at the end.
    """

    def __init__(self, console: Console, steps: int | None) -> None:
        self._console, self._steps = console, steps
        self._region = LiveRegion(console, self._render, self._header)
        self._events, self._held = EventLines(), list[str]()
        self._curve, self._pace = LossCurve(), Pace()
        self._ticket, self._link, self._reason = "", "", ""
        self._planned = 0.0
        self._progress = Progress()
        self._line = ""
        self._rows: tuple[_StageRow, ...] = ()
        self._rows_s = -math.inf
        self._before: dict[tuple[str, int], StageMetrics] = {}
        self._began_s = time.monotonic()

    # what happens

    def planned(self, plan: PipelinePlan, cluster: str = "") -> None:
        if not self._ticket:
            self._console.print(plan_table(plan, cluster, width=self._console.width))
        self._open()

    def invited(self, ticket: str) -> None:
        self._ticket = ticket
        self._open()

    def dashboard(self, link: str) -> None:
        self._link = link

    def message(self, text: str) -> None:
        if self._ticket:
            self._held = [*self._held[-_MAX_HELD:], text]
            self._events.add(text)
        else:
            self._region.print(text)

    def event(self, kind: str, text: str) -> None:
        self._events.add(text)

    def waiting(self, reason: str) -> None:
        self._reason = reason
        self._pace.clear()
        if reason:
            self._rows = ()

    def update(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.step != self._progress.step:
            self._curve.add(progress.loss)
            self._pace.add(now_s, progress.step, progress.samples)
        self._progress = Progress(step=progress.step, loss=progress.loss, samples=progress.samples)
        if now_s - self._rows_s >= _ROWS_S:
            self._rows_s = now_s
            self._rows = tuple(self._stage_rows(progress))
            self._planned = sum(t.plan.samples_per_s for t in progress.clusters.values())
            values = {**progress.metrics, **{f"validation {k}": v for k, v in progress.validation.items()}}
            self._line = "  ".join(f"{name} {value:.4f}" for name, value in values.items())

    def close(self) -> None:
        was_open = self._region.is_open
        self._region.close()
        if was_open:
            for text in self._held:
                self._region.print(text)

    def _open(self) -> None:
        if not self._region.is_open:
            self._region.open()

    def _stage_rows(self, progress: Progress) -> Iterator[_StageRow]:
        """Yield rows from the mutable state of the run; called in its thread."""
        before, self._before = self._before, {}
        for cluster, training in progress.clusters.items():
            for stage, metrics in sorted(training.tracker.stages.items()):
                self._before[cluster, stage] = metrics
                idle = bubble(before.get((cluster, stage), StageMetrics()), metrics)
                yield _StageRow(cluster, training.plan.plans[stage].node, metrics, idle)

    # what is drawn, in the thread of the region

    def _header(self) -> None:
        if self._link:
            self._console.print(f"dashboard: {self._link}", markup=False, highlight=False, soft_wrap=True)
        if self._ticket:
            invite(self._console, self._ticket)

    @property
    def _header_height(self) -> int:
        """The lines of the header, as the terminal wraps them."""
        width = max(self._console.width, 1)
        lines = [f"dashboard: {self._link}"] * bool(self._link)
        lines += ["", "", f"    ravnest join {self._ticket}", ""] * bool(self._ticket)
        return sum(max(1, -(-len(line) // width)) for line in lines)

    def _render(self) -> RenderableType:
        width, height = self._console.size
        rows = self._rows
        room = max(height - 1 - self._header_height * bool(self._ticket), 6)
        top = [self._progress_line(), *(self._waiting_lines(width) if self._reason else [self._loss_line(width)])]
        if self._line:
            top.append(Text(self._line, no_wrap=True, overflow="ellipsis"))
        room -= len(top)
        num_events = min(_MAX_EVENT_LINES, max(room // 2, room - len(rows) - 2)) if self._events else 0
        table = self._table(rows, width, room - num_events) if rows and room - num_events >= 3 else None
        events = self._events.lines(width - 1, num_events)
        lines = Text("\n".join(events), no_wrap=True, overflow="crop", style="dim")
        return Group(*top, *([table] if table is not None else []), *([lines] if events else []))

    def _progress_line(self) -> RenderableType:
        step, steps = self._progress.step, self._steps
        count = f"{step:,} of {steps:,} steps" if steps is not None else f"{step:,} steps"
        left_s = None if steps is None or self._reason else self._pace.left_s(time.monotonic(), steps - step)
        if step == 0 or self._reason:
            spent = f"{clock_time(time.monotonic() - self._began_s)} so far" if step == 0 else "paused"
        else:
            spent = "" if left_s is None else f"{clock_time(left_s)} left"
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        bar: RenderableType = ProgressBar(total=steps, completed=min(step, steps)) if steps else Text("")
        grid.add_row(count, bar, spent)
        return grid

    def _waiting_lines(self, width: int) -> list[RenderableType]:
        text = f"no cluster trains: {self._reason}" if self._progress.step else self._reason
        return [Text(line, style="yellow") for line in wrap(text, width, 2)]

    def _loss_line(self, width: int) -> Text:
        if not self._progress.step:
            return Text("the workers start", no_wrap=True, overflow="ellipsis")
        speed = self._pace.per_s(time.monotonic())
        parts = []
        if speed is not None:
            planned = f" of {format_throughput(self._planned)} planned" if self._planned and width >= _WIDE else ""
            parts.append(f"{format_throughput(speed[1])}{planned}")
        text = "  ".join([f"loss {self._progress.loss:.4f}", *parts])
        curve = self._curve.draw(min(60, width - len(text) - 4), is_ascii=not self._console.encoding.startswith("utf"))
        return Text(f"{text}  {curve}", no_wrap=True, overflow="ellipsis")

    def _table(self, rows: tuple[_StageRow, ...], width: int, room: int) -> Table:
        """Return a row per stage; where they do not fit, the slowest ones and how many more there are."""
        is_wide, has_clusters = width >= _WIDE, len({row.cluster for row in rows}) > 1 or bool(self._ticket)
        columns = [*(["cluster"] if has_clusters else []), "node", "updates", "bubble", "memory"]
        columns += ["in flight", "staleness", "sent"] if is_wide else []
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=False)
        for name in columns:
            table.add_column(
                name, justify="left" if name in ("node", "cluster") else "right", no_wrap=True, overflow="ellipsis",
                max_width=24,
            )  # fmt: skip
        num_shown = len(rows) if len(rows) + 1 <= room else max(room - 2, 1)
        shown = rows if num_shown == len(rows) else sorted(rows, key=lambda row: row.bubble)[:num_shown]
        for row in shown:
            m = row.metrics
            cells = [*([row.cluster] if has_clusters else []), row.node, f"{m.updates:,}", f"{row.bubble:.0%}"]
            cells.append(format_bytes(m.memory_bytes))
            if is_wide:
                cells += [str(m.in_flight), str(max(m.staleness, default=0)), format_bytes(m.sent_bytes)]
            table.add_row(*map(Text, cells))
        if num_shown < len(rows):
            more = [Text(""), Text(f"and {len(rows) - num_shown:,} more")]
            table.add_row(*(more if has_clusters else more[1:]))
        return table
