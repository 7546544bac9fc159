"""`ravnest join`: run the agent that contributes this PC to a run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ravnest import __version__
from ravnest.cli.live_join import JoinOutput
from ravnest.cli.options import Debug, Device, LogJson, Output, output_of
from ravnest.core.host import host_name
from ravnest.core.ids import check_id
from ravnest.core.units import parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from ravnest.node.agent import AgentConfig, Farewell
    from ravnest.node.console import AgentConsole
    from ravnest.node.membership import TicketMembership

__all__ = ["join", "node_page"]

_INTERRUPTED = 130
_AWAY = 3


def join(
    ticket: Annotated[str, typer.Argument(help="The ticket that `ravnest train --listen` printed: rav1-...")],
    name: Annotated[str | None, typer.Option(help="Name of this PC in the run. Without it: its host name.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory limit, such as 4GB. Without it: what is free, shared with other agents here."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Processor cores to use. Without it: all, shared with other agents here.")
    ] = None,
    device: Device = "auto",
    max_upload: Annotated[
        str | None, typer.Option(metavar="RATE", help="Upload limit, such as '10 Mbit/s'. Without it: no limit.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for links from other nodes; 0: a free one, kept for next time.")
    ] = 0,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory of this node's key and files. Without it: the user's data directory.")
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="After the end of a run, wait for the next one of this ticket, without end.")
    ] = False,
    wait: Annotated[
        str, typer.Option(metavar="TIME", help="Time to wait for a coordinator that does not answer.")
    ] = "1h",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    log_json: LogJson = False,
    debug: Debug = False,
) -> None:
    """Contribute this PC to a run: measure it, join, train the assigned stage, and reconnect when the link is lost.

    None of the requester's code runs here, only checked arithmetic. It ends with the run. Ctrl-C leaves once others
    have taken over, within seconds; a second Ctrl-C leaves at once.

    Exit codes: 0 when the run has ended or after Ctrl-C, 1 when the coordinator has removed this node, 3 when the
    coordinator has not answered for the time of --wait.

    Example: `ravnest join rav1-... --name attic --memory 4GB --max-upload "10 Mbit/s"`
    """
    from ravnest.node.agent import AgentConfig
    from ravnest.node.membership import TicketMembership
    from ravnest.node.storage import NodeStorage, node_directory
    from ravnest.transport.ticket import Ticket

    output = output_of(quiet=quiet, log_json=log_json)
    parsed, node = Ticket.parse(ticket), check_id(name) if name else host_name()
    directory = node_directory(data_dir, parsed.fingerprint, node)
    config = AgentConfig(
        release=__version__,
        home=NodeStorage(directory),
        port=port,
        memory_bytes=None if memory is None else parse_bytes(memory),
        threads=threads,
        device=device,
        max_upload_bytes_per_s=None if max_upload is None else parse_rate(max_upload),
        max_wait_s=None if stay else parse_seconds(wait),
        stays=stay,
    )
    sys.exit(_run_agent(config, TicketMembership(parsed, node, __version__, directory), output))


def _run_agent(config: AgentConfig, membership: TicketMembership, output: Output) -> int:
    """Run until the run ends or Ctrl-C (0), the coordinator removes this node (1) or does not answer (3)."""
    from ravnest.node.agent import CoordinatorAway
    from ravnest.node.console import AgentConsole, given, thanks
    from ravnest.node.session import DisconnectedByCoordinator

    lines = JoinOutput(Console(), output)
    console = AgentConsole(lines.write)
    lines.open(console)
    try:
        farewell = asyncio.run(_run_until_interrupted(config, membership, console))
    except DisconnectedByCoordinator as error:
        console.log(f"removed by the coordinator: {error}")
        return 1
    except CoordinatorAway as error:
        console.log(str(error))
        return _AWAY
    finally:
        lines.close()
    if farewell is not None and farewell.is_run_over:
        console.log(thanks(farewell.contribution))
    elif farewell is not None and farewell.contribution is not None and farewell.contribution.batches:
        console.log(f"left: thank you. {given(farewell.contribution)}")
    else:
        console.log("left")
    return 0


async def _run_until_interrupted(
    config: AgentConfig, membership: TicketMembership, console: AgentConsole
) -> Farewell | None:
    from ravnest.node.agent import Agent

    is_leaving = False

    def interrupted() -> None:
        nonlocal is_leaving
        if is_leaving:
            agent.kill()
            os._exit(_INTERRUPTED)
        is_leaving = True
        agent.leave()

    async with node_page(membership, config.home.directory) as page:
        agent = Agent(dataclasses.replace(config, page=page), membership, console)
        with _on_signals(interrupted):
            return await agent.run()


@contextlib.asynccontextmanager
async def node_page(membership: TicketMembership, directory: Path) -> AsyncIterator[Callable[[str], str]]:
    """Serve the dashboard to browsers of this PC; yields a function that returns a line about a node's page.

    The link is a secret: it is printed on a terminal only, and kept in a file of this user elsewhere.
    """
    from ravnest.cli.dashboard import RemoteRun
    from ravnest.dashboard.listener import LocalListener
    from ravnest.dashboard.site import Access

    listener, path = LocalListener(RemoteRun(membership.connect), Access.new()), directory / "page.url"
    try:
        await listener.open()
    except OSError:  # without a page the node works as well
        yield lambda name: ""
        return

    def describe(name: str) -> str:
        link = listener.access.link("viewer", page=f"node/{name}")
        if sys.stdout.isatty():
            return f"this node's page: {link}"
        try:
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{link}\n")
        except OSError:
            return ""
        return f"this node's page: the link is in {path}"

    try:
        yield describe
    finally:
        path.unlink(missing_ok=True)
        await listener.close()


@contextlib.contextmanager
def _on_signals(interrupted: Callable[[], None]) -> Iterator[None]:
    """Call `interrupted` in the running event loop on SIGINT and SIGTERM; ignore them afterwards: the process ends."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(interrupted))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
