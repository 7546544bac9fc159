"""Machines in a row as one cluster: cut where it is best for them, or where they are cut already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from .fleet import ClusterPlan, Task
from .partition import partition
from .problem import PlanError, Problem

__all__ = ["plan_row", "try_row"]

_NO_TIME_S = 1e-12  # a chain that takes none still has a finite rate
_PLACES = 96  # cuts to compare, as when clusters are formed: finer ones gain next to nothing


def plan_row(task: Task, members: Sequence[str], cuts: Sequence[int] | None = None) -> ClusterPlan:
    """What these machines do, root first. Raises `PlanError` if the model does not fit on them, or not so cut."""
    machines = [task.fleet[name] for name in members]
    found = partition(
        Problem(
            chain=task.chain if cuts is None else replace(task.chain, cuts=tuple(cuts)),
            nodes=tuple(machine.node for machine in machines),
            links=tuple(task.fleet.link(a, b) for a, b in pairwise(machines)),
            memory=task.memory,
            max_depth=task.max_depth,
            slack=task.slack,
            max_places=_PLACES,
        )
    )
    return ClusterPlan(tuple(members), found, task.microbatch / max(found.interval_s, _NO_TIME_S), found.reason)


def try_row(task: Task, members: Sequence[str], cuts: Sequence[int] | None = None) -> ClusterPlan | None:
    """The same, or None."""
    try:
        return plan_row(task, members, cuts)
    except PlanError:
        return None
