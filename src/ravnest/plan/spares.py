"""Machines held back to take the place of others: those whose absence costs least.

Without machine m its row does R(row - m), or nothing if the model no longer fits or too few are left; then the others
of the row are free as well. The machine with the least loss goes first, and so on, until there are enough.
"""

from __future__ import annotations

from typing import NamedTuple

from .groups import Groups
from .quick import Quick, Row

__all__ = ["hold_back"]


class _Loss(NamedTuple):
    """What all rows together lose without a machine, and what is left of its own."""

    per_s: float
    m: int
    number: int
    rest: Row


def hold_back(groups: Groups, num_spares: int, min_stages: int, needed_bytes: float) -> dict[int, float]:
    """Take spares of at least `needed_bytes` out of `groups`, and tell what the absence of each costs.

    There are fewer than asked for if otherwise no row would remain.
    """
    held: dict[int, float] = {}
    while len(held) < num_spares:
        free = [m for m in groups.idle if m not in held and groups.quick.machines[m].memory_bytes >= needed_bytes]
        if free:
            held[free[0]] = 0.0
            continue
        loss = _least(groups, min_stages, needed_bytes)
        if loss is None:
            break
        groups.replace([loss.number], [loss.rest] if loss.rest else [])
        held[loss.m] = loss.per_s
    for m in list(held):
        _exchange(groups, held, m, needed_bytes)
    groups.withdraw(held)
    return held


def _exchange(groups: Groups, held: dict[int, float], m: int, needed_bytes: float) -> None:
    """Let m work, and hold back a member instead, and another for that one, as long as some row does more."""
    quick = groups.quick
    while (found := _better_with(groups, m, needed_bytes)) is not None:
        number, n, row = found
        cost = held.pop(m) - quick.per_s(row) + groups.rates[number]
        groups.replace([number], [row])
        held[n] = max(0.0, cost)
        m = n


def _better_with(groups: Groups, m: int, needed_bytes: float) -> tuple[int, int, Row] | None:
    """A row that does more with m in the place of a member that could be a spare; and that member."""
    quick = groups.quick
    for number, row in enumerate(groups.rows):
        for place, n in enumerate(row):
            if quick.machines[n].memory_bytes < needed_bytes or quick.kinds[m] == quick.kinds[n]:
                continue
            other = (*row[:place], m, *row[place + 1 :])
            if quick.does_more(other, groups.rates[number]):
                return number, n, other
    return None


def _least(groups: Groups, min_stages: int, needed_bytes: float) -> _Loss | None:
    found = (
        _loss(groups.quick, row, m, number, min_stages, groups.rates[number])
        for number, row in enumerate(groups.rows)
        for m in row
        if groups.quick.machines[m].memory_bytes >= needed_bytes
    )
    return min((loss for loss in found if loss.rest or len(groups.rows) > 1), default=None)


def _loss(quick: Quick, row: Row, m: int, number: int, min_stages: int, per_s: float) -> _Loss:
    rest = tuple(n for n in row if n != m)
    remaining = quick.per_s(rest) if len(rest) >= min_stages else 0.0
    return _Loss(per_s - remaining, m, number, rest if remaining else ())
