"""Says what a run waits for while none of its clusters trains. Pure."""

from __future__ import annotations

from ravnest.coordinator.policy.membership import MembershipPolicy, plan_wait
from ravnest.coordinator.state import CoordinatorState

__all__ = ["waiting_for"]


def waiting_for(state: CoordinatorState, now_s: float, policy: MembershipPolicy) -> str:
    """Return what the run waits for; empty while a cluster trains, before the run and after its end."""
    clusters = list(state.live_clusters())
    if not state.run or state.end_reason is not None or any(cluster.phase == "training" for cluster in clusters):
        return ""
    if clusters:
        num_ready = sum(len(cluster.plan.members) - len(cluster.not_ready) for cluster in clusters)
        num_stages = sum(len(cluster.plan.members) for cluster in clusters)
        names = " and ".join(cluster.plan.id for cluster in clusters)
        return f"cluster {names} is forming, {num_ready} of {num_stages} stages are ready"
    plan = plan_wait(state, now_s, policy)
    num_present = sum(node.is_present for node in state.nodes.values())
    if plan.due_s is not None:
        arriving = f", {plan.num_arriving} more are on their way" if plan.num_arriving else ""
        if plan.due_s <= now_s:
            return f"{num_present} connected; the plan is being computed"
        return f"{num_present} connected{arriving}; training begins within {plan.due_s - now_s:.0f} s"
    staying = sorted(name for name, node in state.nodes.items() if node.is_present and node.leaving_s is None)
    num_missing = plan.num_missing + len(plan.nodes) - len(staying)
    if num_missing > 0:
        return f"waiting for {num_missing} more node{'' if num_missing == 1 else 's'}, {num_present} connected"
    busy = [name for name in staying if name not in plan.nodes]
    if busy:
        return f"waiting for {_list(busy)}: {state.nodes[busy[0]].reason or 'its stage ends'}"
    return f"waiting for more nodes: no plan fits {_list(staying)}" if staying else "waiting for nodes"


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
