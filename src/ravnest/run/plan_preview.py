"""Simulates an optimizer step of a cluster as it was planned, for the dashboard to compare with the real ones.

The schedule is that of the workers. A forward pass takes a third of the planned time of a microbatch, a backward pass
the rest; messages take the planned time of their link. Real times of single actions are not collected: the clocks of
nodes are not compared, and what they report are sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ravnest.core.schedule import PipelineSchedule
from ravnest.planner.partition.depth import LinkSeconds
from ravnest.run.plan import PipelinePlan
from ravnest.simulator.pipeline import Hop, PipelineSimulation, Route

__all__ = ["simulate_plan"]

_STEADY_STEPS = 8  # that are simulated with a full pipeline; the last one is shown
_MAX_STEPS = 40  # of the simulation, until the pipeline is full
_MAX_SPANS = 2000


def simulate_plan(plan: PipelinePlan, links: Sequence[LinkSeconds]) -> dict[str, Any] | None:
    """Return the seconds of a step, the busy seconds of each stage in it, and the actions of one step.

    An action is [stage, kind, start, end] with the seconds since the step began. None if the pipeline does not become
    full.
    """
    last, rules = len(plan.rules) - 1, plan.rules
    step_s = rules[0].accumulate * max(stage.seconds for stage in plan.plans)
    if step_s <= 0:
        return None
    pipeline = PipelineSimulation(
        [PipelineSchedule(rule, is_last_stage=i == last) for i, rule in enumerate(rules)],
        [{"forward": p.seconds / 3, "backward": 2 * p.seconds / 3, "step": 0.0} for p in plan.plans],
        _routes(links, last),
        record_until_s=2 * _MAX_STEPS * step_s,
    )
    for number in range(2 * _MAX_STEPS):
        pipeline.run((number + 1) * step_s)
        if pipeline.steady[0] >= _STEADY_STEPS:
            break
    steps, seconds = pipeline.steady
    if not steps or pipeline.last is None or seconds <= 0:
        return None
    per_step_s = seconds / steps
    end_s = pipeline.last.time_s
    start_s = end_s - per_step_s
    spans = [
        [span.stage, span.action.kind, round(max(span.start_s, start_s) - start_s, 6),
         round(min(span.end_s, end_s) - start_s, 6)]
        for span in pipeline.actions
        if span.end_s > start_s and span.start_s < end_s and span.action.kind in ("forward", "backward")
    ]  # fmt: skip
    return {
        "step_s": per_step_s, "busy_s": [pipeline.steady_busy_s(i) / steps for i in range(last + 1)],
        "spans": spans[:_MAX_SPANS],
    }  # fmt: skip


def _routes(links: Sequence[LinkSeconds], count: int) -> list[Route]:
    """Return the routes of all links, forward and backward in turns; each direction has a channel of its own."""
    if not links:
        return [Route()] * (2 * count)
    routes = []
    for number, link in enumerate(links):
        routes.append(Route((Hop(2 * number, link.forward_s),), link.latency_s))
        routes.append(Route((Hop(2 * number + 1, link.backward_s),), link.latency_s))
    return routes
