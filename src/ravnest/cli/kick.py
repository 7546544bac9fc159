"""`ravnest kick`: remove a node from a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli.options import Debug

__all__ = ["kick"]


def kick(
    node: Annotated[str, typer.Argument(help="Name of the node, as `ravnest status` shows it.")],
    run: Annotated[Path | None, typer.Option(help="Directory of the run. Without it: the run in progress.")] = None,
    reason: Annotated[str, typer.Option(help="Reason that the node's owner sees.")] = "no reason was given",
    debug: Debug = False,
) -> None:
    """Remove a node from a run for good and revoke its certificate.

    Works only on the machine where the coordinator has its files.

    Example: `ravnest kick attic --reason "its results are wrong"`
    """
    from ravnest.cli.target import post_as_requester

    post_as_requester(run, "/v1/kick", {"node": node, "reason": reason})
    Console().print(f"{node} removed; its certificate is revoked", highlight=False)
