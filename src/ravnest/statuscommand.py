"""`ravnest status`, `ravnest kick` and `ravnest ticket`: look at a coordinator, and tell it what only its owner may."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .coordinator.status import ClusterStatus, NodeStatus, Status
from .core.config import format_bytes
from .core.errors import LinkError
from .core.units import format_rate, format_seconds
from .reaching import Target, find_target, get_status

__all__ = ["kick", "new_ticket", "show_status", "status_page"]

_EVERY_S = 1.0
_EVENTS = 12


def show_status(what: str | None, *, watch: bool, as_json: bool) -> None:
    """Once, or again and again until Ctrl-C."""
    target = find_target(what)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    if as_json:
        console.out(msgspec.json.format(msgspec.json.encode(_now(target)), indent=1).decode(), highlight=False)
    elif not watch:
        console.print(status_page(_now(target)))
    else:
        _watch(target, console)


def _now(target: Target) -> Status:
    return asyncio.run(get_status(target))


def _watch(target: Target, console: Console) -> None:
    page: RenderableType = status_page(_now(target))
    with Live(page, console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(page, refresh=True)
            time.sleep(_EVERY_S)
            try:
                page = status_page(_now(target))
            except LinkError as error:
                page = f"{error}: trying again"


def status_page(status: Status) -> Group:
    """All of a status, for a terminal."""
    parts: list[RenderableType] = [_headline(status), _nodes(status)]
    parts += [_cluster(cluster) for cluster in status.clusters if cluster.phase in ("forming", "training")]
    parts += [_line(f"{time.strftime('%H:%M:%S', time.localtime(e.at_s))}  {e.text}") for e in status.events[-_EVENTS:]]
    return Group(*parts)


def _line(text: str) -> RenderableType:
    return Text(text)


def _headline(status: Status) -> RenderableType:
    leases = status.leases
    steps = f"{status.steps_done}" + (f" of {status.steps}" if status.steps is not None else "")
    rate = sum(cluster.samples_per_s or 0.0 for cluster in status.clusters if cluster.phase == "training")
    text = (
        f"{status.run}: {steps} batches trained, {rate:.1f} samples/s, up {format_seconds(status.uptime_s)}; "
        f"{leases.outstanding} lent, {leases.returned} given back, {leases.repeated} trained twice"
    )
    return _line(text + (f"; over: {status.ended}" if status.ended is not None else ""))


def _nodes(status: Status) -> Table:
    table = Table(title="nodes")
    for name in ("node", "state", "memory", "GFLOP/s", "up", "down", "latency", "links", "heard", "why"):
        table.add_column(name, overflow="fold")
    for node in status.nodes:
        has = node.profile
        table.add_row(
            node.name, _place(node),
            *(("", "", "", "", "") if has is None else (
                format_bytes(has.memory_bytes), f"{has.gflops:.1f}", format_rate(has.up_bytes_per_s),
                format_rate(has.down_bytes_per_s), format_seconds(has.latency_s),
            )),
            "\n".join(f"{link.peer}: {link.how}" for link in node.links),
            "" if node.heard_s_ago is None else f"{format_seconds(node.heard_s_ago)} ago",
            "\n".join([node.doing or node.why, *_keeps(node)]),
        )  # fmt: skip
    return table


def _keeps(node: NodeStatus) -> list[str]:
    """What it could give to others, if its own part is not that."""
    kept = [copy for copy in node.keeps if (copy.cluster, copy.stage) != (node.cluster, node.stage)]
    return [f"keeps {copy.cluster} stage {copy.stage}, {format_seconds(copy.age_s)} old" for copy in kept[-2:]]


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


def kick(node: str, what: str | None, reason: str) -> None:
    """Remove a node for good."""
    _tell(what, "/v1/kick", {"node": node, "reason": reason})
    Console().print(f"{node} is removed: its certificate is worth nothing now", highlight=False)


def new_ticket(what: str | None, valid_s: float, uses: int | None) -> None:
    """Print one more ticket."""
    answer = json.loads(_tell(what, "/v1/tickets", {"expires_s": valid_s, "uses": uses}))
    Console().print(answer["ticket"], highlight=False, markup=False, soft_wrap=True)


def _tell(what: str | None, path: str, body: dict[str, object]) -> bytes:
    target = find_target(what)
    if target.folder is None:
        raise ValueError("this needs the coordinator's folder or the run's, on the machine where it runs: not a ticket")

    async def ask() -> bytes:
        async with target.connect() as client:
            return await client.ask("POST", path, json=body)

    return asyncio.run(ask())
