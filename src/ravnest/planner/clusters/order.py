"""Orders the machines of a row: all orders of a few, otherwise insertion and then small changes.

The order matters because the ends of a row use one link and the others two, because stages near the first keep more
microbatches in flight, and because neighbours may be near or far. A row and its reverse differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

from ravnest.planner.clusters.estimate import GAIN, RateEstimator, Row

__all__ = ["EQUAL", "best_order", "with_insertion", "latency_s", "least_latency_order", "improved_order"]

_ALL_ORDERS = 4  # the most machines of which all orders are tried
_LONG = 8
EQUAL = 0.998  # rows within this factor count as equal; latency decides


def best_order(estimator: RateEstimator, members: Sequence[int], *, all_orders: int = _ALL_ORDERS) -> Row:
    """The order of `members` with the most microbatches per second, or close to it."""
    if len(members) <= all_orders:
        return _first_best(estimator, permutations(sorted(members)))
    largest_first = sorted(members, key=lambda m: (-estimator.machines[m].memory_bytes, -estimator.most_per_s[m], m))
    row = tuple(largest_first)
    grown: Row = ()
    for m in sorted(members, key=lambda m: (estimator.most_per_s[m], m)):  # slow lines first: they end up at the ends
        grown = max(_insertions(grown, m), key=estimator.per_s) if grown else (m,)
    return improved_order(estimator, max(row, grown, key=estimator.per_s))


def with_insertion(estimator: RateEstimator, row: Row, m: int, above_per_s: float) -> tuple[Row, float] | None:
    """`row` with m inserted at the best place, and its rate, if that is above `above_per_s`."""
    bound = estimator.bound_per_s((*row, m))
    found = None
    for longer in _insertions(row, m):
        if bound <= above_per_s * GAIN:
            break
        if estimator.does_more(longer, above_per_s):
            found, above_per_s = longer, estimator.per_s(longer)
    return None if found is None else (found, above_per_s)


def improved_order(estimator: RateEstimator, row: Row) -> Row:
    """`row` after every swap, move and reversal that helps."""
    best = estimator.per_s(row)
    better = True
    while better and best * GAIN < estimator.bound_per_s(row):
        better = False
        for other in _changes(row):
            if estimator.does_more(other, best):
                row, best, better = other, estimator.per_s(other), True
                break
    return row


def least_latency_order(estimator: RateEstimator, row: Row) -> Row:
    """Of the orders that do as much as `row`, the one with the least latency between neighbours."""
    wanted = estimator.per_s(row) * EQUAL
    orders = permutations(row) if len(row) <= _ALL_ORDERS else _changes(row)
    near, least_s = row, latency_s(estimator, row)
    for other in orders:
        seconds = latency_s(estimator, other)
        if seconds < least_s and estimator.reaches(other, wanted):
            near, least_s = other, seconds
    return near


def latency_s(estimator: RateEstimator, row: Row) -> float:
    machines, link_numbers = estimator.machines, estimator.task.fleet.link_numbers
    return sum(link_numbers(machines[a], machines[b])[2] for a, b in pairwise(row))


def _first_best(estimator: RateEstimator, orders: Iterator[Row]) -> Row:
    best = next(orders)
    most, bound = estimator.per_s(best), estimator.bound_per_s(best)
    for row in orders:
        if most * GAIN >= bound:
            break
        if estimator.does_more(row, most):
            best, most = row, estimator.per_s(row)
    return best


def _insertions(row: Row, m: int) -> Iterator[Row]:
    for place in range(len(row) + 1):
        yield (*row[:place], m, *row[place:])


def _changes(row: Row) -> Iterator[Row]:
    """Two swapped, one moved, a range reversed; in a long row only near each other, or at the ends."""
    last = len(row) - 1
    for i, k in combinations(range(len(row)), 2):
        if len(row) > _LONG and k - i > 2 and i > 0 and k < last:
            continue
        yield (*row[:i], row[k], *row[i + 1 : k], row[i], *row[k + 1 :])  # swapped
        if k - i > 1:
            yield (*row[:i], *row[i + 1 : k + 1], row[i], *row[k + 1 :])  # i moved behind k
            yield (*row[:i], row[k], *row[i:k], *row[k + 1 :])  # k moved before i
        if k - i > 2:
            yield (*row[:i], *reversed(row[i : k + 1]), *row[k + 1 :])
