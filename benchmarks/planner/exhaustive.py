"""Finds the best clusters of a few machines by exhaustive search: every set in every order, cut exactly.

best(A) = max over ordered sets S within A with A's first machine of  rate(S) + best(A - S),   or best(A - first)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations, permutations

from ravnest.planner import DoesNotFit, Machine, Task, TooManyNodes
from ravnest.planner.partition import partition

__all__ = ["best_samples_per_s"]


def best_samples_per_s(task: Task) -> float:
    """Samples per second of the best plan with at least `min_stages` per cluster; 0 if there is none."""
    machines = task.fleet.machines
    sizes = range(task.min_stages, min(len(machines), len(task.chain.cuts) + 1) + 1)
    rates = {
        frozenset(chosen): _best_order(task, [machines[m] for m in chosen])
        for size in sizes
        for chosen in combinations(range(len(machines)), size)
    }

    @cache
    def best(left: frozenset[int]) -> float:
        if not left:
            return 0.0
        first = min(left)
        with_first = (rate + best(left - members) for members, rate in rates.items() if first in members <= left)
        return max(best(left - {first}), max(with_first, default=0.0))

    return best(frozenset(range(len(machines)))) * task.microbatch


def _best_order(task: Task, machines: Sequence[Machine]) -> float:
    """Microbatches per second in the best order."""
    return max(_rate(task, row) for row in permutations(machines))


def _rate(task: Task, row: Sequence[Machine]) -> float:
    try:
        return 1 / partition(task.problem(row, tolerance=0.0)).interval_s
    except (DoesNotFit, TooManyNodes):
        return 0.0
