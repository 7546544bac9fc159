"""First clusters, to be improved: machines one after another, a row closed as soon as the model fits well.

Machines that come after one another end up together, so the order in which they come decides what a row has in
common: lines, regions, speeds. Which of these counts is not known beforehand: all are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from statistics import median

from .groups import Groups
from .order import best_order, inserted
from .quick import Quick, Row

__all__ = ["first_groups"]

_WELL = 0.8  # of what its machines could do; below that a row takes more of them
_SHORT, _SEVERAL = 8, 3  # rows of so many machines are never too long
_MORE = 2  # machines than it needs, at most
_FEW = 3  # are ordered well at once; more are by the search that follows
_TRIES = 6  # rows that a machine left over is offered to


def first_groups(quick: Quick, usable: Sequence[int], min_stages: int) -> Groups:
    """The best of several beginnings; of equals the first, which keeps regions together."""
    best = None
    for key in _keys(quick):
        for well in (_WELL, 0.0):
            rows = _rows(quick, sorted(usable, key=key), min_stages, well)
            groups = Groups(quick, usable, rows)
            if best is None or groups.per_s > best.per_s * 1.005:
                best = groups
    assert best is not None
    _use_the_rest(best)
    return best


def _keys(quick: Quick) -> Iterator[Callable[[int], tuple[object, ...]]]:
    machines, most = quick.machines, quick.most_per_s

    def line(m: int) -> float:
        return min(machines[m].up_bytes_per_s, machines[m].down_bytes_per_s)

    yield lambda m: (machines[m].site, machines[m].region, -line(m), m)
    yield lambda m: (-most[m], -line(m), -machines[m].memory_bytes, m)
    yield lambda m: (-line(m), machines[m].speed, m)
    yield lambda m: (-min(machines[m].speed / (quick.work_s or 1.0), most[m]), m)


def _rows(quick: Quick, machines: Sequence[int], min_stages: int, well: float) -> Iterator[Row]:
    """Rows of neighbours, each closed when it does `well`, or after a few more machines than it needs."""
    row: Row = ()
    fitting, longest = 0, _longest(quick, min_stages)
    for m in machines:
        row = tuple(sorted((*row, m), key=lambda m: -quick.machines[m].memory_bytes))[:longest]
        if len(row) < min_stages or not quick.reaches(row, 0.0):
            continue
        fitting += 1
        if fitting > _MORE or len(row) == longest or quick.reaches(row, well * quick.bound_per_s(row)):
            yield _ordered(quick, row)
            row, fitting = (), 0
    if fitting:
        yield _ordered(quick, row)


def _longest(quick: Quick, min_stages: int) -> int:
    """Several times what machines of middling memory need; the smallest of a row that gets longer give way."""
    middling = median(machine.memory_bytes for machine in quick.machines)
    return min(quick.places.end, max(_SHORT, min_stages, ceil(_SEVERAL * quick.whole_bytes / middling)))


def _ordered(quick: Quick, row: Row) -> Row:
    return best_order(quick, row) if len(row) <= _FEW else row


def _use_the_rest(groups: Groups) -> None:
    """Everybody left over joins the first row that gains by it, of those with the most to gain."""
    quick = groups.quick
    for m in groups.idle:
        wanting = sorted(
            range(len(groups.rows)), key=lambda g: groups.rates[g] - quick.bound_per_s((*groups.rows[g], m))
        )
        for g in wanting[:_TRIES]:
            longer = inserted(quick, groups.rows[g], m, groups.rates[g])
            if longer:
                groups.replace([g], [longer[0]])
                break
