"""`ravnest status`: show a run that trains on nodes that joined."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ravnest.cli.live_region import is_live
from ravnest.cli.options import Debug
from ravnest.errors import LinkError

if TYPE_CHECKING:
    from ravnest.cli.target import CoordinatorTarget
    from ravnest.coordinator.status import RunStatus

__all__ = ["status"]

_REFRESH_S = 1.0


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
    from ravnest.cli.render_status import status_page
    from ravnest.cli.target import find_target

    target = find_target(run)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    if as_json:
        console.out(msgspec.json.format(msgspec.json.encode(_fetch(target)), indent=1).decode(), highlight=False)
    elif not watch:
        console.print(status_page(_fetch(target), console.width))
    else:
        _watch(target, console)


def _fetch(target: CoordinatorTarget) -> RunStatus:
    from ravnest.cli.target import get_status

    return asyncio.run(get_status(target))


def _watch(target: CoordinatorTarget, console: Console) -> None:
    from ravnest.cli.render_status import status_page

    if not is_live(console):
        while True:
            console.print(status_page(_fetch(target), console.width))
            time.sleep(_REFRESH_S)
    status, problem = _fetch(target), ""
    with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        while True:
            page = status_page(status, console.width, console.height - bool(problem))
            live.update(Group(*([Text(problem, style="red")] if problem else []), page), refresh=True)
            time.sleep(_REFRESH_S)
            try:
                status, problem = _fetch(target), ""
            except LinkError as error:
                problem = f"{error}; retrying"
