"""Decides how long a leaving node stays: until its state is no longer needed, within seconds. Pure.

others can take over   it stays until a cluster of them has its state, `_HANDOVER_S` at most, or as long as the
                       transfer of a cluster that forms is expected to take
nobody can             it leaves at once: too few nodes stay, or the last plan had no place for them
"""

from __future__ import annotations

from collections.abc import Iterator

from ravnest.coordinator.state import CoordinatorState

__all__ = ["can_take_over", "handover_deadline_s", "released"]

_HANDOVER_S = 5.0
_MAX_HANDOVER_S = 60.0


def can_take_over(state: CoordinatorState, min_stages: int) -> bool:
    """Whether the nodes that stay may form a cluster from the state of leaving ones."""
    if not state.run or state.end_reason is not None:
        return False
    affected = {node.cluster for node in state.nodes.values() if node.is_present and node.leaving_s is not None}
    staying = {
        name
        for name, node in state.nodes.items()
        if state.is_connected(name) and node.leaving_s is None and (node.cluster is None or node.cluster in affected)
    }
    return len(staying) >= min_stages and not staying <= state.unplaceable


def handover_deadline_s(state: CoordinatorState, name: str) -> float:
    """When a leaving node is released in any case."""
    leaving_s = state.nodes[name].leaving_s
    assert leaving_s is not None, "the node is leaving"
    forming = (cluster for cluster in state.live_clusters() if cluster.phase == "forming")
    transfer_s = max((cluster.formed_s + cluster.plan.transfer_s for cluster in forming), default=leaving_s)
    return max(leaving_s + _HANDOVER_S, min(transfer_s, leaving_s + _MAX_HANDOVER_S))


def released(state: CoordinatorState, now_s: float, min_stages: int) -> Iterator[tuple[str, str]]:
    """Leaving nodes whose state nobody needs or can fetch, or that have waited long enough; with reasons."""
    leaving = [(name, node) for name, node in state.nodes.items() if node.is_present and node.leaving_s is not None]
    if not leaving:
        return
    has_heirs = can_take_over(state, min_stages)
    is_forming = any(cluster.phase == "forming" for cluster in state.live_clusters())
    for name, node in leaving:
        is_stored = node.cluster is None and not node.held_generation
        is_needed = bool(node.replicas) and (is_forming or (has_heirs and bool(state.failed_clusters)))
        is_useless = node.cluster is None and not has_heirs and not is_forming
        if is_useless or (is_stored and not is_needed):
            yield name, node.reason
        elif now_s >= (deadline_s := handover_deadline_s(state, name)):
            waited_s = deadline_s - (node.leaving_s or 0.0)
            yield name, f"{node.reason}; its state was not fetched within {waited_s:.0f} s"
