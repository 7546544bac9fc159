"""The `ravnest` command: one module of this package per subcommand.

An error that a user can fix prints one message and exits with code 2; `--debug` shows its traceback. An error that the
user's own code raises prints the frames of that code and one message, and exits with code 1. Ctrl-C exits with code
130. Command modules import what needs torch when they run, so that `--help` is quick.
"""

from __future__ import annotations

import errno
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from ravnest import __version__
from ravnest.cli.dashboard import dashboard
from ravnest.cli.demo import demo
from ravnest.cli.doctor import doctor
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

__all__ = ["app", "main", "user_frames"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
for command in (train, export, generate, profile, plan, join, status, dashboard, kick, ticket, doctor, demo):
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
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        sys.exit(130)
    except BaseException as error:  # errors of the user's own code are of any kind, SystemExit included
        if "--debug" in sys.argv:
            raise
        frames = user_frames(error)
        if isinstance(error, SystemExit):
            if not frames:
                raise
            _fail(error, 1, frames, f"the code of the job called sys.exit({error.code!r}): leave that out")
        if not frames and isinstance(error, RavnestError | ValueError):
            _fail(error, 2, (), str(error))
        if frames or hasattr(error, "__notes__"):  # notes say that the user's data raised it
            _fail(error, 1, frames, f"{type(error).__name__}: {error}")
        if isinstance(error, OSError):
            place = f": {error.filename}" if error.filename else ""
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "; free some, or choose another disk with --run-dir" if is_full else ""
            _fail(error, 1, (), f"{error.strerror or error}{place}{hint}")
        raise


def _fail(error: BaseException, code: int, frames: Sequence[traceback.FrameSummary], text: str) -> NoReturn:
    """Print the user's own frames and one message, and exit."""
    console = Console(stderr=True)
    for line in traceback.format_list(list(frames)):
        console.print(line.rstrip(), highlight=False, markup=False, soft_wrap=True)
    message = ". ".join([f"ravnest: {text}", *getattr(error, "__notes__", [])])
    console.print(message, style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(code)


_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
    Path(path) for path in {sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")}
)

_LIBRARY_FOLDERS = {"site-packages", "dist-packages"}


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's own code, if that code raised the error, directly or in a library."""
    own: list[traceback.FrameSummary] = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(_PACKAGE):
            own = []  # the code of Ravnest was called after the user's
        elif path.is_file() and not _is_library(path):
            own.append(frame)
    return own


def _is_library(path: Path) -> bool:
    """Return whether a file is part of an installed library, also one of the user's own or of the system."""
    is_known = any(path.is_relative_to(library) for library in _LIBRARIES)
    return is_known or not _LIBRARY_FOLDERS.isdisjoint(path.parts)
