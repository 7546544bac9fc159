"""Measures the time to simulate ten thousand nodes, and whether the planner's prediction holds in the simulation.

A thousand uneven home PCs are planned for a GPT. That fleet is simulated with failures: machines leave and come back
as their reliability says, and each repair is a plan as the coordinator would make it. Ten copies of the fleet under
other names are simulated without failures. Every cluster is simulated by itself, event by event, with the schedule of
the workers at each stage. Seconds are processor time; wall time is longer on a busy machine.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from benchmarks.planner.fleets import gpt_chain, home_pcs
from benchmarks.report import Report, arguments
from ravnest.planner.clusters.search import form_clusters
from ravnest.planner.fleet import ClusterPlan, FleetPlan, IdleMachine, Machine, Task
from ravnest.simulator.results import Simulation
from ravnest.simulator.simulation import draw_faults, simulate

VIRTUAL_S = 600.0
MICROBATCH = 2
SPARES = 0.02  # of all machines


class Took(NamedTuple):
    """Processor and wall time of a simulation."""

    processor_s: float
    wall_s: float


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report("a fleet on a virtual clock, one core")
    add_simulation(report, quick=options.quick)
    report.finish(options.json)


def add_simulation(report: Report, *, quick: bool) -> None:
    """Add the rows and checks of one fleet with and without failures."""
    num_planned, times = (250, 2) if quick else (1000, 10)
    task, plan = planned(num_planned)
    failing, took = timed(task, plan, faults=True)
    report.rows.append(row(task, plan, failing, took))
    report.check(f"seconds for {num_planned:,} nodes with failures", took.processor_s, "<= 60")
    totals = failing.totals
    unaccounted = totals.fed - totals.trained - totals.lost - totals.in_flight
    report.check("microbatches not accounted for, with failures", unaccounted, "== 0")
    task, plan = repeated(task, plan, times)
    undisturbed, took = timed(task, plan)
    report.rows.append(row(task, plan, undisturbed, took))
    num = len(task.fleet.machines)
    report.check(f"seconds for {num:,} nodes", took.processor_s, f"<= {60 * num / 10_000:g}")
    off = abs(undisturbed.steady_samples_per_s / plan.samples_per_s - 1)
    report.check("|simulated / predicted samples/s - 1|, no failures", off, "<= 0.05")


def planned(num: int) -> tuple[Task, FleetPlan]:
    task = Task(
        chain=gpt_chain(microbatch=MICROBATCH),
        fleet=home_pcs(num, seed=1),
        microbatch=MICROBATCH,
        num_spares=round(SPARES * num),
    )
    return task, form_clusters(task)


def timed(task: Task, plan: FleetPlan, *, faults: bool = False) -> tuple[Simulation, Took]:
    trace = draw_faults(task.fleet, VIRTUAL_S, repair_s=VIRTUAL_S / 2) if faults else None
    began, began_wall = time.process_time(), time.perf_counter()
    simulation = simulate(task, plan, duration_s=VIRTUAL_S, faults=trace)
    return simulation, Took(time.process_time() - began, time.perf_counter() - began_wall)


def row(task: Task, plan: FleetPlan, simulation: Simulation, took: Took) -> dict[str, object]:
    totals = simulation.totals
    leaves = sum(event.text.endswith(" leaves") for event in simulation.events)
    return {
        "failures": f"{leaves} leave" if leaves else "none",
        "nodes": len(task.fleet.machines),
        "clusters": len(plan.clusters),
        "virtual min": VIRTUAL_S / 60,
        "seconds": took.processor_s,
        "wall s": took.wall_s,
        "microbatches": totals.fed,
        "per cluster": totals.fed / len(plan.clusters),
        "lost": totals.lost,
        "repeated": totals.repeated,
        "samples/s": simulation.samples_per_s,
        "steady / predicted": simulation.steady_samples_per_s / plan.samples_per_s,
        "whole / predicted": simulation.samples_per_s / plan.samples_per_s,
        "bubble": simulation.bubble,
    }


def repeated(task: Task, plan: FleetPlan, times: int) -> tuple[Task, FleetPlan]:
    """Copies of a fleet and its plan under other names."""
    machines, clusters, spares, left_out = (
        list[Machine](),
        list[ClusterPlan](),
        list[IdleMachine](),
        list[IdleMachine](),
    )
    for copy in range(times):
        machines += [
            replace(m, name=f"{m.name}.{copy}", site=f"{m.site}.{copy}" if m.site else "") for m in task.fleet.machines
        ]
        clusters += [replace(c, members=tuple(f"{name}.{copy}" for name in c.members)) for c in plan.clusters]
        spares += [replace(idle, name=f"{idle.name}.{copy}") for idle in plan.spares]
        left_out += [replace(idle, name=f"{idle.name}.{copy}") for idle in plan.left_out]
    task = replace(task, fleet=replace(task.fleet, machines=tuple(machines)), num_spares=task.num_spares * times)
    return task, FleetPlan(tuple(clusters), tuple(spares), tuple(left_out), plan.samples_per_s * times, plan.reason)


if __name__ == "__main__":
    main()
