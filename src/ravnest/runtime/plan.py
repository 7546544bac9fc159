"""From stages and a mode to what each of them is told: its rule, and what it must know of the others."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Stage
from .loop import Role
from .schedule import Rule, default_delay

__all__ = ["roles", "rules"]


def rules(
    depths: Sequence[int], accumulate: int, *, synchronous: bool = False, max_staleness: int | None = None
) -> list[Rule]:
    """A rule for each stage. In the double-buffered mode all have a delay of one update, the leaf too, so that
    every microbatch runs on one version of the whole model."""
    if synchronous:
        return [Rule(accumulate=accumulate, depth=depth, delay=0) for depth in depths]
    return [
        Rule(accumulate=accumulate, depth=depth, delay=default_delay(accumulate, depth, max_staleness))
        for depth in depths
    ]


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
