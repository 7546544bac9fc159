"""Machines in a row as one cluster: cut where it is best for them, or where they are cut already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .fleet import ClusterPlan, Task
from .partition import partition
from .problem import PlanError

__all__ = ["plan_row", "try_row"]

_NO_TIME_S = 1e-12  # a chain that takes none still has a finite rate
_PLACES = 96  # cuts to compare, as when clusters are formed: finer ones gain next to nothing


def plan_row(task: Task, members: Sequence[str], cuts: Sequence[int] | None = None) -> ClusterPlan:
    """What these machines do, root first. Raises `PlanError` if the model does not fit on them, or not so cut."""
    if cuts is not None:
        task = replace(task, chain=replace(task.chain, cuts=tuple(cuts)))
    found = partition(task.problem([task.fleet[name] for name in members], max_places=_PLACES))
    return ClusterPlan(tuple(members), found, task.microbatch / max(found.interval_s, _NO_TIME_S), found.reason)


def try_row(task: Task, members: Sequence[str], cuts: Sequence[int] | None = None) -> ClusterPlan | None:
    """The same, or None."""
    try:
        return plan_row(task, members, cuts)
    except PlanError:
        return None
