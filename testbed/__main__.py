"""Command line of the testbed, `python -m testbed`: runs commands on emulated hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ravnest.errors import RavnestError
from testbed import command as testbed_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def run_testbed(
    topology: Annotated[Path | None, typer.Argument(help="A TOML file; see `testbed/home.toml`.")] = None,
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: the command for hosts that have none in the file.")
    ] = None,
    host: Annotated[list[str] | None, typer.Option(help="Run the command on this host only; may be repeated.")] = None,
    duration: Annotated[str | None, typer.Option(metavar="TIME", help="Stop after TIME, such as 30s.")] = None,
    cut: Annotated[
        list[str] | None,
        typer.Option(help="Drop all packets of a host: 'anna-1 5s after 10s'; with two hosts, those between them."),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Suspend a host (SIGSTOP): 'anna-1 5s after 10s'.")] = None,
    kill: Annotated[
        list[str] | None, typer.Option(help="Kill all processes of a host (SIGKILL): 'anna-1 after 10s'.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Show the hosts and what this machine lacks.")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="Remove what killed testbeds have left behind.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run a command on emulated home PCs with slow lines, NATs and faults. Needs Linux and root.

    In a command, `{name}` and `{address}` stand for the host's own. Hosts resolve the names of their home and of public
    hosts. Ctrl-C stops all commands.

    Example: `python -m testbed home.toml --cut "anna-1 5s after 10s" -- ravnest join --name {name} TICKET`
    """
    if clean:
        testbed_command.clean_up()
    if topology is None:
        if not clean:
            raise ValueError("name a topology file, such as testbed/home.toml, or --clean")
    elif check:
        testbed_command.check(topology)
    else:
        options = testbed_command.TestbedOptions(
            topology=topology, command=tuple(command or ()), only=tuple(host or ()), duration=duration,
            cut=tuple(cut or ()), stop=tuple(stop or ()), kill=tuple(kill or ()),
        )  # fmt: skip
        sys.exit(testbed_command.run(options))


def main() -> None:
    """Run the command line; print an error as one sentence and exit with code 2."""
    try:
        app()
    except (RavnestError, ValueError) as error:
        if "--debug" in sys.argv:
            raise
        Console(stderr=True).print(f"testbed: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        sys.exit(130)


if __name__ == "__main__":
    main()
