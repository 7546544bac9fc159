"""Finds the best grouping of a few machines: every subset is a possible row.

With R(S) the microbatches per second of the best order of set S, the best grouping of set A is

    best(A) = max over S within A that contain A's first machine of  R(S) + best(A - S),   or best(A - first)

where the last leaves the first machine idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from ravnest.planner.clusters.estimate import RateEstimator, Row
from ravnest.planner.clusters.order import best_order, with_insertion

__all__ = ["best_grouping", "best_regrouping"]


def best_regrouping(estimator: RateEstimator, members: Sequence[int], min_stages: int, *, all_orders: int) -> list[Row]:
    """The rows with the highest rate together. Sets of up to `all_orders` machines are tried in all orders."""
    return best_grouping(_best_rows(estimator, members, min_stages, all_orders), estimator.per_s, len(members))


def best_grouping(rows: Mapping[int, Row], per_s: Callable[[Row], float], count: int) -> list[Row]:
    """Disjoint rows with the highest rate together; `rows` are by the masks of their members, of `count` in all."""
    best: dict[int, tuple[float, tuple[Row, ...]]] = {0: (0.0, ())}
    for mask in range(1, 1 << count):
        first = mask & -mask
        found = best[mask ^ first]
        part = mask
        while part:
            if part & first and part in rows:
                rate, others = best[mask ^ part]
                rate += per_s(rows[part])
                if rate > found[0]:
                    found = rate, (*others, rows[part])
            part = (part - 1) & mask
        best[mask] = found
    return list(best[(1 << count) - 1][1])


def _best_rows(estimator: RateEstimator, members: Sequence[int], min_stages: int, all_orders: int) -> dict[int, Row]:
    """The best order of every set on which the model fits, by its mask."""
    rows: dict[int, Row] = {}
    for size in range(1, min(len(members), estimator.cut_points.end) + 1):
        for chosen in combinations(range(len(members)), size):
            mask = sum(1 << place for place in chosen)
            if size <= all_orders:
                row: Row | None = best_order(estimator, [members[c] for c in chosen], all_orders=all_orders)
            else:
                row = _grown(estimator, members, mask, rows)
            if row is not None and estimator.per_s(row) > 0:
                rows[mask] = row
    return {mask: row for mask, row in rows.items() if len(row) >= min_stages}


def _grown(estimator: RateEstimator, members: Sequence[int], mask: int, rows: dict[int, Row]) -> Row | None:
    """The best of all rows that are one machine smaller, with that machine inserted."""
    found, above = None, 0.0
    for place, m in enumerate(members):
        smaller = rows.get(mask ^ (1 << place)) if mask >> place & 1 else None
        if smaller is not None:
            longer = with_insertion(estimator, smaller, m, above)
            if longer:
                found, above = longer
    if found is None:
        chosen = [m for place, m in enumerate(members) if mask >> place & 1]
        found = best_order(estimator, chosen, all_orders=0)
    return found
