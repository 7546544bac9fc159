"""Plans given machines as one cluster: with the best cuts, or with given ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ravnest.planner.fleet import ClusterPlan, Task
from ravnest.planner.partition.solver import partition
from ravnest.planner.problem import PlanError

__all__ = ["plan_row", "try_row"]

_NO_TIME_S = 1e-12  # so that a chain that takes no time has a finite rate
_MAX_CUT_POINTS = 96  # cuts to compare, as in `form_clusters`: more gain next to nothing


def plan_row(task: Task, members: Sequence[str], cuts: Sequence[int] | None = None) -> ClusterPlan:
    """The plan of these machines, first stage first. Raises `PlanError` if the model does not fit with such cuts."""
    if cuts is not None:
        task = replace(task, chain=replace(task.chain, cuts=tuple(cuts)))
    found = partition(task.problem([task.fleet[name] for name in members], max_cut_points=_MAX_CUT_POINTS))
    return ClusterPlan(tuple(members), found, task.microbatch / max(found.interval_s, _NO_TIME_S), found.reason)


def try_row(task: Task, members: Sequence[str], cuts: Sequence[int] | None = None) -> ClusterPlan | None:
    """As `plan_row`; None instead of an error."""
    try:
        return plan_row(task, members, cuts)
    except PlanError:
        return None
