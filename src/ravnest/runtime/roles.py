"""What each stage must know of the others: their delays, and who lends which parameters to whom."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Stage
from .loop import Role

__all__ = ["roles"]


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
