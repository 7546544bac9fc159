"""The `ravnest` command: one module of this package per subcommand.

An error that a user can fix prints one message and exits with code 2; `--debug` shows its traceback. Ctrl-C exits with
code 130. Command modules import what needs torch when they run, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from ravnest import __version__
from ravnest.cli.demo import demo
from ravnest.cli.export import export
from ravnest.cli.generate import generate
from ravnest.cli.join import join
from ravnest.cli.kick import kick
from ravnest.cli.options import Command
from ravnest.cli.plan import plan
from ravnest.cli.profile import profile
from ravnest.cli.status import status
from ravnest.cli.ticket import ticket
from ravnest.cli.train import train
from ravnest.errors import RavnestError

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
for command in (train, export, generate, profile, plan, join, status, kick, ticket, demo):
    app.command(cls=Command)(command)


def _print_version(is_given: bool) -> None:
    if is_given:
        Console().print(f"ravnest {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def ravnest(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train a PyTorch model that fits on none of your machines, on all of them."""


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        app()
    except (RavnestError, ValueError) as error:
        if "--debug" in sys.argv:
            raise
        message = ". ".join([f"ravnest: {error}", *getattr(error, "__notes__", [])])
        Console(stderr=True).print(message, style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        sys.exit(130)
