"""Neighbours near each other, where that costs nothing: less latency, so fewer microbatches in flight.

Two machines of two rows change places if the rows do as much as before and the latencies in them add up to less.
"""

from __future__ import annotations

from random import Random

from .groups import Groups
from .order import EQUAL, latency_s

__all__ = ["bring_near"]

_TRIES = 30  # per machine


def bring_near(groups: Groups, rng: Random) -> None:
    """Changes `groups` by exchanges that lessen latency, and by nothing else."""
    quick = groups.quick
    members = [m for row in groups.rows for m in row]
    if len({quick.machines[m].region for m in members}) < 2:
        return
    for _ in range(_TRIES * len(members)):
        m, n = rng.choice(members), rng.choice(members)
        a, b = groups.row_of[m], groups.row_of[n]
        if a == b or quick.machines[m].region == quick.machines[n].region:
            continue
        swap = {m: n, n: m}
        rows = [groups.rows[a], groups.rows[b]]
        changed = [tuple(swap.get(o, o) for o in row) for row in rows]
        if sum(latency_s(quick, row) for row in changed) >= sum(latency_s(quick, row) for row in rows):
            continue
        rates = (groups.rates[a], groups.rates[b])
        if all(quick.reaches(row, rate * EQUAL) for row, rate in zip(changed, rates, strict=True)):
            groups.replace([a, b], changed)
