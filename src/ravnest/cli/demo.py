"""`ravnest demo`: train a small GPT on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ravnest.cli.options import Debug, config_options
from ravnest.cli.train import run_job

__all__ = ["demo"]


@config_options("seed", "run_dir")
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 400,
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Number of processes that share the model.")] = 3,
    debug: Debug = False,
    **changes: Any,
) -> None:
    """Train a small GPT on Python's own source, split over uneven processes of this machine. About a minute.

    The first node has a processor core of its own and the others share the next one, so that the plan is uneven.

    Example: `ravnest demo --steps 1000 --nodes 4`
    """
    from ravnest.run.job_file import load_job

    path = Path(__file__).parents[1] / "examples" / "char_gpt.py"
    settings = {"on": f"local:{nodes}", "steps": steps, "validate_every": max(1, steps // 4)}
    run_job(load_job(path), {**settings, **_uneven_cores(nodes), **changes})


def _uneven_cores(nodes: int) -> dict[str, str]:
    """Return one core for the first node and one for all others, if this machine has two and allows pinning."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(usable) < 2 or nodes < 2:
        return {}
    return {"cores": ",".join(str(core) for core in [usable[0], *[usable[1]] * (nodes - 1)])}
