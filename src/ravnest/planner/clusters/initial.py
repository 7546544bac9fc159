"""Builds initial clusters for the search: machines one after another, a row closed as soon as the model fits well.

Machines that follow one another end up together, so their order decides what a row has in common: lines, regions,
speeds. Which of these matters is not known beforehand, so all are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from statistics import median

from ravnest.planner.clusters.estimate import RateEstimator, Row
from ravnest.planner.clusters.local_search import Grouping
from ravnest.planner.clusters.order import best_order, with_insertion

__all__ = ["initial_grouping"]

_GOOD_FRACTION = 0.8  # of the bound of its machines; below that a row takes more of them
_SHORT, _SEVERAL = 8, 3  # rows of up to 8 machines are never too long; longer ones up to 3 times what is needed
_MAX_EXTRA = 2  # machines beyond those that a row needs
_MAX_ORDERED = 3  # machines of a row whose order is optimized here; longer ones are by the search
_MAX_TRIES = 6  # rows that an unused machine is tried in


def initial_grouping(estimator: RateEstimator, usable: Sequence[int], min_stages: int) -> Grouping:
    """The best of several groupings; of equals the first, which keeps regions together."""
    best = None
    for key in _keys(estimator):
        for well in (_GOOD_FRACTION, 0.0):
            rows = _rows(estimator, sorted(usable, key=key), min_stages, well)
            grouping = Grouping(estimator, usable, rows)
            if best is None or grouping.per_s > best.per_s * 1.005:
                best = grouping
    assert best is not None
    _add_unused(best)
    return best


def _keys(estimator: RateEstimator) -> Iterator[Callable[[int], tuple[object, ...]]]:
    machines, most = estimator.machines, estimator.most_per_s

    def line(m: int) -> float:
        return min(machines[m].up_bytes_per_s, machines[m].down_bytes_per_s)

    yield lambda m: (machines[m].site, machines[m].region, -line(m), m)
    yield lambda m: (-most[m], -line(m), -machines[m].memory_bytes, m)
    yield lambda m: (-line(m), machines[m].speed, m)
    yield lambda m: (-min(machines[m].speed / (estimator.work_s or 1.0), most[m]), m)


def _rows(estimator: RateEstimator, machines: Sequence[int], min_stages: int, well: float) -> Iterator[Row]:
    """Rows of neighbours, each closed when it reaches `well` of its bound, or has a few machines more than it needs."""
    row: Row = ()
    fitting, longest = 0, _longest(estimator, min_stages)
    for m in machines:
        row = tuple(sorted((*row, m), key=lambda m: -estimator.machines[m].memory_bytes))[:longest]
        if len(row) < min_stages or not estimator.reaches(row, 0.0):
            continue
        fitting += 1
        if fitting > _MAX_EXTRA or len(row) == longest or estimator.reaches(row, well * estimator.bound_per_s(row)):
            yield _ordered(estimator, row)
            row, fitting = (), 0
    if fitting:
        yield _ordered(estimator, row)


def _longest(estimator: RateEstimator, min_stages: int) -> int:
    """The longest row: several times what machines of median memory need; the smallest machines drop out."""
    typical = median(machine.memory_bytes for machine in estimator.machines)
    return min(estimator.cut_points.end, max(_SHORT, min_stages, ceil(_SEVERAL * estimator.whole_bytes / typical)))


def _ordered(estimator: RateEstimator, row: Row) -> Row:
    return best_order(estimator, row) if len(row) <= _MAX_ORDERED else row


def _add_unused(grouping: Grouping) -> None:
    """Add each unused machine to the first row that gains, of those with the most to gain."""
    estimator = grouping.estimator
    for m in grouping.idle:
        by_potential = sorted(
            range(len(grouping.rows)), key=lambda g: grouping.rates[g] - estimator.bound_per_s((*grouping.rows[g], m))
        )
        for g in by_potential[:_MAX_TRIES]:
            longer = with_insertion(estimator, grouping.rows[g], m, grouping.rates[g])
            if longer:
                grouping.replace([g], [longer[0]])
                break
