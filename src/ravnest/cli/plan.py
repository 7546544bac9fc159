"""`ravnest plan`: plan a job for the PCs of a node file, and simulate the plan, without training.

The plan goes to stdout, progress to stderr. Nothing here imports torch before the node file is read, so that a mistake
in it is reported at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ravnest.cli.options import Debug, config_options
from ravnest.core.config import require
from ravnest.core.units import format_seconds, parse_seconds

if TYPE_CHECKING:
    from ravnest.cli.render_plan import PlanReport
    from ravnest.planner.fleet import FleetPlan, Task
    from ravnest.run.job import Job
    from ravnest.simulator.results import Simulation

__all__ = ["plan"]

_TRACE_S = 60.0  # length of the simulation with --trace but without --simulate
_MIN_S, _MAX_S = 0.001, 7 * 24 * 3600.0
_MAX_EVENTS = 100_000  # of a timeline: about what a browser can show
_SPLITS = ("microbatch", "microbatches_per_step")


@config_options(
    *_SPLITS, "max_length", "max_batch_size", "max_staleness", "spares", "memory_mode", "recompute",
    "activation_compression", "allow_single_node",
)  # fmt: skip
def plan(
    job: Annotated[Path, typer.Argument(help="Python file that defines `job = ravnest.Job(...)`.")],
    nodes: Annotated[Path, typer.Option(help="TOML file of the PCs; see `examples/nodes.toml`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
    simulate: Annotated[
        str | None, typer.Option(metavar="TIME", help="Simulate a run of this length, such as 10m, with failures.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the simulated timeline to this file, for Perfetto.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the search and of the simulated failures.")] = 0,
    debug: Debug = False,
    **changes: Any,
) -> None:
    """Plan which PC would train which part of a model, and how fast. Trains nothing.

    The operations of the model are timed on this machine, which takes a few seconds, and scaled by the speed in
    GFLOP/s that the node file has for each PC.

    Example: `ravnest plan job.py --nodes nodes.toml --simulate 10m --trace run.json`
    """
    from ravnest.planner.node_file import read_nodes

    simulated_s = _simulated_s(simulate, trace)
    require(trace is None or trace.parent.is_dir(), f"--trace {trace}: the directory does not exist")
    require(changes.get("max_staleness") != 0, "--max-staleness must be >= 1 for a plan, got 0")
    fleet = read_nodes(nodes)
    from ravnest.cli.render_plan import make_report, simulation_report
    from ravnest.planner.upgrade import best_upgrade
    from ravnest.run.fleet_plan import make_plan_request
    from ravnest.run.job_file import load_job
    from ravnest.simulator.results import timeline

    log = Console(stderr=True, highlight=False, soft_wrap=True).print
    request = make_plan_request(_with_changes(load_job(job).job, changes), fleet, log=log)
    log(f"planning for {len(fleet.machines)} {'node' if len(fleet.machines) == 1 else 'nodes'}")
    chosen = _make_plan(request.task, seed)
    report = make_report(
        request.task, chosen, microbatch_flops=request.microbatch_flops, reference_gflops=request.reference_gflops
    )
    report = replace(report, upgrade=best_upgrade(request.task, chosen))
    if simulated_s is not None:
        log(f"simulating {format_seconds(simulated_s)}")
        simulation = _simulate(request.task, chosen, simulated_s, seed=seed, is_recorded=trace is not None)
        report = replace(report, simulation=simulation_report(simulation))
        if trace is not None:
            trace.write_text(json.dumps({"traceEvents": timeline(simulation, max_events=_MAX_EVENTS)}))
            log(f"wrote the timeline {trace}: open it at https://ui.perfetto.dev")
    _print(report, as_json=as_json)


def _simulated_s(simulate: str | None, trace: Path | None) -> float | None:
    """Return the length of the run to simulate, if any."""
    if simulate is None:
        return None if trace is None else _TRACE_S
    seconds = parse_seconds(simulate)
    require(_MIN_S <= seconds <= _MAX_S, f"--simulate must be between 1 ms and 7 days, got {simulate!r}")
    return seconds


def _with_changes(job: Job, changes: dict[str, Any]) -> Job:
    """Return the job with the options of the command line; an option that splits the batch replaces the job's split."""
    splits = dict.fromkeys(_SPLITS) if changes.keys() & set(_SPLITS) else {}
    return replace(job, config=replace(job.config, **{**splits, **changes}))


def _make_plan(task: Task, seed: int) -> FleetPlan:
    """Return the best plan; the error of a lack of memory also names the flags that would help."""
    from ravnest.planner.clusters.search import form_clusters
    from ravnest.planner.problem import DoesNotFit

    try:
        return form_clusters(task, seed=seed)
    except DoesNotFit as error:
        remedies = " ".join(error.remedies)
        modes = [mode for mode in ("compact", "small") if f"memory mode {mode}" in remedies]
        flags = [f"--memory-mode {mode}" for mode in modes[:1]]
        flags += ["--recompute"] if "recomputation" in remedies else []
        flags += [f"--microbatch {task.microbatch // 2}"] if "half the microbatch" in remedies else []
        if not flags:
            raise
        raise DoesNotFit(f"{error} Try {' or '.join(flags)}.", error.missing_bytes, error.remedies) from error


def _simulate(task: Task, plan: FleetPlan, duration_s: float, *, seed: int, is_recorded: bool) -> Simulation:
    """Simulate with failures drawn from the nodes' reliability; record as many events as a timeline may have."""
    from ravnest.simulator.simulation import SimulationSettings, draw_faults, simulate

    events_per_s = sum(6 * len(c.members) / c.partition.interval_s for c in plan.clusters)
    return simulate(
        task,
        plan,
        duration_s=duration_s,
        faults=draw_faults(task.fleet, duration_s, seed=seed),
        seed=seed,
        settings=SimulationSettings(record_s=_MAX_EVENTS / events_per_s if is_recorded else 0.0),
    )


def _print(report: PlanReport, *, as_json: bool) -> None:
    from ravnest.cli.render_plan import plan_page

    console = Console()
    if as_json:
        console.out(json.dumps(asdict(report), indent=1, allow_nan=False), highlight=False)
        return
    if not console.is_terminal:
        console = Console(width=120)  # a log has room for the tables
    console.print(plan_page(report))
