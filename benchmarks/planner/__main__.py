"""Measures the planner's quality and speed against exhaustive search, an upper bound and a genetic algorithm.

Small random fleets, made hard, are compared with exhaustive search: once with all groupings tried, as `form_clusters`
does for a few machines, and once with the search that larger fleets get. Fleets of 10 to 1000 uneven home PCs with a
GPT of 24 layers are compared with the paper's genetic algorithm (with its own defaults, and with the time that
`form_clusters` took, for several numbers of clusters, the best counting) and with an upper bound. Memory is added up
again, op by op.
"""

from __future__ import annotations

import statistics
import time
from random import Random
from typing import Any

from benchmarks.planner import genetic
from benchmarks.planner.bound import most_samples_per_s
from benchmarks.planner.exhaustive import best_samples_per_s
from benchmarks.planner.fleet_simulation import add_simulation
from benchmarks.planner.fleets import gpt_chain, hard_task, home_pcs
from benchmarks.planner.prediction import add_prediction
from benchmarks.report import Report, arguments
from ravnest.planner import Chain, FleetPlan, MemoryModel, Task
from ravnest.planner.clusters.estimate import RateEstimator
from ravnest.planner.clusters.search import form_clusters, search_groupings


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report("planner: clusters of uneven machines")
    add_small(report, count=40 if options.quick else 240, max_machines=5 if options.quick else 6)
    for machines in (10, 50) if options.quick else (10, 50, 200, 1000):
        add_large(report, machines, seeds=1 if options.quick or machines > 200 else 3)
    add_simulation(report, quick=options.quick)
    if not options.quick:  # it has a quick run of its own
        add_prediction(report, quick=False)
    report.finish(options.json)


def add_small(report: Report, count: int, max_machines: int) -> None:
    """Compare with exhaustive search."""
    shares, searched, seed = list[float](), list[float](), 0
    while len(shares) < count:
        task = hard_task(seed, max_machines)
        seed += 1
        best = best_samples_per_s(task)
        if best == 0:
            continue
        shares.append(form_clusters(task).samples_per_s / best)
        searched.append(search_alone(task, seed) / best)
    for name, values in (("small fleets", shares), ("small fleets, search alone", searched)):
        report.rows.append(
            {"fleets": name, "instances": count, "of optimal": statistics.mean(values), "worst": min(values)}
        )
        report.check(f"{name}: share of optimal, average of {count}", statistics.mean(values), ">= 0.97")
    report.check("small fleets: share of optimal, worst", min(shares), ">= 0.90")


def search_alone(task: Task, seed: int) -> float:
    """Samples per second without trying all groupings, as far as the search itself can tell."""
    grouping = search_groupings(
        RateEstimator(task), Random(seed), min_stages=task.min_stages, budget=20_000, all_groupings=0
    )
    return grouping.per_s * task.microbatch


def add_large(report: Report, machines: int, seeds: int) -> None:
    """Plan uneven home PCs with a 24-layer GPT."""
    rows = [measure(Task(chain=gpt_chain(), fleet=home_pcs(machines, seed)), seed) for seed in range(1, seeds + 1)]
    row: dict[str, Any] = {"fleets": f"{machines} home PCs", "instances": seeds}
    for name in ("seconds", "samples/s", "of bound", "x genetic", "x genetic defaults"):
        row[name] = statistics.mean(r[name] for r in rows)
    report.rows.append(row)
    limit = {10: 1, 50: 3, 200: 6, 1000: 10}[machines]
    report.check(f"{machines} machines: seconds", max(r["seconds"] for r in rows), f"<= {limit}")
    report.check(f"{machines} machines: times the genetic algorithm", min(r["x genetic"] for r in rows), ">= 1.0")
    defaults = min(r["x genetic defaults"] for r in rows)
    report.check(f"{machines} machines: times its defaults", defaults, ">= 1.0")
    report.check(f"{machines} machines: share of the upper bound", max(r["of bound"] for r in rows), "<= 1.0")
    report.check(f"{machines} machines: stages over memory", sum(r["over memory"] for r in rows), "== 0")


def measure(task: Task, seed: int) -> dict[str, float]:
    began = time.perf_counter()
    plan = form_clusters(task, seed=seed)
    seconds = time.perf_counter() - began
    count = len(task.fleet.machines)
    numbers = sorted({genetic.MAX_CLUSTERS, max(2, count // 8), max(2, count // 4), max(2, count // 3)})
    given = [genetic.clusters(task, seed=seed, seconds=seconds, max_clusters=number) for number in numbers]
    best = max(genetic.samples_per_s(task, grouping) for grouping in given)
    own = genetic.clusters(task, seed=seed, seconds=0.0, generations=genetic.GENERATIONS)
    defaults = genetic.samples_per_s(task, own)
    return {
        "seconds": seconds,
        "samples/s": plan.samples_per_s,
        "of bound": plan.samples_per_s / most_samples_per_s(task),
        "x genetic": plan.samples_per_s / best if best else float("inf"),
        "x genetic defaults": plan.samples_per_s / defaults if defaults else float("inf"),
        "over memory": stages_over_memory(task, plan),
    }


def stages_over_memory(task: Task, plan: FleetPlan) -> int:
    """The number of stages that need more memory than their machine offers, summed op by op."""
    return sum(
        needed_bytes(task.chain, task.memory, start, stop, depth) > task.fleet[name].memory_bytes
        for cluster in plan.clusters
        for name, start, stop, depth in zip(
            cluster.members,
            (0, *cluster.partition.cuts),
            (*cluster.partition.cuts, task.chain.num_ops),
            cluster.partition.depths,
            strict=True,
        )
    )


def needed_bytes(chain: Chain, model: MemoryModel, start: int, stop: int, depth: int) -> float:
    """Memory of a stage of a chain whose storages belong to one op each, with two versions of the weights."""
    weights = sum(s.num_bytes for s in chain.weights if start <= s.ops[0] < stop)
    saved = sum(s.num_bytes for s in chain.saved if start <= s.ops[0] < stop)
    messages = sum(chain.forward_bytes[cut] + chain.backward_bytes[cut] for cut in (start, stop))
    copies = model.weight_copies(depth) + model.held_gradients + model.optimizer_copies
    work = max(chain.work_bytes[start:stop])
    return model.base_bytes + copies * weights + depth * saved + work + model.link_buffers * messages


if __name__ == "__main__":
    main()
