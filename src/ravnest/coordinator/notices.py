"""Tells each node without work why it waits, and for how long at most."""

from __future__ import annotations

from ravnest.coordinator.context import CoordinatorContext
from ravnest.coordinator.policy.departure import can_take_over, handover_deadline_s
from ravnest.coordinator.policy.membership import MembershipPolicy, PlanWait, plan_wait
from ravnest.coordinator.state import CoordinatorState
from ravnest.protocol.control import Waiting

__all__ = ["WaitNotices"]

_INTERVAL_S = 0.25
_TOLERANCE_S = 0.5  # a deadline that moves by less is not sent again

Wait = tuple[str, float | None]  # the reason, and the time at which the wait ends at the latest


def wait_of(state: CoordinatorState, name: str, now_s: float, policy: MembershipPolicy, plan: PlanWait) -> Wait | None:
    """Why a node waits; None if it works or its assignment says it. With a time, "within 5 s" may follow."""
    node = state.nodes[name]
    cluster = state.clusters.get(node.cluster or "")
    if node.leaving_s is not None:
        is_forming = any(live.phase == "forming" for live in state.live_clusters())
        if is_forming or can_take_over(state, policy.min_stages):
            return "others take over its stage", handover_deadline_s(state, name)
        return None
    if cluster is not None:
        others = [other for other in cluster.not_ready if other != name]
        if cluster.phase != "forming" or name in cluster.not_ready or not others:
            return None
        return f"waits until {' and '.join(others)} {'is' if len(others) == 1 else 'are'} ready", None
    if name in plan.nodes:
        if plan.due_s is not None and plan.due_s <= now_s:
            return "waits for the plan that is being computed", None
        if plan.due_s is not None:
            number = f"{plan.num_arriving} more node{'' if plan.num_arriving == 1 else 's'}"
            return f"waits for {number if plan.num_arriving else 'more nodes'}: training begins", plan.due_s
        if plan.num_missing and name not in state.unplaceable:
            return f"waits for {plan.num_missing} more node{'' if plan.num_missing == 1 else 's'}", None
        return node.reason, None
    if node.is_quarantined(now_s, policy.quarantine_s):
        return f"in quarantine ({node.quarantine_reason}): used again", node.retry_s(policy.quarantine_s)
    return None


class WaitNotices:
    """Sends `Waiting` to connected nodes, whenever the reason or the deadline changes."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._sent: dict[str, Wait] = {}
        self._next_s = 0.0

    def forget(self, name: str) -> None:
        """The node has connected again: it gets its notice again."""
        self._sent.pop(name, None)
        self._next_s = 0.0

    def tick(self) -> None:
        context, state, now_s = self._context, self._context.state, self._context.now_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _INTERVAL_S
        plan = plan_wait(state, now_s, context.policy)
        for name, node in state.nodes.items():
            if not node.is_present or not state.is_connected(name):
                self._sent.pop(name, None)
                continue
            wait = wait_of(state, name, now_s, context.policy, plan)
            if wait is None:
                self._sent.pop(name, None)
            elif not _is_same(wait, self._sent.get(name)):
                self._sent[name] = wait
                reason, until_s = wait
                context.send(name, Waiting(reason[:500], None if until_s is None else max(until_s - now_s, 0.0)))


def _is_same(wait: Wait, sent: Wait | None) -> bool:
    if sent is None or wait[0] != sent[0] or (wait[1] is None) != (sent[1] is None):
        return False
    return wait[1] is None or sent[1] is None or abs(wait[1] - sent[1]) <= _TOLERANCE_S
