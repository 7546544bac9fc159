"""`ravnest demo`: six uneven nodes of this machine train a small GPT; one crashes, another joins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ravnest.cli.dashboard import show_link
from ravnest.cli.options import Debug, config_options

if TYPE_CHECKING:
    from ravnest.cli.demo_acts import DemoActs
    from ravnest.run.result import Run

__all__ = ["demo"]

_JOB = Path(__file__).parents[1] / "examples" / "char_gpt.py"
# No node can hold the model alone (361 MB), no two of the small ones can together, any three can: two clusters.
_MEMORY_MB = (358, 343, 341, 356, 342, 341)
_SHARES = (0.4, 0.25, 0.2, 0.3, 0.2, 0.15)  # of a core, on a machine with two
_NEW_MEMORY_MB, _NEW_SHARE = 358, 0.35
_MAX_SCALE = 2.5  # with which the largest share is a whole core
_VALIDATION_BATCHES = 8
_BATCHES_PER_UPDATE = 2  # of the reference: two clusters make an update each on two batches
_WHOLE_S, _REFERENCE_S = 155.0, 3.0  # for all, and at least for the reference after the end of the run


@config_options("seed", "run_dir")
def demo(
    steps: Annotated[int, typer.Option(min=12, help="Optimizer steps, fewer on a slow machine.")] = 300,
    browser: Annotated[
        bool,
        typer.Option("--browser/--no-browser", help="Open the dashboard, where there is a display."),
    ] = True,
    debug: Debug = False,
    **changes: Any,
) -> None:
    """Train a small GPT on Python's own source, on six uneven nodes of this machine. About two minutes.

    The nodes lend different memory and shares of the processor. The planner forms clusters that cut the model
    differently; these train asynchronously and average over parallel rings. Then a node crashes, its cluster is
    repaired, and another node joins. One process trains on the same samples, synchronously, to compare with.

    Example: `ravnest demo --no-browser`
    """
    start_s = time.time()
    from ravnest.cli.demo_acts import ACTS, DemoActs, DemoConfig
    from ravnest.cli.render_demo import DemoView
    from ravnest.config import num_cores
    from ravnest.run.job_file import load_job
    from ravnest.run.local import LocalNode
    from ravnest.run.reference import Reference

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    scale = min(max(num_cores() / 2, 1.0), _MAX_SCALE)
    settings = DemoConfig(steps=steps)
    acts = DemoActs(settings, start_s)
    new_node = LocalNode(settings.new_node, _NEW_MEMORY_MB * 10**6, min(_NEW_SHARE * scale, 1.0))
    file = load_job(_JOB)
    reference = Reference(
        _JOB, seed=changes.get("seed", 0), batches_per_update=_BATCHES_PER_UPDATE,
        validation_batches=_VALIDATION_BATCHES,
    )  # fmt: skip
    view = DemoView(console, acts, new_node, reference, lambda link: show_link(link, console, browser=browser))
    try:
        view.line(f"six nodes lend {min(_MEMORY_MB)} to {max(_MEMORY_MB)} MB and a part of a core each")
        run = file.job.train(
            show=view, on=f"local:{len(_SHARES)}", clusters=0, steps=None, threads=1, microbatches_per_step=4,
            validate_every=max(steps // 5, 1), validation_batches=_VALIDATION_BATCHES,
            memory=",".join(f"{size}MB" for size in _MEMORY_MB),
            processor_shares=",".join(f"{min(share * scale, 1.0):g}" for share in _SHARES), **changes,
        )  # fmt: skip
        view.line("      waiting for the synchronous process, to compare with it")
        theirs = reference.finish(max(_WHOLE_S - view.seconds, _REFERENCE_S))
    finally:
        reference.close()
    _print_results(console, acts, run, reference.losses, theirs)
    if file.after is not None:
        console.print(f"\na text that the model wrote:\n{file.after(run)}\n", markup=False)
    console.print(f"the run is in {run.folder}; `ravnest dashboard {run.folder}` shows it again", soft_wrap=True)
    missing = [act for act in ACTS if act not in acts.happened]
    if missing or not acts.batches.is_balanced:
        console.print(f"not all acts happened: {', '.join(missing) or 'the batches do not balance'}")
        raise typer.Exit(1)


def _print_results(
    console: Console, acts: DemoActs, run: Run, reference: Sequence[tuple[float, float]], held_out: float | None
) -> None:
    """Print the summary and the curves of the run beside those of the synchronous process."""
    from ravnest.cli.render_demo import Comparison, loss_picture, smoothed, staleness_of, summary
    from ravnest.dashboard.history import read_lines

    losses = smoothed([(number + 1.0, loss) for number, loss in enumerate(run.losses)], 8)
    reference_losses = smoothed(reference, 4)
    reached = None
    if reference_losses:
        batches, loss = reference_losses[-1]
        reached = batches, loss, losses[min(round(batches), len(losses)) - 1][1]
    comparison = Comparison(run.evaluations[-1]["loss"], held_out, reached)
    console.print(summary(acts, staleness_of(list(read_lines(run.folder / "metrics.jsonl"))), comparison))
    console.print(loss_picture(losses, reference_losses), markup=False)
