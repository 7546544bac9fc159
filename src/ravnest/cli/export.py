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
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter of peft into the model; else the adapter is written.")
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest size of one file in a directory, such as 500MB.")
    ] = "5GB",
    debug: Debug = False,
) -> None:
    """Write the weights of a run: a file for `load_state_dict`, or a directory for `from_pretrained`.

    They are those of the final model, or of the newest checkpoint if that has more steps. Of a model with an adapter of
    peft, a directory gets the adapter for `PeftModel.from_pretrained`, or with --merge the merged model.

    Example: `ravnest export runs/mine --to model.safetensors`
    """
    from ravnest.run.checkpoint.export import export as write

    message = write(run, to, job, merge=merge, max_shard_size=max_shard_size)
    Console().print(message, markup=False, highlight=False, soft_wrap=True)
