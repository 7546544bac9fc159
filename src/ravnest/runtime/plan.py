"""From stages and a mode to what each of them is told: its rule, and what it must know of the others."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from ..graph import Stage
from .loop import Role
from .schedule import Rule

__all__ = ["roles", "rules"]


def rules(
    depths: Sequence[int], accumulate: int, *, synchronous: bool = False, max_staleness: int | None = None
) -> list[Rule]:
    """A rule for each stage, with the smallest delay that costs no bubble.

    If a window holds all that is in flight it is one update, at the leaf too, so that every microbatch runs on one
    version of the whole model. Else it is what each stage needs: (depth - 1) / accumulate. One stage alone needs none.
    """

    def delay(depth: int) -> int:
        if synchronous or max(depths) == 1:
            return 0
        natural = 1 if accumulate >= max(depths) else ceil((depth - 1) / accumulate)
        return natural if max_staleness is None else min(natural, max_staleness)

    return [Rule(accumulate=accumulate, depth=depth, delay=delay(depth)) for depth in depths]


def roles(stages: Sequence[Stage], delays: Sequence[int]) -> list[Role]:
    """Who lends which parameters to whom."""
    found = []
    lent = {b.target for stage in stages for b in stage.borrowed}
    tied = tuple(s for stage in stages for s in stage.parameters if s.owner == stage.index and s.target in lent)
    for stage in stages:
        borrowers = [s.index for s in stages if any(b.owner == stage.index for b in s.borrowed)]
        lends = tuple(
            s.target
            for s in stage.parameters
            if s.owner == stage.index and any(b.target == s.target for i in borrowers for b in stages[i].borrowed)
        )
        found.append(Role(tuple(delays), lends, max(borrowers, default=-1), frozenset(borrowers), tied))
    return found
