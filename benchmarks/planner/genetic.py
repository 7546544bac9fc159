"""Baseline: the paper's genetic algorithm for forming clusters, as in its authors' prototype.

A genome gives each machine one of `max_clusters` clusters. Its penalty, to be made small, is

    100 * (memory that clusters lack)  +  (largest - smallest, over clusters, of the sum of memory // bandwidth)

Parents are the better ones of random fives; children are crossed at one point, and one gene in a hundred is redrawn.
The penalty ignores speeds and links, and is 0 for one cluster of all machines. Defaults are the prototype's: 200
genomes, 500 generations, 5 clusters.

In its favour: the memory that a cluster needs is computed for it; it may try several numbers of clusters, each for the
full time, and the best counts. Its clusters are ordered and cut by our exact partition, and those with more machines
than the program has stages use the best of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from random import Random

from ravnest.planner import Task, stage_memory
from ravnest.planner.clusters.estimate import RateEstimator, Row, best_order
from ravnest.planner.partition import partition
from ravnest.planner.problem import PlanError

__all__ = ["GENERATIONS", "MAX_CLUSTERS", "clusters", "samples_per_s"]

POPULATION, GENERATIONS, MAX_CLUSTERS, MUTATION, TOURNAMENT = 200, 500, 5, 0.01, 5
_ORDERED = 8  # up to this many machines are ordered by our own search
Genome = list[int]


def clusters(
    task: Task, *, seed: int, seconds: float, generations: int | None = None, max_clusters: int = MAX_CLUSTERS
) -> list[list[int]]:
    """The best clusters, as machine indices, after `generations`, or after `seconds` if there is no such number."""
    rng, scores = Random(seed), _Scores(task)
    count = len(task.fleet.machines)
    population = [[rng.randrange(max_clusters) for _ in range(count)] for _ in range(POPULATION)]
    best, least, ends, generation = population[0], float("inf"), time.perf_counter() + seconds, 0
    while generation < generations if generations is not None else time.perf_counter() < ends:
        penalties = [scores.penalty(genome) for genome in population]
        for genome, penalty in zip(population, penalties, strict=True):
            if penalty < least:
                best, least = genome, penalty
        population = _children(population, penalties, rng, max_clusters)
        generation += 1
    groups = defaultdict[int, list[int]](list)
    for machine, cluster in enumerate(best):
        groups[cluster].append(machine)
    return list(groups.values())


class _Scores:
    def __init__(self, task: Task) -> None:
        cut_points = task.chain.cut_points(len(task.chain.cuts) + 1)
        self.memory = [machine.memory_bytes / 1e6 for machine in task.fleet.machines]
        lines = [min(m.up_bytes_per_s, m.down_bytes_per_s) / 1e6 for m in task.fleet.machines]
        self.loads = [memory // line for memory, line in zip(self.memory, lines, strict=True)]
        self.needed = stage_memory(cut_points.share(0, cut_points.end), 2, task.memory).total / 1e6

    def penalty(self, genome: Genome) -> float:
        memory, loads = defaultdict[int, float](float), defaultdict[int, float](float)
        for cluster, size, load in zip(genome, self.memory, self.loads, strict=True):
            memory[cluster] += size
            loads[cluster] += load
        lacking = sum(max(0.0, self.needed - size) for size in memory.values())
        return 100 * lacking + max(loads.values()) - min(loads.values())


def _children(population: list[Genome], penalties: list[float], rng: Random, max_clusters: int) -> list[Genome]:
    children: list[Genome] = []
    scored = list(zip(penalties, range(len(population)), strict=True))
    while len(children) < POPULATION:
        first, second = (population[min(rng.sample(scored, TOURNAMENT))[1]] for _ in range(2))
        point = rng.randint(1, max(1, len(first) - 1))
        crossed = (first[:point] + second[point:], second[:point] + first[point:])
        children.extend(_mutated(child, rng, max_clusters) for child in crossed)
    return children


def _mutated(genome: Genome, rng: Random, max_clusters: int) -> Genome:
    return [rng.randrange(max_clusters) if rng.random() < MUTATION else gene for gene in genome]


def samples_per_s(task: Task, groups: Sequence[Sequence[int]]) -> float:
    """What clusters do, each ordered and cut by our own planner."""
    estimator = RateEstimator(task)
    return sum(_cluster_per_s(estimator, group) for group in groups) * task.microbatch


def _cluster_per_s(estimator: RateEstimator, group: Sequence[int]) -> float:
    task = estimator.task
    if len(group) < min(task.min_stages, len(task.fleet.machines)):
        return 0.0
    row = max(_orders(estimator, group), key=estimator.per_s)
    try:
        return 1 / partition(task.problem([estimator.machines[m] for m in row])).interval_s
    except PlanError:
        return 0.0


def _orders(estimator: RateEstimator, group: Sequence[int]) -> list[Row]:
    """Largest first; and with the two slowest lines at the ends. A few machines are ordered as well as we can."""
    kept = sorted(group, key=lambda m: -estimator.most_per_s[m])[: estimator.cut_points.end]
    if len(kept) <= _ORDERED:
        return [best_order(estimator, kept)]
    largest = sorted(kept, key=lambda m: -estimator.machines[m].memory_bytes)
    inner = sorted(kept[:-2], key=lambda m: -estimator.machines[m].memory_bytes)
    return [tuple(largest), (kept[-2], *inner, kept[-1]), (kept[-1], *inner, kept[-2])]
