"""`ravnest ticket`: print another ticket for a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli.options import Debug
from ravnest.core.units import parse_seconds

__all__ = ["ticket"]


def ticket(
    run: Annotated[Path | None, typer.Option(help="Directory of the run. Without it: the run in progress.")] = None,
    valid: Annotated[str, typer.Option(metavar="TIME", help="Time until the ticket expires.")] = "7d",
    uses: Annotated[
        int | None, typer.Option(min=1, help="Number of PCs that may join with it. Without it: no limit.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Print another ticket for a run that listens. Works only on the machine where the coordinator has its files.

    Example: `ravnest ticket --valid 2h --uses 1`
    """
    from ravnest.cli.target import post_as_requester

    answer = json.loads(post_as_requester(run, "/v1/tickets", {"expires_s": parse_seconds(valid), "uses": uses}))
    Console().print(answer["ticket"], highlight=False, markup=False, soft_wrap=True)
