"""The search for clusters as a whole: all groupings of a few machines, a first grouping improved of more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from random import Random

from .construct import first_groups
from .groups import Groups
from .improve import improve
from .order import best_order
from .quick import Quick, Row
from .repack import repacked

__all__ = ["find_groups"]

_ALL_GROUPINGS = 6  # up to so many machines
_LONGEST = 64  # machines of a row that is looked for because no other was found


def find_groups(
    quick: Quick, rng: Random, *, min_stages: int, budget: int, all_groupings: int = _ALL_GROUPINGS
) -> Groups:
    """The best rows of at least `min_stages` machines that are found with such a budget; none if nothing fits."""
    usable = range(len(quick.machines))
    if len(usable) <= all_groupings:
        return Groups(quick, usable, repacked(quick, usable, min_stages, all_orders=all_groupings))
    groups = first_groups(quick, usable, min_stages)
    if not groups.rows:
        groups.replace([], _any_row(quick, usable, min_stages))
    improve(groups, rng, min_stages, budget)
    return groups


def _any_row(quick: Quick, usable: Sequence[int], min_stages: int) -> list[Row]:
    """A row of as few of the largest machines as the model fits on, in some order, if there is one."""
    largest = sorted(usable, key=lambda m: (-quick.machines[m].memory_bytes, m))
    longest = min(len(largest), quick.places.end, _LONGEST)
    rows = (best_order(quick, largest[:count]) for count in range(min_stages, longest + 1))
    return list(islice((row for row in rows if quick.per_s(row)), 1))
