"""Disconnected nodes may reconnect, and are not planned until then."""

from __future__ import annotations

from ravnest.coordinator.apply import apply
from ravnest.coordinator.events import NodeConnected, RunStarted
from ravnest.coordinator.policy.membership import CreatePlan, MembershipPolicy, decide, next_decision_s
from ravnest.coordinator.state import CoordinatorState
from ravnest.protocol.control import NodeProfile
from ravnest.protocol.peer import PeerAddresses

_POLICY = MembershipPolicy(min_nodes=2, settle_s=1.0, heartbeat_s=5.0)
_PROFILE = NodeProfile(memory_bytes=10**9, gflops=10.0)


def _connected(*names: str) -> CoordinatorState:
    state = CoordinatorState()
    apply(state, RunStarted(0.0, "run", None, ""))
    for name in names:
        apply(state, NodeConnected(1.0, name, _PROFILE, PeerAddresses(), "192.0.2.1:7", 0))
    return state


def _planned(state: CoordinatorState, now_s: float) -> tuple[str, ...]:
    return next((decision.nodes for decision in decide(state, now_s, _POLICY) if isinstance(decision, CreatePlan)), ())


def test_a_disconnected_node_is_planned_only_after_it_reconnects() -> None:
    state = _connected("attic", "barn", "cellar")
    state.mark_disconnected("barn")
    assert _planned(state, 3.0) == ("attic", "cellar")
    state.mark_seen("barn", 3.0)
    assert _planned(state, 3.0) == ("attic", "barn", "cellar")


def test_a_disconnected_node_does_not_count_as_free() -> None:
    state = _connected("attic", "barn")
    state.mark_disconnected("barn")
    assert _planned(state, 3.0) == ()
    assert next_decision_s(state, 3.0, _POLICY) > 3.0


def test_a_disconnected_node_keeps_its_last_seen_time() -> None:
    state = _connected("attic")
    state.mark_seen("attic", 2.0, "training")
    state.mark_disconnected("attic")
    last = state.last_seen("attic")
    assert (last.at_s, last.activity, last.is_disconnected) == (2.0, "training", True)
