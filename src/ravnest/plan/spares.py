"""Machines held back to take the place of others: those whose absence costs least.

Without machine m its row does R(row - m), or nothing if the model no longer fits or too few are left; then the others
of the row are free as well. The machine with the least loss goes first, and so on, until there are enough.
"""

from __future__ import annotations

from collections.abc import Callable
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


def hold_back(
    groups: Groups, num_spares: int, min_stages: int, smallest_stage_bytes: Callable[[], float]
) -> dict[int, float]:
    """Take spares out of `groups`; what the absence of each costs. Fewer than asked if no row would remain."""
    held: dict[int, float] = {}
    if not num_spares:
        return held
    needed_bytes = smallest_stage_bytes()
    for m in groups.idle:
        if len(held) < num_spares and groups.quick.machines[m].memory_bytes >= needed_bytes:
            held[m] = 0.0
    while len(held) < num_spares:
        loss = _least(groups, min_stages, needed_bytes)
        if loss is None:
            break
        row = groups.rows[loss.number]
        groups.replace([loss.number], [loss.rest] if loss.rest else [])
        held[loss.m if loss.rest else max(row, key=lambda m: groups.quick.machines[m].memory_bytes)] = loss.per_s
    for m in list(held):
        _exchange(groups, held, m, needed_bytes)
    groups.withdraw(held)
    return held


def _exchange(groups: Groups, held: dict[int, float], m: int, needed_bytes: float) -> None:
    """Let m work, and hold back a member instead, while some row does more with it."""
    quick = groups.quick
    for number, row in enumerate(groups.rows):
        for place, n in enumerate(row):
            other = (*row[:place], m, *row[place + 1 :])
            if quick.machines[n].memory_bytes < needed_bytes or quick.kinds[m] == quick.kinds[n]:
                continue
            if quick.does_more(other, groups.rates[number]):
                gain = quick.per_s(other) - groups.rates[number]
                groups.replace([number], [other])
                held[n] = held.pop(m) - gain
                return _exchange(groups, held, n, needed_bytes)
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
