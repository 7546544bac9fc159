"""In which order a set of machines does most: all orders of a few, else insertion and then small changes.

An order matters because the ends of a row use one link and those between use two, because stages near the root keep
more microbatches in flight, and because neighbours may be near or far. A row and its reverse are not the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

from .quick import GAIN, Quick, Row

__all__ = ["EQUAL", "best_order", "inserted", "latency_s", "nearest", "reordered"]

_ALL_ORDERS = 4  # up to so many machines
_LONG = 8
EQUAL = 0.998  # rows within this of each other are as good; the nearest links decide


def best_order(quick: Quick, members: Sequence[int], *, all_orders: int = _ALL_ORDERS) -> Row:
    """The order of `members` with the most microbatches per second, or close to it."""
    if len(members) <= all_orders:
        return _first_best(quick, permutations(sorted(members)))
    largest_first = sorted(members, key=lambda m: (-quick.machines[m].memory_bytes, -quick.most_per_s[m], m))
    row = tuple(largest_first)
    grown: Row = ()
    for m in sorted(members, key=lambda m: (quick.most_per_s[m], m)):  # slow lines first: they come to lie at the ends
        grown = max(_insertions(grown, m), key=quick.per_s) if grown else (m,)
    return reordered(quick, max(row, grown, key=quick.per_s))


def inserted(quick: Quick, row: Row, m: int, above_per_s: float) -> tuple[Row, float] | None:
    """`row` with m where it does most, and how much, if that is more than `above_per_s`."""
    bound = quick.bound_per_s((*row, m))
    found = None
    for longer in _insertions(row, m):
        if bound <= above_per_s * GAIN:
            break
        if quick.does_more(longer, above_per_s):
            found, above_per_s = longer, quick.per_s(longer)
    return None if found is None else (found, above_per_s)


def reordered(quick: Quick, row: Row) -> Row:
    """`row` after every swap, move and reversal that helps."""
    best = quick.per_s(row)
    better = True
    while better and best * GAIN < quick.bound_per_s(row):
        better = False
        for other in _changes(row):
            if quick.does_more(other, best):
                row, best, better = other, quick.per_s(other), True
                break
    return row


def nearest(quick: Quick, row: Row) -> Row:
    """Of the orders that do as much as `row`, the one with the least latency between neighbours."""
    wanted = quick.per_s(row) * EQUAL
    orders = permutations(row) if len(row) <= _ALL_ORDERS else _changes(row)
    near, least_s = row, latency_s(quick, row)
    for other in orders:
        seconds = latency_s(quick, other)
        if seconds < least_s and quick.reaches(other, wanted):
            near, least_s = other, seconds
    return near


def latency_s(quick: Quick, row: Row) -> float:
    machines, wire = quick.machines, quick.task.fleet.wire
    return sum(wire(machines[a], machines[b])[2] for a, b in pairwise(row))


def _first_best(quick: Quick, orders: Iterator[Row]) -> Row:
    best = next(orders)
    most, bound = quick.per_s(best), quick.bound_per_s(best)
    for row in orders:
        if most * GAIN >= bound:
            break
        if quick.does_more(row, most):
            best, most = row, quick.per_s(row)
    return best


def _insertions(row: Row, m: int) -> Iterator[Row]:
    for place in range(len(row) + 1):
        yield (*row[:place], m, *row[place:])


def _changes(row: Row) -> Iterator[Row]:
    """Two swapped, one moved, a stretch reversed; in a long row only near each other, or at the ends."""
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
