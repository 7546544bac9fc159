"""Better clusters by small changes: one is kept if all rows together do more than before.

    move      a machine goes to another row, or from idle into a row
    swap      two machines of two rows change places, or a member and an idle one
    drop      a machine leaves a row that is faster without it
    repack    two rows and some idle machines are grouped anew (this merges, splits and dissolves)

At first now and then a change that loses a little is kept too, so as not to end where the search began. A change looks
at the two rows it touches; most fail at once by what their machines' speeds and lines allow at best. Half of the
partners are drawn from rows that do about as much: alike machines belong together.
"""

from __future__ import annotations

from bisect import bisect_left
from random import Random

from .groups import Groups
from .order import inserted, reordered
from .quick import GAIN, Row
from .repack import repacked

__all__ = ["improve"]

_REPACKED = 6  # machines at most
_REPACKED_ALL_ORDERS = 3
_REPACK_SELDOM, _REPACK_OFTEN = 96, 8  # one change in so many
_NEAR = 6  # rows that count as about as fast, on either side
_WARMTH, _WARM_SHARE = (
    0.02,
    0.8,
)  # losses of about that part are taken at first, and none after that share of the search
_NOTEWORTHY = 1.0005  # less is not worth other rows than those at first
_STALE, _LEAST_STALE = 40, 400  # changes in vain per kind of machine, and besides: then the search ends


def improve(groups: Groups, rng: Random, min_stages: int, budget: int) -> None:
    """Changes `groups` until nothing seems to help, or for so many tries and machines looked at."""
    _Search(groups, rng, min_stages).run(budget)


class _Search:
    def __init__(self, groups: Groups, rng: Random, min_stages: int) -> None:
        self.groups, self.quick, self.rng, self.min_stages = groups, groups.quick, rng, min_stages
        self.by_rate: list[int] = []
        self.warmth = 0.0

    def run(self, budget: int) -> None:
        groups, quick = self.groups, self.quick
        stale, rounds, began = 0, 0, quick.looked
        num_kinds = len({quick.kinds[m] for m in groups.usable})
        patience = _STALE * num_kinds + _LEAST_STALE
        best, best_per_s = list(groups.rows), groups.per_s
        while groups.rows and stale < patience and (spent := quick.looked - began + rounds) < budget:
            if rounds % 64 == 0:
                self.by_rate = sorted(range(len(groups.rows)), key=groups.rates.__getitem__)
                self.warmth = _WARMTH * max(0.0, 1 - spent / (_WARM_SHARE * budget))
                if groups.per_s > best_per_s * _NOTEWORTHY:
                    best, best_per_s = list(groups.rows), groups.per_s
            rounds += 1
            often = _REPACK_OFTEN if stale > 4 * num_kinds else _REPACK_SELDOM  # costly: when little else helps
            changed = self._repack() if rounds % often == 0 else self._try(self.rng.choice(groups.usable))
            stale = 0 if changed or self.warmth else stale + 1
        if groups.per_s < best_per_s * _NOTEWORTHY:
            groups.replace(range(len(groups.rows)), best)

    def _wanted(self, before: float) -> float:
        """What changed rows must do: more than before, or, early in a search, a little less now and then."""
        return before * (1 - self.warmth * self.rng.expovariate(1.0)) if self.warmth else before * GAIN

    def _try(self, m: int) -> bool:
        groups = self.groups
        own = groups.row_of[m]
        other = self._partner(own)
        if own >= 0 and self._drop(m, own):
            return True
        if other == own:
            return False
        if own < 0:
            return self._join(m, other) or self._swap_idle(m, other)
        return self._move(m, own, other) or self._swap(m, own, self.rng.choice(groups.rows[other]), other)

    def _partner(self, own: int) -> int:
        """Another row: any, or one that does about as much."""
        count = len(self.groups.rows)
        if own < 0 or self.rng.random() < 0.5:
            return self.rng.randrange(count)
        rates, order = self.groups.rates, self.by_rate
        place = bisect_left(order, rates[own], key=lambda g: rates[g] if g < count else 0.0)
        near = order[max(0, place - _NEAR) : place + _NEAR + 1]
        chosen = self.rng.choice(near) if near else 0
        return chosen if chosen < count else self.rng.randrange(count)

    def _drop(self, m: int, own: int) -> bool:
        row, rate = self.groups.rows[own], self.groups.rates[own]
        shorter = _without(row, m)
        if len(shorter) < self.min_stages or self.quick.bound_per_s(shorter) <= rate * GAIN:
            return False
        return self.quick.reaches(shorter, rate * GAIN) and self._keep([own], [shorter], rate)

    def _join(self, m: int, other: int) -> bool:
        wanted = self._wanted(self.groups.rates[other])
        longer = inserted(self.quick, self.groups.rows[other], m, wanted)
        return longer is not None and self._keep([other], [longer[0]], wanted)

    def _move(self, m: int, own: int, other: int) -> bool:
        groups, quick = self.groups, self.quick
        shorter = _without(groups.rows[own], m)
        if len(shorter) < self.min_stages:
            return False
        wanted = self._wanted(groups.rates[own] + groups.rates[other])
        bound = quick.bound_per_s((*groups.rows[other], m))
        if bound + quick.bound_per_s(shorter) <= wanted:
            return False
        rest = quick.per_s(shorter)
        if rest == 0 or bound + rest <= wanted:
            return False
        longer = inserted(quick, groups.rows[other], m, max(0.0, wanted - rest))
        return longer is not None and self._keep([own, other], [shorter, longer[0]], wanted)

    def _swap(self, m: int, own: int, n: int, other: int) -> bool:
        groups, quick = self.groups, self.quick
        first, second = _with(groups.rows[own], m, n), _with(groups.rows[other], n, m)
        wanted = self._wanted(groups.rates[own] + groups.rates[other])
        bound = quick.bound_per_s(second)
        if quick.kinds[m] == quick.kinds[n] or bound + quick.bound_per_s(first) <= wanted:
            return False
        if not quick.reaches(first, max(0.0, wanted - bound)):
            return False
        rest = max(0.0, wanted - quick.per_s(first))
        return quick.reaches(second, rest) and self._keep([own, other], [first, second], wanted)

    def _swap_idle(self, m: int, other: int) -> bool:
        row, wanted = self.groups.rows[other], self._wanted(self.groups.rates[other])
        n = self.rng.choice(row)
        changed = _with(row, n, m)
        if self.quick.kinds[m] == self.quick.kinds[n] or self.quick.bound_per_s(changed) <= wanted:
            return False
        return self.quick.reaches(changed, wanted) and self._keep([other], [changed], wanted)

    def _repack(self) -> bool:
        groups = self.groups
        own = self.rng.randrange(len(groups.rows))
        other = self._partner(own)
        touched = sorted({own, other})
        members = [m for g in touched for m in groups.rows[g]]
        if len(members) > _REPACKED:
            touched, members = [own], list(groups.rows[own])
        idle = groups.idle
        members += self.rng.sample(idle, min(len(idle), max(0, _REPACKED - len(members))))
        before = sum(groups.rates[g] for g in touched)
        if len(members) > _REPACKED or sum(self.quick.bound_per_s((m,)) for m in members) <= before * GAIN:
            return False
        rows = repacked(self.quick, members, self.min_stages, all_orders=_REPACKED_ALL_ORDERS)
        return self._keep(touched, rows, before)

    def _keep(self, old: list[int], new: list[Row], wanted: float) -> bool:
        """Put the new rows in the place of the old ones if they do as much as wanted."""
        new = [reordered(self.quick, row) for row in new]
        if not all(self.quick.per_s(row) for row in new) or sum(map(self.quick.per_s, new)) <= wanted:
            return False
        self.groups.replace(old, new)
        return True


def _without(row: Row, m: int) -> Row:
    return tuple(n for n in row if n != m)


def _with(row: Row, old: int, new: int) -> Row:
    return tuple(new if n == old else n for n in row)
