"""`ravnest dashboard`: show a run in the browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ravnest.cli.options import Debug
from ravnest.core.config import require
from ravnest.errors import RavnestError

if TYPE_CHECKING:
    from aiohttp import web

    from ravnest.dashboard.site import DashboardData
    from ravnest.node.client import Client

__all__ = ["RemoteRun", "dashboard", "may_open_browser", "show_link"]

_TICKET = "rav"


def dashboard(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|TICKET]", help="The directory of a run, or a ticket. Without it: the only run that listens."
        ),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the pages of a run's directory into one HTML file.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the browser, where there is a display.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Show a run in the browser: curves, nodes, plan, contributions and events; also after its end.

    Example: `ravnest dashboard runs/mine`

    Example: `ravnest dashboard runs/mine --export report.html`
    """
    from ravnest.dashboard.report import FinishedRun, write_report

    console = Console(soft_wrap=True, highlight=False)
    is_ticket = run is not None and run.strip().lower().startswith(_TICKET) and not Path(run).is_dir()
    if export is not None:
        require(run is not None and not is_ticket, "--export needs the directory of a run, on the machine where it ran")
        write_report(Path(str(run)), export)
        console.print(f"wrote {export}", markup=False)
    elif is_ticket:
        from ravnest.cli.target import find_target

        target = find_target(run)
        asyncio.run(_serve(RemoteRun(target.connect, target.headers), console, browser=browser))
    elif (link := _running_link(run)) is not None:
        show_link(link, console, browser=browser)
    else:
        require(run is not None, "no run of this user listens here: give the directory of a run")
        asyncio.run(_serve(FinishedRun(Path(str(run))), console, browser=browser))


def _running_link(run: str | None) -> str | None:
    """Return the link to a run that is going on at this machine; None if it has ended."""
    from ravnest.cli.target import find_target, get_status
    from ravnest.dashboard.live import ACCESS_FILE
    from ravnest.dashboard.site import Access

    try:
        target = find_target(run)
        if target.folder is None or not (target.folder / ACCESS_FILE).is_file():
            return None
        asyncio.run(get_status(target))  # its files may be left over from a process that was killed
    except (RavnestError, ValueError):
        return None
    return Access.open(target.folder / ACCESS_FILE).link()


def show_link(link: str, console: Console, *, browser: bool) -> None:
    """Print the link, and open it where there is a display."""
    console.print(f"dashboard: {link}", markup=False, soft_wrap=True)
    if browser and may_open_browser(os.environ, sys.platform):
        import webbrowser

        webbrowser.open(link)


def may_open_browser(environment: Mapping[str, str], platform: str) -> bool:
    """Return whether to open a browser: where there is a display, and not in continuous integration."""
    if environment.get("CI"):
        return False
    return platform != "linux" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


async def _serve(data: DashboardData, console: Console, *, browser: bool) -> None:
    """Serve the pages on this machine until Ctrl-C."""
    from ravnest.dashboard.listener import LocalListener
    from ravnest.dashboard.site import Access

    listener = LocalListener(data, Access.new())
    try:
        await listener.open()
    except OSError as error:
        raise ValueError(f"cannot listen on this machine: {error.strerror or error}") from error
    show_link(listener.access.link(), console, browser=browser)
    console.print("serving until Ctrl-C")
    try:
        await asyncio.Event().wait()
    finally:
        await listener.close()


class RemoteRun:
    """Forwards the data of a coordinator, whose certificate a browser does not know."""

    def __init__(
        self, connect: Callable[[], AbstractAsyncContextManager[Client]], headers: Mapping[str, str] | None = None
    ) -> None:
        self._connect, self._headers = connect, dict(headers or {})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        from ravnest.dashboard.site import HEADERS

        try:
            async with (
                self._connect() as client,
                client.request("GET", "/dashboard/v1/stream", headers=self._headers) as answer,
            ):
                response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
                await response.prepare(request)
                with contextlib.suppress(ConnectionError):
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
                return response
        except RavnestError as error:
            return web.json_response({"error": str(error)}, status=502, headers=HEADERS)

    async def node(self, name: str) -> bytes:
        return await self._get(f"/dashboard/v1/nodes/{urllib.parse.quote(name, safe='')}")

    async def access(self) -> bytes:
        return await self._get("/dashboard/v1/access")

    async def metrics(self) -> bytes:
        return await self._get("/dashboard/metrics")

    async def _get(self, path: str) -> bytes:
        async with self._connect() as client:
            return await client.ask("GET", path, headers=self._headers)

    async def close(self) -> None:
        """Nothing is kept open between requests."""
