"""Why a machine has no stage, in words: too little memory, a line that would slow the others, or no gain."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.config import format_bytes
from .fleet import ClusterPlan, Idle
from .groups import Groups
from .quick import Quick, Row

__all__ = ["explain_idle"]

_TRIES = 8  # clusters that a machine is tried in, for the words alone


def explain_idle(
    groups: Groups, clusters: Sequence[ClusterPlan], held: dict[int, float]
) -> tuple[tuple[Idle, ...], tuple[Idle, ...]]:
    """Spares, and who is left out: a spare has the memory for some member's stage. `held` are those held back."""
    quick, spares, left_out = groups.quick, list[Idle](), list[Idle]()
    stages = sorted(memory.total for cluster in clusters for memory in cluster.partition.memory)
    rows = sorted(zip(groups.rates, groups.rows, strict=True))
    known: dict[int, str] = {}  # by kind: equal machines have equal reasons
    for m, machine in enumerate(quick.machines):
        if groups.row_of.get(m, -1) >= 0:
            continue
        places = sum(size <= machine.memory_bytes for size in stages)
        if m in held and places:
            why = "held back as a spare: " + _cost(held[m] * quick.task.microbatch)
        else:
            if quick.kinds[m] not in known:
                known[quick.kinds[m]] = _why(quick, m, rows)
            why = known[quick.kinds[m]]
        if places:
            spares.append(Idle(machine.name, f"{why}; it has the memory for {places} of {len(stages)} stages"))
        else:
            left_out.append(Idle(machine.name, why))
    return tuple(spares), tuple(left_out)


def _cost(samples_per_s: float) -> str:
    return f"without it the clusters do {samples_per_s:.3g} samples/s less" if samples_per_s > 0 else "it is not needed"


def _why(quick: Quick, m: int, rows: list[tuple[float, Row]]) -> str:
    machine, smallest = quick.machines[m], quick.smallest_bytes
    if machine.memory_bytes < smallest:
        return (
            f"too little memory: the smallest piece of the model takes {format_bytes(smallest)}, "
            f"it lends {format_bytes(machine.memory_bytes)}"
        )
    before, row, after = max(
        ((rate, row, _with(quick, row, m)) for rate, row in _likely(quick, rows, m)), key=lambda t: t[2] - t[0]
    )
    return _compare(quick, m, before, after, row)


def _likely(quick: Quick, rows: list[tuple[float, Row]], m: int) -> list[tuple[float, Row]]:
    """The slowest rows, which a slow machine hinders least, and those near to it."""
    machine = quick.machines[m]
    near = [r for r in rows if any(quick.machines[n].region == machine.region for n in r[1])]
    return [*rows[: _TRIES // 2], *near[: _TRIES // 2]]


def _with(quick: Quick, row: Row, m: int) -> float:
    return max(quick.per_s((*row[:place], m, *row[place:])) for place in range(len(row) + 1))


def _compare(quick: Quick, m: int, before: float, after: float, row: Row) -> str:
    machine, samples = quick.machines[m], quick.task.microbatch
    change = f"from {before * samples:.3g} to {after * samples:.3g} samples/s"
    whom = f"the cluster of {quick.machines[row[0]].name}"
    if after == 0:
        return f"it does not fit into any cluster: {whom}, for one, has no room for another stage"
    line = min(machine.up_bytes_per_s, machine.down_bytes_per_s)
    if after < before and quick.most_per_s[m] < before:
        which = "upload" if line == machine.up_bytes_per_s else "download"
        return f"its {which} of {format_bytes(line)}/s would slow {whom}, which it hinders least, {change}"
    if after < before:
        return f"it would slow {whom}, which it hinders least, {change}"
    return f"it would not help: {whom}, which it helps most, would go {change}"
