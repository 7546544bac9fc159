"""`ravnest train`: train the job that a Python file defines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ravnest.cli.options import Debug, LogJson, Output, Quiet, config_options, output_of
from ravnest.config import LOCAL, options
from ravnest.core.config import require

if TYPE_CHECKING:
    from ravnest.run.job_file import JobFile

__all__ = ["train"]


@config_options()
def train(
    job: Annotated[Path, typer.Argument(help="Python file that defines `job = ravnest.Job(...)`.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="Arguments of the job file, in its sys.argv.")
    ] = None,
    local: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train on this machine, split over N processes.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="[HOST]:PORT", help="Listen there and train on the nodes that join.")
    ] = None,
    quiet: Quiet = False,
    log_json: LogJson = False,
    debug: Debug = False,
    **changes: Any,
) -> None:
    """Train a job, on this machine or on PCs that join.

    Options win over the configuration in the job file (`ravnest.Job(config=...)`). Ctrl-C finishes the current step,
    saves the model and exits.

    Example: `ravnest train job.py --local 4 --steps 1000 --memory 1GB,1GB,2GB,2GB`

    Example: `ravnest train job.py --listen :7700 --min-nodes 5`, and `ravnest join TICKET` on five PCs

    Example: `ravnest train job.py --local 2 -- --width 256`, for a job file that reads `--width` with argparse

    Example: `ravnest train job.py --resume runs/mine --steps 2000`, for a run made with `--checkpoint-every 100`
    """
    require(local is None or listen is None, "give --local or --listen, not both")
    output = output_of(quiet=quiet, log_json=log_json)
    if listen is not None:
        misplaced = [option.flag for option in options() if option.group == LOCAL and option.name in changes]
        require(not misplaced, f"{', '.join(misplaced)}: only with --local; nodes that join set their own limits")
    if local is not None or listen is not None:
        changes["on"] = listen or f"local:{local}"
    from ravnest.run.job_file import load_job  # imports torch, which takes a second

    loaded = load_job(job, arguments or ())
    loaded.job.source, loaded.job.arguments = job, tuple(arguments or ())
    run_job(loaded, changes, output)


def run_job(file: JobFile, changes: dict[str, Any], output: Output = "auto") -> None:
    """Train with these fields of the configuration changed; show the progress and a summary."""
    from ravnest.cli.render_run import JsonView, progress_view, summary

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has room for the tables
    steps = changes.get("steps", file.job.config.steps)
    view = progress_view(console, steps, output)
    run = file.job.train(show=view, **changes)
    if isinstance(view, JsonView):
        after = "" if file.after is None else str(file.after(run))
        view.write(
            "end", steps=run.steps, loss=run.losses[-1] if run.losses else None, samples_per_s=run.samples_per_s,
            run_dir=str(run.folder), after=after,
        )  # fmt: skip
        return
    if output == "quiet":
        console.print(str(run.folder), highlight=False, markup=False, soft_wrap=True)
        return
    console.print(summary(run))
    for evaluation in run.evaluations[-1:]:
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in evaluation.items() if name != "step")
        console.print(f"held-out: {metrics}")
    if file.after is not None:
        console.print(file.after(run), markup=False, highlight=False)
    console.print(f"the run is in {run.folder}", highlight=False, soft_wrap=True)
