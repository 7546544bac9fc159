"""`ravnest export`: write the weights of a run for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ravnest.cli.options import Debug

__all__ = ["export"]


def export(
    run: Annotated[Path, typer.Argument(help="Directory of a run, or of one of its checkpoints.")],
    to: Annotated[
        str, typer.Option(metavar="PATH", help="A file NAME.safetensors, or a directory for a transformers model.")
    ],
    job: Annotated[
        Path | None, typer.Option(help="The job file, for a directory, if the run does not name it.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write the weights of a run: a file for `load_state_dict`, or a directory for `from_pretrained`.

    They are those of the final model, or of the newest checkpoint if that has more steps.

    Example: `ravnest export runs/mine --to model.safetensors`
    """
    from ravnest.run.checkpoint.export import export as write

    Console().print(write(run, to, job), markup=False, highlight=False, soft_wrap=True)
