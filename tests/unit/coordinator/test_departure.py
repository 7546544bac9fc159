"""How long a leaving node stays: until others have its state, a few seconds at most, or not at all."""

from __future__ import annotations

import msgspec
import pytest

from ravnest.coordinator import events as on
from ravnest.coordinator.apply import apply
from ravnest.coordinator.events import Event
from ravnest.coordinator.policy.departure import can_take_over
from ravnest.coordinator.policy.membership import MembershipPolicy, ReleaseNode, decide, next_decision_s
from ravnest.coordinator.state import CoordinatorState
from ravnest.protocol.control import ReplicaInfo
from tests.unit.coordinator.histories import cluster, connected, planned, state_of

POLICY = MembershipPolicy(min_nodes=2, min_stages=2)


def training(*names: str, others: tuple[str, ...] = ()) -> CoordinatorState:
    """Cluster c1 of these nodes trains since 50 s; others are free."""
    ready = (on.NodeReady(50.0, "c1", name) for name in names)
    joined = (connected(10.0, name) for name in (*names, *others))
    return state_of([on.RunStarted(0.0, "r", None, "1"), *joined, planned(40.0, cluster(1, *names)), *ready])


def after(state: CoordinatorState, *events: Event) -> CoordinatorState:
    for event in events:
        apply(state, event)
    return state


def leave(at_s: float, name: str) -> on.NodeLeaving:
    return on.NodeLeaving(at_s, name, "its owner ended it")


def retired(at_s: float, *names: str) -> list[Event]:
    """Cluster c1 ends, and each member stores its state."""
    stored = [on.NodeReleased(at_s, name, 1, ReplicaInfo("c1", i, 7)) for i, name in enumerate(names)]
    return [on.ClusterEnded(at_s, "c1", "a node is leaving", is_lost=False, is_replanned=True), *stored]


def released(state: CoordinatorState, now_s: float) -> list[str]:
    for name in state.nodes:
        state.mark_seen(name, now_s)
    return [decision.name for decision in decide(state, now_s, POLICY) if isinstance(decision, ReleaseNode)]


def test_a_node_stays_until_a_cluster_of_the_others_has_its_state() -> None:
    state = after(training("a", "b", "c"), leave(100.0, "a"))
    assert can_take_over(state, 2)
    assert released(state, 101.0) == []
    after(state, *retired(101.0, "a", "b", "c"))
    assert released(state, 102.0) == []
    repaired = msgspec.structs.replace(cluster(2, "b", "c", generation=2), repairs="c1")
    after(state, planned(102.5, repaired, generation=2))
    assert released(state, 103.0) == []
    after(state, on.NodeReady(103.5, "c2", "b"), on.NodeReady(103.5, "c2", "c"))
    assert released(state, 103.6) == ["a"]


def test_a_node_stays_five_seconds_or_as_long_as_the_transfer_of_its_state_takes() -> None:
    state = after(training("a", "b", "c"), leave(100.0, "a"), *retired(101.0, "a", "b", "c"))
    assert released(state, 104.9) == []
    assert 104.9 < next_decision_s(state, 104.9, POLICY) <= 105.0
    assert released(state, 105.0) == ["a"]
    slow = msgspec.structs.replace(cluster(2, "b", "c", generation=2), repairs="c1", transfer_s=20.0)
    after(state, planned(103.0, slow, generation=2))
    assert released(state, 122.9) == []
    assert released(state, 123.0) == ["a"]


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_node_leaves_at_once_if_too_few_stay(is_stored: bool) -> None:
    state = after(training("a", "b"), leave(100.0, "a"))
    assert not can_take_over(state, 2)
    events = retired(100.0, "a", "b")
    after(state, *(events if is_stored else events[:1]))
    assert released(state, 100.1) == ["a"]


def test_nobody_waits_when_all_leave_together() -> None:
    state = training("a", "b", "c", "d", others=("e",))
    for i, name in enumerate(("a", "b", "c", "d", "e")):
        after(state, leave(100.0 + i / 100, name))
    assert not can_take_over(state, 2)
    after(state, *retired(100.1, "a", "b", "c", "d"))
    assert released(state, 100.2) == ["a", "b", "c", "d", "e"]


def test_a_node_leaves_at_once_if_the_model_does_not_fit_on_the_others() -> None:
    state = after(training("a", "b", "c"), leave(100.0, "a"), *retired(101.0, "a", "b", "c"))
    assert released(state, 102.0) == []
    after(state, on.PlanFailed(102.0, "4 GB are missing", ("b", "c")))
    assert released(state, 102.1) == ["a"]


def test_nodes_of_other_clusters_do_not_take_over() -> None:
    state = training("a", "b", others=("c", "d"))
    after(state, planned(60.0, cluster(2, "c", "d", generation=2), generation=2))
    after(state, *(on.NodeReady(61.0, "c2", name) for name in ("c", "d")), leave(100.0, "a"))
    assert not can_take_over(state, 2)


def test_a_free_node_leaves_at_once() -> None:
    state = after(training("a", "b", others=("c",)), leave(100.0, "c"))
    assert released(state, 100.0) == ["c"]
