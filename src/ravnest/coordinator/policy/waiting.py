"""Says what a run waits for while none of its clusters trains. Pure."""

from __future__ import annotations

from ravnest.coordinator.policy.membership import MembershipPolicy
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
    present = [name for name, node in state.nodes.items() if node.is_present]
    usable = state.free_nodes(now_s, policy.quarantine_s)
    needed = policy.min_stages if state.has_trained else max(policy.min_nodes, policy.min_stages)
    if len(present) < needed:
        return f"waiting for nodes, {len(present)} of {needed} are connected"
    if len(usable) < needed:
        waiting = sorted(set(present) - set(usable))
        return f"waiting until {_list(waiting)} can be used: {state.nodes[waiting[0]].reason or 'its stage ended'}"
    unplaceable = sorted(name for name in usable if name in state.unplaceable)
    if len(unplaceable) == len(usable):
        return f"waiting for more nodes: no plan fits {_list(unplaceable)}"
    return f"waiting for further nodes to join before planning; {len(present)} are connected"


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
