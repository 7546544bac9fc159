"""`ravnest status`: show a run that trains on nodes that joined."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ravnest.cli.options import Debug
from ravnest.core.units import format_bytes, format_rate, format_seconds
from ravnest.errors import LinkError

if TYPE_CHECKING:
    from ravnest.cli.target import CoordinatorTarget
    from ravnest.coordinator.status import ClusterStatus, NodeStatus, RunStatus

__all__ = ["status"]

_REFRESH_S = 1.0
_NUM_EVENTS = 12


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[TICKET|DIR]", help="A ticket, or the directory of a run. Without it: the only run."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show a run that listens: its nodes, clusters, stages, links and latest events.

    Example: `ravnest status rav1-... --watch`
    """
    from ravnest.cli.target import find_target

    target = find_target(run)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    if as_json:
        console.out(msgspec.json.format(msgspec.json.encode(_fetch(target)), indent=1).decode(), highlight=False)
    elif not watch:
        console.print(status_page(_fetch(target)))
    else:
        _watch(target, console)


def _fetch(target: CoordinatorTarget) -> RunStatus:
    from ravnest.cli.target import get_status

    return asyncio.run(get_status(target))


def _watch(target: CoordinatorTarget, console: Console) -> None:
    page: RenderableType = status_page(_fetch(target))
    with Live(page, console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(page, refresh=True)
            time.sleep(_REFRESH_S)
            try:
                page = status_page(_fetch(target))
            except LinkError as error:
                page = f"{error}; retrying"


def status_page(status: RunStatus) -> Group:
    """Return the whole status for a terminal."""
    parts: list[RenderableType] = [_headline(status), _nodes(status)]
    parts += [_cluster(cluster) for cluster in status.clusters if cluster.phase in ("forming", "training")]
    parts += [
        Text(f"{time.strftime('%H:%M:%S', time.localtime(e.at_s))}  {e.text}") for e in status.events[-_NUM_EVENTS:]
    ]
    return Group(*parts)


def _headline(status: RunStatus) -> RenderableType:
    leases = status.leases
    steps = f"{status.steps_done}" + (f" of {status.steps}" if status.steps is not None else "")
    rate = sum(cluster.samples_per_s or 0.0 for cluster in status.clusters if cluster.phase == "training")
    text = (
        f"{status.run}: {steps} batches trained, {rate:.1f} samples/s, up {format_seconds(status.uptime_s)}; "
        f"{leases.outstanding} leased, {leases.returned} returned, {leases.repeated} trained twice"
    )
    return Text(text + (f"; ended: {status.end_reason}" if status.end_reason is not None else ""))


def _nodes(status: RunStatus) -> Table:
    table = Table(title="nodes")
    for name in ("node", "state", "memory", "GFLOP/s", "up", "down", "latency", "links", "last seen", "why"):
        table.add_column(name, overflow="fold")
    for node in status.nodes:
        profile = node.profile
        table.add_row(
            node.name, _place(node),
            *(("", "", "", "", "") if profile is None else (
                format_bytes(profile.memory_bytes), f"{profile.gflops:.1f}", format_rate(profile.up_bytes_per_s),
                format_rate(profile.down_bytes_per_s), format_seconds(profile.latency_s),
            )),
            "\n".join(f"{link.peer}: {link.kind}" for link in node.links),
            "" if node.last_seen_age_s is None else f"{format_seconds(node.last_seen_age_s)} ago",
            "\n".join([node.activity or node.reason, *_replicas(node)]),
        )  # fmt: skip
    return table


def _replicas(node: NodeStatus) -> list[str]:
    """Return the newest replicas of other stages that the node stores."""
    others = [replica for replica in node.replicas if (replica.cluster, replica.stage) != (node.cluster, node.stage)]
    return [
        f"replica of {replica.cluster} stage {replica.stage}, {format_seconds(replica.age_s)} old"
        for replica in others[-2:]
    ]


def _place(node: NodeStatus) -> str:
    return node.state if node.cluster is None else f"{node.state} {node.cluster} stage {node.stage}"


def _cluster(cluster: ClusterStatus) -> Table:
    loss = "" if cluster.loss is None else f", loss {cluster.loss:.4f}"
    rate = "" if cluster.samples_per_s is None else f"{cluster.samples_per_s:.1f} of "
    title = f"cluster {cluster.id} {cluster.phase}: {rate}{cluster.planned_samples_per_s:.1f} samples/s planned{loss}"
    table = Table(title=title, caption=cluster.reason)
    for name in ("stage", "node", "ready", "updates", "bubble", "memory", "sent", "received"):
        table.add_column(name, justify="left" if name == "node" else "right")
    for stage in cluster.stages:
        table.add_row(
            str(stage.stage), stage.name, "yes" if stage.is_ready else "not yet", str(stage.updates),
            f"{stage.bubble:.1%}", format_bytes(stage.memory_bytes), format_bytes(stage.sent_bytes),
            format_bytes(stage.received_bytes),
        )  # fmt: skip
    return table
