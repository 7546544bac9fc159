"""Renders the status of a run for a terminal of any size: headline, clusters, nodes, events.

With a height, everything fits: tables end with the number of rows that are left out, and nodes that are gone are one
line. Cells are cut at the end with an ellipsis and never broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ravnest.cli.live_region import event_lines
from ravnest.coordinator.status import ClusterStatus, NodeStatus, RunStatus
from ravnest.core.units import format_bytes, format_rate, format_seconds, format_throughput

__all__ = ["status_page"]

T = TypeVar("T")

_ABSENT = {"gone": "gone", "kicked": "removed", "enrolled": "enrolled, not connected"}
_ORDER = ("quarantined", "leaving", "forming", "training", "free")
_LIVE = ("forming", "training")
_NUM_EVENTS = 12
_MIN_EVENTS = 5
_MAX_NAMES = 5


@dataclass(frozen=True)
class _Column:
    """A column of a table, shown from a width of the terminal on; the last one gets the rest of the width."""

    name: str
    cell: Callable[..., str]
    min_width: int = 0
    is_text: bool = False


_CLUSTER_COLUMNS = (
    _Column("cluster", lambda c: c.id, is_text=True),
    _Column("phase", lambda c: c.phase, is_text=True),
    _Column("stages", lambda c: _ready(c)),
    _Column("speed", lambda c: "" if c.samples_per_s is None else format_throughput(c.samples_per_s)),
    _Column("planned", lambda c: format_throughput(c.planned_samples_per_s), 75),
    _Column("loss", lambda c: "" if c.loss is None else f"{c.loss:.4f}"),
    _Column("updates", lambda c: f"{max((stage.updates for stage in c.stages), default=0):,}", 90),
    _Column("bubble", lambda c: f"{max((stage.bubble for stage in c.stages), default=0):.0%}", 110),
    _Column("", lambda c: c.reason, 120, is_text=True),
)
_NODE_COLUMNS = (
    _Column("node", lambda n: n.name, is_text=True),
    _Column("state", lambda n: _place(n), is_text=True),
    _Column("memory", lambda n: "" if n.profile is None else format_bytes(n.profile.memory_bytes), 70),
    _Column("GFLOP/s", lambda n: "" if n.profile is None else f"{n.profile.gflops:.3g}", 110),
    _Column("up", lambda n: "" if n.profile is None else format_rate(n.profile.up_bytes_per_s), 95),
    _Column("down", lambda n: "" if n.profile is None else format_rate(n.profile.down_bytes_per_s), 130),
    _Column("latency", lambda n: "" if n.profile is None else format_seconds(n.profile.latency_s), 130),
    _Column("links", lambda n: _links(n), 95, is_text=True),
    _Column("seen", lambda n: "" if n.last_seen_age_s is None else f"{format_seconds(n.last_seen_age_s)} ago", 120),
    _Column("activity", lambda n: n.activity or n.reason, is_text=True),
)


def status_page(status: RunStatus, width: int, height: int | None = None) -> Group:
    """Return the status as lines of at most `width` columns, and at most `height` lines if that is given."""
    clusters = [cluster for cluster in status.clusters if cluster.phase in _LIVE]
    present = sorted((n for n in status.nodes if n.state not in _ABSENT), key=_node_order)
    top = [_line(text, width) for text in (*_headlines(status), *_absent(status.nodes))]
    events = [(event.at_s, event.text) for event in status.events]
    room = None if height is None else max(height - len(top) - 2, 8)  # two empty lines
    cluster_rows, node_rows, num_events = _shares(room, len(clusters), len(present))
    lines = event_lines(events, width, num_events) if events else []
    return Group(
        *top,
        Text(""),
        *_table(_CLUSTER_COLUMNS, clusters, cluster_rows, width, "clusters"),
        *_table(_NODE_COLUMNS, present, node_rows, width, "nodes"),
        *([Text("")] if lines else []),
        *(Text(line, no_wrap=True, overflow="crop") for line in lines),
    )


def _shares(room: int | None, num_clusters: int, num_nodes: int) -> tuple[int, int, int]:
    """Return the lines for clusters, nodes and events, headers included: a third each, less where less is needed."""
    wanted = (num_clusters + 1) * bool(num_clusters), (num_nodes + 1) * bool(num_nodes)
    if room is None:
        return *wanted, _NUM_EVENTS
    third = room // 3
    clusters = min(wanted[0], max(third, room - wanted[1] - _MIN_EVENTS))
    nodes = min(wanted[1], max(third, room - clusters - _MIN_EVENTS))
    return clusters, nodes, room - clusters - nodes


def _headlines(status: RunStatus) -> Iterable[str]:
    leases = status.leases
    steps = f"{status.steps_done:,}" + (f" of {status.steps:,}" if status.steps is not None else "")
    rates = [cluster.samples_per_s or 0.0 for cluster in status.clusters if cluster.phase == "training"]
    speed = [format_throughput(sum(rates))] if rates else []
    yield ", ".join([f"{status.run}: {steps} batches trained", *speed, f"up {format_seconds(status.uptime_s)}"])
    if status.end_reason is not None:
        yield f"ended: {status.end_reason}"
    elif not rates:
        yield f"paused, no cluster trains: {status.waiting}" if status.waiting else "paused: no cluster trains"
    rounds = f", {status.rounds_done:,} rounds of averaging" if status.rounds_done else ""
    yield f"{leases.outstanding} leased, {leases.returned} returned, {leases.repeated} trained twice{rounds}"


def _absent(nodes: Sequence[NodeStatus]) -> Iterable[str]:
    """Yield one line about all nodes that are not there."""
    groups = []
    for state, name in _ABSENT.items():
        found = [node.name for node in nodes if node.state == state]
        if found:
            more = ", ..." if len(found) > _MAX_NAMES else ""
            groups.append(f"{len(found):,} {name} ({', '.join(found[:_MAX_NAMES])}{more})")
    if groups:
        yield f"not here: {'; '.join(groups)}"


def _table(
    columns: Sequence[_Column], rows: Sequence[T], num_lines: int, width: int, what: str
) -> Iterable[RenderableType]:
    """Yield a table of at most `num_lines` lines, the last of which says how many rows are left out."""
    if not rows or num_lines < 2:
        return
    shown = rows if len(rows) + 1 <= num_lines else rows[: num_lines - 2]
    chosen = [column for column in columns if width >= column.min_width]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=True, width=width)
    for i, column in enumerate(chosen):
        is_last = i == len(chosen) - 1
        table.add_column(
            column.name, justify="left" if column.is_text else "right", no_wrap=True, overflow="ellipsis",
            ratio=1 if is_last else None, max_width=None if is_last else 26,
        )  # fmt: skip
    for row in shown:
        table.add_row(*(Text(column.cell(row)) for column in chosen))
    yield table
    if len(shown) < len(rows):
        yield _line(f"and {len(rows) - len(shown):,} more {what}", width)


def _line(text: str, width: int) -> Text:
    line = Text(text, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def _node_order(node: NodeStatus) -> tuple[int, str, int, str]:
    order = _ORDER.index(node.state) if node.state in _ORDER else len(_ORDER)
    return order, node.cluster or "", node.stage or 0, node.name


def _place(node: NodeStatus) -> str:
    return node.state if node.cluster is None else f"{node.state} {node.cluster}/{node.stage}"


def _ready(cluster: ClusterStatus) -> str:
    num_ready = sum(stage.is_ready for stage in cluster.stages)
    return f"{len(cluster.stages)}" if num_ready == len(cluster.stages) else f"{num_ready} of {len(cluster.stages)}"


def _links(node: NodeStatus) -> str:
    """Return the kinds of links that a node has."""
    return ", ".join(dict.fromkeys(link.kind for link in node.links))
