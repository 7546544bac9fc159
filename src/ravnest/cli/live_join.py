"""The live view of `ravnest join` on a terminal: what this PC does now, and what it has contributed."""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ravnest.cli.figures import Pace, clock_time
from ravnest.cli.live_region import LiveRegion, is_live
from ravnest.core.metrics import StageMetrics, bubble
from ravnest.core.units import format_bytes

if TYPE_CHECKING:
    from ravnest.cli.options import Output
    from ravnest.node.console import AgentConsole

__all__ = ["JoinOutput"]

_TRAINING = "training: "


class JoinOutput:
    """Writes the lines of an agent: as text, above a live region on a terminal; as JSON; or not at all."""

    def __init__(self, console: Console, output: Output = "auto") -> None:
        self._console, self._output = console, output
        self._region = LiveRegion(console, self._render) if output == "auto" and is_live(console) else None
        self._agent: AgentConsole | None = None
        self._began_s = time.monotonic()
        self._pace = Pace()

    def open(self, agent: AgentConsole) -> None:
        """Start to show the state of an agent."""
        self._agent = agent
        if self._region is not None:
            self._region.open()

    def close(self) -> None:
        if self._region is not None:
            self._region.close()

    def write(self, line: str) -> None:
        """Print a line about the agent; on a terminal the region shows the progress of training instead."""
        if self._output == "json":
            _write_json(self._console.file, line, self._agent)
        elif self._region is not None and self._region.is_open:
            if not line.startswith(_TRAINING):
                self._region.print(f"{time.strftime('%H:%M:%S')}  {line}")
        elif self._output == "auto":
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        agent = self._agent
        if agent is None:
            return Text("")
        metrics, assignment, now_s = agent.metrics, agent.assignment, time.monotonic()
        elapsed = clock_time(now_s - self._began_s)
        if metrics is None or assignment is None:
            self._pace.clear()
            return _lines(f"{agent.activity or 'starting'}  ({elapsed})", *_contributed(agent))
        self._pace.add(now_s, metrics.updates, metrics.microbatches)
        return _lines(
            f"training stage {assignment.stage} of {assignment.count} in cluster {assignment.cluster}  ({elapsed})",
            "  ".join(_figures(metrics, self._pace, now_s)),
            *_contributed(agent),
        )


def _lines(*lines: str) -> Group:
    return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))


def _figures(metrics: StageMetrics, pace: Pace, now_s: float) -> list[str]:
    speed = pace.per_s(now_s)
    rate = [] if speed is None else [f"{speed[1]:.3g} microbatches/s"]
    return [
        *rate, f"idle {bubble(StageMetrics(), metrics):.0%}", f"memory {format_bytes(metrics.memory_bytes)}",
        f"sent {format_bytes(metrics.sent_bytes)}", f"received {format_bytes(metrics.received_bytes)}",
    ]  # fmt: skip


def _contributed(agent: AgentConsole) -> list[str]:
    metrics = agent.metrics or StageMetrics()
    updates, microbatches = agent.num_updates + metrics.updates, agent.num_microbatches + metrics.microbatches
    return [f"contributed: {updates:,} updates, {microbatches:,} microbatches"] if microbatches else []


def _write_json(file: IO[str], line: str, agent: AgentConsole | None) -> None:
    fields: dict[str, object] = {"type": "activity", "time": round(time.time(), 3), "text": line}
    if agent is not None and (metrics := agent.metrics) is not None:
        fields |= {"updates": metrics.updates, "microbatches": metrics.microbatches}
    if agent is not None and (assignment := agent.assignment) is not None:
        fields |= {"cluster": assignment.cluster, "stage": assignment.stage}
    file.write(msgspec.json.encode(fields).decode() + "\n")
    file.flush()
