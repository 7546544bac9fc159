"""What a run waits for, in every situation without a training cluster."""

from __future__ import annotations

from ravnest.coordinator import events as on
from ravnest.coordinator.events import Event
from ravnest.coordinator.policy.membership import MembershipPolicy
from ravnest.coordinator.policy.waiting import waiting_for
from tests.unit.coordinator.histories import cluster, connected, planned, state_of

POLICY = MembershipPolicy(min_nodes=2, settle_s=10.0)
START = [on.RunStarted(100.0, "r", 5, "1.2")]
TWO: list[Event] = [*START, connected(101.0, "attic"), connected(101.0, "barn")]
FORMING: list[Event] = [*TWO, planned(102.0, cluster(1, "barn", "attic"))]
TRAINING: list[Event] = [*FORMING, on.NodeReady(103.0, "c1", "attic"), on.NodeReady(104.0, "c1", "barn")]


def waiting(events: list[Event], now_s: float = 105.0) -> str:
    return waiting_for(state_of(events), now_s, POLICY)


def test_it_is_said_until_a_cluster_trains() -> None:
    assert waiting([]) == "", "no run"
    assert waiting([*START]) == "waiting for 2 more nodes, 0 connected"
    assert waiting(TWO[:2]) == "waiting for 1 more node, 1 connected"
    assert waiting(TWO) == "2 connected; training begins within 6 s"
    assert waiting(TWO, 200.0) == "2 connected; the plan is being computed"
    assert waiting(FORMING) == "cluster c1 is forming, 0 of 2 stages are ready"
    assert waiting(TRAINING[:-1]) == "cluster c1 is forming, 1 of 2 stages are ready"
    assert waiting(TRAINING) == ""
    assert waiting([*TRAINING, on.RunEnded(105.0, "all batches are trained")]) == ""


def test_a_lost_cluster_waits_for_a_node() -> None:
    lost: list[Event] = [
        *TRAINING, on.NodeLost(105.0, "barn", "no message", False), on.ClusterEnded(105.0, "c1", "barn is lost", True),
    ]  # fmt: skip
    assert waiting(lost, 110.0) == "waiting for 1 more node, 1 connected"
    leaving: list[Event] = [*TWO, on.NodeLeaving(102.0, "barn", "its owner ended it")]
    assert waiting(leaving) == "waiting for 1 more node, 2 connected", "one of which leaves"
    ended: list[Event] = [*TRAINING, on.ClusterEnded(105.0, "c1", "a link failed", True)]
    assert waiting(ended, 110.0).startswith("waiting for attic, barn: "), "they have not released their stages yet"
