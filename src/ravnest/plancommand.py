"""`ravnest plan`: read the nodes, put the question, plan, simulate, show. The plan goes to stdout, all else to stderr.

Nothing here needs torch until the nodes are read, so a mistake in a node file is told at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .core.config import config, require
from .core.units import format_seconds, parse_seconds
from .nodefile import read_nodes
from .plan.faults import draw_faults
from .plan.fleet import FleetPlan, Task
from .plan.form import form
from .plan.outcome import Simulation
from .plan.problem import DoesNotFit
from .plan.simulate import SimulationSettings, simulate
from .plan.timeline import timeline
from .plan.upgrade import best_upgrade
from .planreport import Report, make_report, simulation_report
from .planshow import plan_page

if TYPE_CHECKING:
    from .api import Job

__all__ = ["Asked", "plan_command"]

_SHORT_S = 60.0  # of a simulation that nobody asked for, but that a timeline needs
_LEAST_S, _MOST_S = 0.001, 7 * 24 * 3600.0
_MOST_EVENTS = 100_000  # of a timeline: about as many as a browser likes


@config
class Asked:
    """What the command line says. `changes` are fields of `Training` and win over the job's own."""

    job: Path
    nodes: Path
    changes: dict[str, Any]
    num_spares: int = 0
    whole: bool = False
    as_json: bool = False
    simulate: str | None = None
    trace: Path | None = None
    seed: int = 0

    @property
    def simulated_s(self) -> float | None:
        """How long a run to simulate."""
        if self.simulate is None:
            return None if self.trace is None else _SHORT_S
        seconds = parse_seconds(self.simulate)
        require(_LEAST_S <= seconds <= _MOST_S, f"simulate from a moment to a week, not {self.simulate!r}")
        return seconds


def plan_command(asked: Asked) -> None:
    """Print the plan, or raise what stands in its way."""
    simulated_s = asked.simulated_s
    if asked.trace is not None:
        require(asked.trace.parent.is_dir(), f"there is no folder {asked.trace.parent} to write {asked.trace.name} to")
    nodes = read_nodes(asked.nodes)
    from .fleetplan import fleet_question
    from .jobfile import load_job

    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    job = _changed(load_job(asked.job).job, asked.changes)
    question = fleet_question(job, nodes, num_spares=asked.num_spares, whole=asked.whole, say=say)
    say(f"planning for {len(nodes.machines)} {'node' if len(nodes.machines) == 1 else 'nodes'}")
    plan = _formed(question.task, asked.seed)
    report = make_report(
        question.task, plan, microbatch_flops=question.microbatch_flops, reference_gflops=question.reference_gflops
    )
    report = replace(report, upgrade=best_upgrade(question.task, plan))
    if simulated_s is not None:
        say(f"simulating {format_seconds(simulated_s)}")
        simulation = _simulated(question.task, plan, simulated_s, asked)
        report = replace(report, simulation=simulation_report(simulation))
        if asked.trace is not None:
            asked.trace.write_text(json.dumps({"traceEvents": timeline(simulation, max_events=_MOST_EVENTS)}))
            say(f"wrote the timeline {asked.trace}: open it at https://ui.perfetto.dev")
    _print(report, as_json=asked.as_json)


def _formed(task: Task, seed: int) -> FleetPlan:
    """The plan; if there is none for want of memory, the error also names the flags that would help."""
    try:
        return form(task, seed=seed)
    except DoesNotFit as error:
        remedies = " ".join(error.remedies)
        flags = ["--recompute"] if "recomputation" in remedies else []
        flags += [f"--microbatch {task.microbatch // 2}"] if "half the microbatch" in remedies else []
        if not flags:
            raise
        raise DoesNotFit(f"{error} Try {' or '.join(flags)}.", error.missing_bytes, error.remedies) from error


def _simulated(task: Task, plan: FleetPlan, duration_s: float, asked: Asked) -> Simulation:
    """With the failures that the nodes' reliability makes likely; recorded as far as a timeline has room."""
    events_per_s = sum(6 * len(c.members) / c.partition.interval_s for c in plan.clusters)
    return simulate(
        task,
        plan,
        duration_s=duration_s,
        faults=draw_faults(task.fleet, duration_s, seed=asked.seed),
        seed=asked.seed,
        settings=SimulationSettings(record_s=0.0 if asked.trace is None else _MOST_EVENTS / events_per_s),
    )


def _print(report: Report, *, as_json: bool) -> None:
    console = Console()
    if as_json:
        console.out(json.dumps(asdict(report), indent=1, allow_nan=False), highlight=False)
        return
    if not console.is_terminal:
        console = Console(width=120)  # a log has room for the tables
    console.print(plan_page(report))


def _changed(job: Job, changes: dict[str, Any]) -> Job:
    """The job as the command line wants it trained: if that says how to split a batch, the job no longer does."""
    splits = dict.fromkeys(("microbatch", "accumulate")) if {"microbatch", "accumulate"} & changes.keys() else {}
    return replace(job, training=replace(job.training, **{**splits, **changes}))
