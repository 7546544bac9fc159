"""The paper's way to form clusters, as its authors' prototype does it: a genetic algorithm. A baseline.

A genome gives each machine one of `max_clusters` clusters. Its penalty, to be made small, is

    100 * (memory that clusters lack)  +  (largest - smallest, over clusters, of the sum of memory // bandwidth)

Parents are the better ones of random fives; children are crossed at one point, and one gene in a hundred is drawn anew.
The penalty knows no speeds and no links, and one cluster of all machines has none. Defaults are the prototype's: 200
genomes, 500 generations, 5 clusters.

What we give it: the memory that a cluster needs is computed for it; it may try several numbers of clusters, each for
all the time there is, and the best counts. Its clusters are ordered and cut by our own exact partition, and those with
more machines than the program has stages use the best of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from random import Random

from ravnest.plan import Task, partition, stage_memory
from ravnest.plan.order import best_order
from ravnest.plan.problem import PlanError
from ravnest.plan.quick import Quick, Row

__all__ = ["GENERATIONS", "MAX_CLUSTERS", "clusters", "samples_per_s"]

POPULATION, GENERATIONS, MAX_CLUSTERS, MUTATION, TOURNAMENT = 200, 500, 5, 0.01, 5
_ORDERED = 8  # machines that are ordered with care
Genome = list[int]


def clusters(
    task: Task, *, seed: int, seconds: float, generations: int | None = None, max_clusters: int = MAX_CLUSTERS
) -> list[list[int]]:
    """Its best clusters of machine numbers after so many generations, or if there is no number, so many seconds."""
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
    found = defaultdict[int, list[int]](list)
    for machine, cluster in enumerate(best):
        found[cluster].append(machine)
    return list(found.values())


class _Scores:
    def __init__(self, task: Task) -> None:
        places = task.chain.places(len(task.chain.cuts) + 1)
        self.memory = [machine.memory_bytes / 1e6 for machine in task.fleet.machines]
        lines = [min(m.up_bytes_per_s, m.down_bytes_per_s) / 1e6 for m in task.fleet.machines]
        self.loads = [memory // line for memory, line in zip(self.memory, lines, strict=True)]
        self.needed = stage_memory(places.share(0, places.end), 2, task.memory).total / 1e6

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
    quick = Quick(task)
    return sum(_cluster_per_s(quick, group) for group in groups) * task.microbatch


def _cluster_per_s(quick: Quick, group: Sequence[int]) -> float:
    task = quick.task
    if len(group) < min(task.min_stages, len(task.fleet.machines)):
        return 0.0
    row = max(_orders(quick, group), key=quick.per_s)
    try:
        return 1 / partition(task.problem([quick.machines[m] for m in row])).interval_s
    except PlanError:
        return 0.0


def _orders(quick: Quick, group: Sequence[int]) -> list[Row]:
    """Largest first; and with the two slowest lines at the ends. A few machines are ordered as well as we can."""
    kept = sorted(group, key=lambda m: -quick.most_per_s[m])[: quick.places.end]
    if len(kept) <= _ORDERED:
        return [best_order(quick, kept)]
    largest = sorted(kept, key=lambda m: -quick.machines[m].memory_bytes)
    inner = sorted(kept[:-2], key=lambda m: -quick.machines[m].memory_bytes)
    return [tuple(largest), (kept[-2], *inner, kept[-1]), (kept[-1], *inner, kept[-2])]
