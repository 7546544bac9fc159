"""Holds back spares, and explains machines without a stage.

A spare is a machine whose absence costs least. Without machine m its row does R(row - m), or nothing if the model no
longer fits or too few are left; then the others of the row are free as well. The machine with the least loss is held
back first, and so on, until there are enough.

Other machines are idle for too little memory, a line that would slow the others, or no gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ravnest.core.units import format_bytes
from ravnest.planner.clusters.estimate import RateEstimator, Row
from ravnest.planner.clusters.local_search import Grouping
from ravnest.planner.fleet import ClusterPlan, IdleMachine
from ravnest.planner.reasons import explain_idle_machine, format_rate

__all__ = ["hold_back", "explain_idle"]


class _Loss(NamedTuple):
    """The loss of all rows together without a machine, and the rest of its row."""

    per_s: float
    m: int
    number: int
    rest: Row


def hold_back(grouping: Grouping, num_spares: int, min_stages: int, needed_bytes: float) -> dict[int, float]:
    """Take spares of at least `needed_bytes` out of `grouping`; returns the cost of each one's absence.

    There are fewer than `num_spares` if otherwise no row would remain.
    """
    held: dict[int, float] = {}
    while len(held) < num_spares:
        free = [
            m for m in grouping.idle if m not in held and grouping.estimator.machines[m].memory_bytes >= needed_bytes
        ]
        if free:
            held[free[0]] = 0.0
            continue
        loss = _least(grouping, min_stages, needed_bytes)
        if loss is None:
            break
        grouping.replace([loss.number], [loss.rest] if loss.rest else [])
        held[loss.m] = loss.per_s
    for m in list(held):
        _exchange(grouping, held, m, needed_bytes)
    grouping.withdraw(held)
    return held


def _exchange(grouping: Grouping, held: dict[int, float], m: int, needed_bytes: float) -> None:
    """Exchange m for a member, and that one for another, as long as some row does more."""
    estimator = grouping.estimator
    while (found := _better_with(grouping, m, needed_bytes)) is not None:
        number, n, row = found
        cost = held.pop(m) - estimator.per_s(row) + grouping.rates[number]
        grouping.replace([number], [row])
        held[n] = max(0.0, cost)
        m = n


def _better_with(grouping: Grouping, m: int, needed_bytes: float) -> tuple[int, int, Row] | None:
    """A row that does more with m in place of a member that could be a spare; and that member."""
    estimator = grouping.estimator
    for number, row in enumerate(grouping.rows):
        for place, n in enumerate(row):
            if estimator.machines[n].memory_bytes < needed_bytes or estimator.kinds[m] == estimator.kinds[n]:
                continue
            other = (*row[:place], m, *row[place + 1 :])
            if estimator.does_more(other, grouping.rates[number]):
                return number, n, other
    return None


def _least(grouping: Grouping, min_stages: int, needed_bytes: float) -> _Loss | None:
    found = (
        _loss(grouping.estimator, row, m, number, min_stages, grouping.rates[number])
        for number, row in enumerate(grouping.rows)
        for m in row
        if grouping.estimator.machines[m].memory_bytes >= needed_bytes
    )
    return min((loss for loss in found if loss.rest or len(grouping.rows) > 1), default=None)


def _loss(estimator: RateEstimator, row: Row, m: int, number: int, min_stages: int, per_s: float) -> _Loss:
    rest = tuple(n for n in row if n != m)
    remaining = estimator.per_s(rest) if len(rest) >= min_stages else 0.0
    return _Loss(per_s - remaining, m, number, rest if remaining else ())


_MAX_TRIES = 8  # clusters that a machine is tried in, for the explanation alone


def explain_idle(
    grouping: Grouping, clusters: Sequence[ClusterPlan], held: dict[int, float]
) -> tuple[tuple[IdleMachine, ...], tuple[IdleMachine, ...]]:
    """Spares and machines left out; a spare has the memory for some member's stage. `held` are held back."""
    estimator, spares, left_out = grouping.estimator, list[IdleMachine](), list[IdleMachine]()
    stages = sorted(memory.total for cluster in clusters for memory in cluster.partition.memory)
    rows = sorted(zip(grouping.rates, grouping.rows, strict=True))
    known: dict[int, str] = {}  # by kind: equal machines have equal reasons
    for m, machine in enumerate(estimator.machines):
        if grouping.row_of.get(m, -1) >= 0:
            continue
        num_fitting = sum(size <= machine.memory_bytes for size in stages)
        if m in held and num_fitting:
            why = "held back as a spare: " + _cost(held[m] * estimator.task.microbatch)
        else:
            if estimator.kinds[m] not in known:
                known[estimator.kinds[m]] = _why(estimator, m, rows)
            why = known[estimator.kinds[m]]
        if num_fitting:
            spares.append(
                IdleMachine(machine.name, f"{why}; it has the memory for {num_fitting} of {len(stages)} stages")
            )
        else:
            left_out.append(IdleMachine(machine.name, why))
    return tuple(spares), tuple(left_out)


def _cost(samples_per_s: float) -> str:
    return f"without it the clusters do {format_rate(samples_per_s)} less" if samples_per_s > 0 else "it is not needed"


def _why(estimator: RateEstimator, m: int, rows: list[tuple[float, Row]]) -> str:
    machine, smallest = estimator.machines[m], estimator.smallest_bytes
    if machine.memory_bytes < smallest:
        return (
            f"too little memory: the smallest stage takes {format_bytes(smallest)}, "
            f"it offers {format_bytes(machine.memory_bytes)}"
        )
    before, row, after = max(
        ((rate, row, _with(estimator, row, m)) for rate, row in _likely(estimator, rows, m)), key=lambda t: t[2] - t[0]
    )
    return _compare(estimator, m, before, after, row)


def _likely(estimator: RateEstimator, rows: list[tuple[float, Row]], m: int) -> list[tuple[float, Row]]:
    """The slowest rows, to which a slow machine costs least, and those of its region."""
    machine = estimator.machines[m]
    near = [r for r in rows if any(estimator.machines[n].region == machine.region for n in r[1])]
    return [*rows[: _MAX_TRIES // 2], *near[: _MAX_TRIES // 2]]


def _with(estimator: RateEstimator, row: Row, m: int) -> float:
    return max(estimator.per_s((*row[:place], m, *row[place:])) for place in range(len(row) + 1))


def _compare(estimator: RateEstimator, m: int, before: float, after: float, row: Row) -> str:
    samples = estimator.task.microbatch
    return explain_idle_machine(
        estimator.machines[m],
        estimator.machines[row[0]].name,
        before * samples,
        after * samples,
        is_limited_by_line=estimator.most_per_s[m] < before,
    )
