"""The `ravnest` command. Errors that the world causes are one sentence and exit code 2; `--debug` shows the rest."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from . import __version__
from .core.errors import RavnestError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Train a PyTorch model that fits on none of your machines, on all of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        Console().print(f"ravnest {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Train a PyTorch model that fits on none of your machines, on all of them."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="How many batches to train on.")] = 400,
    stages: Annotated[int, typer.Option(min=1, max=16, help="Into how many stages to cut the model.")] = 3,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Train a small GPT on Python's own source, in stages that are data. About a minute.

    Example: `ravnest demo --steps 1000 --stages 4`
    """
    from .demo import run_demo  # torch takes a second to import; --help does not need it

    run_demo(Console(), steps=steps, num_stages=stages, seed=seed)


def main() -> None:
    """Run the command line; turn what went wrong into one sentence."""
    try:
        app()
    except (RavnestError, ValueError) as error:
        if "--debug" in sys.argv:
            raise
        Console(stderr=True).print(f"ravnest: {error}", style="red", highlight=False, markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        sys.exit(130)
