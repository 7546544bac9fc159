"""Improves clusters by local search: a small change is kept if all rows together do more than before.

    move      a machine goes to another row, or from idle into a row
    swap      two machines of two rows change places, or a member and an idle one
    drop      a machine leaves a row that is faster without it
    regroup   two rows and some idle machines are grouped again (this merges, splits and dissolves)

At first a change that loses a little is sometimes kept too (simulated annealing), to leave local optima. A change
examines only the two rows it touches; most are rejected at once by bounds on speeds and lines. Half of the partners are
drawn from rows of about the same rate, since similar machines belong together.

Regrouping is exact (`best_grouping`), because every subset of a few machines can be tried as a row. With R(S) the
microbatches per second of the best order of set S, the best grouping of set A is

    best(A) = max over S within A that contain A's first machine of  R(S) + best(A - S),   or best(A - first)

where the last leaves the first machine idle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from random import Random

from ravnest.planner.clusters.estimate import GAIN, RateEstimator, Row, best_order, improved_order, with_insertion

__all__ = ["Grouping", "improve", "best_grouping", "best_regrouping"]


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


class Grouping:
    """The state of the search: every machine of `usable` is in one row, or idle. `per_s` is the rate of all rows."""

    def __init__(self, estimator: RateEstimator, usable: Iterable[int], rows: Iterable[Row] = ()) -> None:
        self.estimator = estimator
        self.rows: list[Row] = []
        self.rates: list[float] = []
        self.row_of: dict[int, int] = dict.fromkeys(usable, -1)
        self.usable = list(self.row_of)
        for row in rows:
            self._add(row)

    @property
    def per_s(self) -> float:
        return sum(self.rates)

    @property
    def idle(self) -> list[int]:
        return [m for m in self.usable if self.row_of[m] < 0]

    def replace(self, old: Sequence[int], new: Iterable[Row]) -> None:
        """Replace rows by number with others; machines in none of them are idle."""
        for number in sorted(old, reverse=True):
            self._remove(number)
        for row in new:
            self._add(row)

    def withdraw(self, machines: Iterable[int]) -> None:
        """Exclude idle machines from further use."""
        for m in machines:
            assert self.row_of[m] < 0
            del self.row_of[m]
        self.usable = list(self.row_of)

    def take_back(self, machines: Iterable[int]) -> None:
        """Use these machines again; they are idle at first."""
        self.row_of.update(dict.fromkeys(machines, -1))
        self.usable = list(self.row_of)

    def _add(self, row: Row) -> None:
        for m in row:
            self.row_of[m] = len(self.rows)
        self.rows.append(row)
        self.rates.append(self.estimator.per_s(row))

    def _remove(self, number: int) -> None:
        """Remove a row; the last one takes its number."""
        for m in self.rows[number]:
            self.row_of[m] = -1
        row, rate = self.rows.pop(), self.rates.pop()
        if number < len(self.rows):
            self.rows[number], self.rates[number] = row, rate
            for m in row:
                self.row_of[m] = number


# The search.

_REGROUPED = 6  # machines at most
_REGROUPED_ALL_ORDERS = 3
_REGROUP_SELDOM, _REGROUP_OFTEN = 96, 8  # one in this many changes
_NEAR = 6  # rows that count as about as fast, on either side
_TEMPERATURE, _ANNEALED_FRACTION = (
    0.02,
    0.8,
)  # the relative loss accepted at first, and the fraction of the search in which any is
_MIN_CHANGE = 1.0005  # a factor below which the earlier rows are kept
_STALE, _LEAST_STALE = 40, 400  # the search ends after this many fruitless changes per kind of machine, and in all


def improve(grouping: Grouping, rng: Random, min_stages: int, budget: int) -> None:
    """Improve `grouping` until changes stop helping, or for `budget` tries and machines examined."""
    _Search(grouping, rng, min_stages).run(budget)


class _Search:
    def __init__(self, grouping: Grouping, rng: Random, min_stages: int) -> None:
        self.grouping, self.estimator, self.rng, self.min_stages = grouping, grouping.estimator, rng, min_stages
        self.by_rate: list[int] = []
        self.temperature = 0.0

    def run(self, budget: int) -> None:
        grouping, estimator = self.grouping, self.estimator
        stale, rounds, began = 0, 0, estimator.num_examined
        num_kinds = len({estimator.kinds[m] for m in grouping.usable})
        max_stale = _STALE * num_kinds + _LEAST_STALE
        best, best_per_s = list(grouping.rows), grouping.per_s
        while grouping.rows and stale < max_stale and (spent := estimator.num_examined - began + rounds) < budget:
            if rounds % 64 == 0:
                self.by_rate = sorted(range(len(grouping.rows)), key=grouping.rates.__getitem__)
                self.temperature = _TEMPERATURE * max(0.0, 1 - spent / (_ANNEALED_FRACTION * budget))
                if grouping.per_s > best_per_s * _MIN_CHANGE:
                    best, best_per_s = list(grouping.rows), grouping.per_s
            rounds += 1
            often = _REGROUP_OFTEN if stale > 4 * num_kinds else _REGROUP_SELDOM  # costly: when little else helps
            changed = self._regroup() if rounds % often == 0 else self._try(self.rng.choice(grouping.usable))
            stale = 0 if changed or self.temperature else stale + 1
        if grouping.per_s < best_per_s * _MIN_CHANGE:
            grouping.replace(range(len(grouping.rows)), best)

    def _wanted(self, before: float) -> float:
        """The rate that changed rows must reach: more than before, or, early in the search, sometimes a little less."""
        return before * (1 - self.temperature * self.rng.expovariate(1.0)) if self.temperature else before * GAIN

    def _try(self, m: int) -> bool:
        grouping = self.grouping
        own = grouping.row_of[m]
        other = self._partner(own)
        if own >= 0 and self._drop(m, own):
            return True
        if other == own:
            return False
        if own < 0:
            return self._join(m, other) or self._swap_idle(m, other)
        return self._move(m, own, other) or self._swap(m, own, self.rng.choice(grouping.rows[other]), other)

    def _partner(self, own: int) -> int:
        """Another row: any, or one of about the same rate."""
        count = len(self.grouping.rows)
        if own < 0 or self.rng.random() < 0.5:
            return self.rng.randrange(count)
        rates, order = self.grouping.rates, self.by_rate
        place = bisect_left(order, rates[own], key=lambda g: rates[g] if g < count else 0.0)
        near = order[max(0, place - _NEAR) : place + _NEAR + 1]
        chosen = self.rng.choice(near) if near else 0
        return chosen if chosen < count else self.rng.randrange(count)

    def _drop(self, m: int, own: int) -> bool:
        row, rate = self.grouping.rows[own], self.grouping.rates[own]
        shorter = _without(row, m)
        if len(shorter) < self.min_stages or self.estimator.bound_per_s(shorter) <= rate * GAIN:
            return False
        return self.estimator.reaches(shorter, rate * GAIN) and self._keep([own], [shorter], rate)

    def _join(self, m: int, other: int) -> bool:
        wanted = self._wanted(self.grouping.rates[other])
        longer = with_insertion(self.estimator, self.grouping.rows[other], m, wanted)
        return longer is not None and self._keep([other], [longer[0]], wanted)

    def _move(self, m: int, own: int, other: int) -> bool:
        grouping, estimator = self.grouping, self.estimator
        shorter = _without(grouping.rows[own], m)
        if len(shorter) < self.min_stages:
            return False
        wanted = self._wanted(grouping.rates[own] + grouping.rates[other])
        bound = estimator.bound_per_s((*grouping.rows[other], m))
        if bound + estimator.bound_per_s(shorter) <= wanted:
            return False
        rest = estimator.per_s(shorter)
        if rest == 0 or bound + rest <= wanted:
            return False
        longer = with_insertion(estimator, grouping.rows[other], m, max(0.0, wanted - rest))
        return longer is not None and self._keep([own, other], [shorter, longer[0]], wanted)

    def _swap(self, m: int, own: int, n: int, other: int) -> bool:
        grouping, estimator = self.grouping, self.estimator
        first, second = _with(grouping.rows[own], m, n), _with(grouping.rows[other], n, m)
        wanted = self._wanted(grouping.rates[own] + grouping.rates[other])
        bound = estimator.bound_per_s(second)
        if estimator.kinds[m] == estimator.kinds[n] or bound + estimator.bound_per_s(first) <= wanted:
            return False
        if not estimator.reaches(first, max(0.0, wanted - bound)):
            return False
        rest = max(0.0, wanted - estimator.per_s(first))
        return estimator.reaches(second, rest) and self._keep([own, other], [first, second], wanted)

    def _swap_idle(self, m: int, other: int) -> bool:
        row, wanted = self.grouping.rows[other], self._wanted(self.grouping.rates[other])
        n = self.rng.choice(row)
        changed = _with(row, n, m)
        if self.estimator.kinds[m] == self.estimator.kinds[n] or self.estimator.bound_per_s(changed) <= wanted:
            return False
        return self.estimator.reaches(changed, wanted) and self._keep([other], [changed], wanted)

    def _regroup(self) -> bool:
        grouping = self.grouping
        own = self.rng.randrange(len(grouping.rows))
        other = self._partner(own)
        touched = sorted({own, other})
        members = [m for g in touched for m in grouping.rows[g]]
        if len(members) > _REGROUPED:
            touched, members = [own], list(grouping.rows[own])
        idle = grouping.idle
        members += self.rng.sample(idle, min(len(idle), max(0, _REGROUPED - len(members))))
        before = sum(grouping.rates[g] for g in touched)
        if len(members) > _REGROUPED or sum(self.estimator.bound_per_s((m,)) for m in members) <= before * GAIN:
            return False
        rows = best_regrouping(self.estimator, members, self.min_stages, all_orders=_REGROUPED_ALL_ORDERS)
        return self._keep(touched, rows, before)

    def _keep(self, old: list[int], new: list[Row], wanted: float) -> bool:
        """Replace the old rows if the new ones do more than `wanted`."""
        new = [improved_order(self.estimator, row) for row in new]
        if not all(self.estimator.per_s(row) for row in new) or sum(map(self.estimator.per_s, new)) <= wanted:
            return False
        self.grouping.replace(old, new)
        return True


def _without(row: Row, m: int) -> Row:
    return tuple(n for n in row if n != m)


def _with(row: Row, old: int, new: int) -> Row:
    return tuple(new if n == old else n for n in row)
