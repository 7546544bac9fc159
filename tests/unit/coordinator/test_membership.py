"""When nodes are lost, clusters end and plans are created; an executed decision is not repeated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.apply import apply
from ravnest.coordinator.events import Event
from ravnest.coordinator.policy.membership import (
    ConsiderReplan,
    CreatePlan,
    Decision,
    EndCluster,
    LoseNode,
    MembershipPolicy,
    PlanWait,
    choose_name,
    decide,
    machines_of,
    next_decision_s,
    plan_wait,
    token_rejection,
)
from ravnest.coordinator.state import CoordinatorState
from tests.unit.coordinator.histories import cluster, connected, history, numbers, planned, state_of

POLICY = MembershipPolicy(settle_s=15.0, heartbeat_s=5.0, replan_interval_s=15.0)
START = on.RunStarted(0.0, "r", None, "1")
policies = st.builds(
    MembershipPolicy,
    min_nodes=st.integers(1, 4),
    min_stages=st.integers(1, 3),
    settle_s=st.sampled_from([0.0, 3.0, 15.0]),
    heartbeat_s=st.sampled_from([1.0, 5.0, 100.0]),
    forming_timeout_s=st.sampled_from([5.0, 120.0]),
    quarantine_s=st.sampled_from([0.0, 20.0, 300.0]),
    num_spares=st.integers(0, 2),
)


def keep_alive(state: CoordinatorState, now_s: float) -> CoordinatorState:
    for name in state.nodes:
        state.mark_seen(name, now_s)
    return state


def at(state: CoordinatorState, now_s: float, **changes: Any) -> list[Decision]:
    """Decisions when all nodes have just sent a message."""
    return decide(keep_alive(state, now_s), now_s, MembershipPolicy(**{"settle_s": 15.0, **changes}))


def two(*events: Event) -> CoordinatorState:
    return state_of([START, connected(10.0, "attic"), connected(20.0, "barn"), *events])


def trained(*events: Event) -> CoordinatorState:
    ready = (on.NodeReady(41.0, "c1", "attic"), on.NodeReady(42.0, "c1", "barn"))
    return two(planned(40.0, cluster(1, "attic", "barn")), *ready, *events)


def execute(state: CoordinatorState, decision: Decision, now_s: float) -> None:
    match decision:
        case LoseNode(name=name, reason=reason):
            apply(state, on.NodeLost(now_s, name, reason, is_voluntary=False))
        case EndCluster(cluster=found, reason=reason, at_fault=at_fault):
            for name in at_fault:
                apply(state, on.NodeQuarantined(now_s, name, reason))
            apply(state, on.ClusterEnded(now_s, found, reason, is_lost=True))
        case CreatePlan(nodes=nodes):
            generation = state.generation + 1
            made = [cluster(1000 + generation, *nodes[:3], generation=generation)] if len(nodes) >= 3 else []
            apply(state, planned(now_s, *made, idle=nodes[3:] if made else nodes, generation=generation))
        case ConsiderReplan(nodes=nodes):
            apply(state, on.ReplanConsidered(now_s, nodes, (), "no change is worth it"))


@settings(deadline=None)
@given(numbers, policies, st.floats(0, 400))
def test_executed_decisions_are_not_repeated(
    moves: list[tuple[int, int]], policy: MembershipPolicy, later_s: float
) -> None:
    events = history(moves)
    state, now_s = state_of(events), events[-1].at_s + later_s
    for _ in range(4):
        decisions = decide(state, now_s, policy)
        for decision in decisions:
            execute(state, decision, now_s)
        if not decisions:
            break
    assert decide(state, now_s, policy) == []
    assert all(state.nodes[name].is_present for found in state.live_clusters() for name in found.plan.members)


@settings(deadline=None)
@given(numbers, policies, st.floats(0, 400))
def test_only_free_nodes_are_planned(moves: list[tuple[int, int]], policy: MembershipPolicy, later_s: float) -> None:
    events = history(moves)
    state, now_s = state_of(events), events[-1].at_s + later_s
    decisions = decide(state, now_s, policy)
    silent = {d.name for d in decisions if isinstance(d, LoseNode)}
    for plan in (d for d in decisions if isinstance(d, CreatePlan)):
        assert state.end_reason is None
        assert len(plan.nodes) >= policy.min_stages
        assert not set(plan.nodes) & silent
        assert not set(plan.nodes) <= state.unplaceable
        free = set(state.free_nodes(now_s, policy.quarantine_s))
        if not set(plan.nodes) <= free:  # there is no plan without nodes in quarantine
            assert len(free - silent) < max(policy.min_nodes, policy.min_stages) or state.unplaceable >= free - silent
            assert state.failed_clusters or not any(state.live_clusters())
            assert set(plan.nodes) - free <= set(state.retryable_nodes(now_s, policy.quarantine_s))
    assert all(decision.reason for decision in decisions)


@settings(deadline=None)
@given(numbers, policies, st.floats(0, 400), st.floats(0, 1, exclude_max=True), st.booleans())
def test_decisions_do_not_change_before_the_next_decision_time(
    moves: list[tuple[int, int]], policy: MembershipPolicy, later_s: float, part: float, is_alive: bool
) -> None:
    events = history(moves)
    state, now_s = state_of(events), events[-1].at_s + later_s
    if is_alive:
        keep_alive(state, now_s)
    next_s = next_decision_s(state, now_s, policy)
    assert now_s < next_s <= now_s + policy.heartbeat_s
    between_s = now_s + part * (next_s - now_s)
    if between_s < next_s:
        assert decide(state, between_s, policy) == decide(state, now_s, policy)


def test_a_node_is_lost_after_three_missed_heartbeats_and_its_cluster_ends() -> None:
    state = trained()
    state.mark_seen("attic", 100.0)
    state.mark_seen("barn", 103.0)
    assert decide(state, 114.9, POLICY) == []
    assert decide(state, 115.0, POLICY) == [
        LoseNode("attic", "no message for 3 heartbeats of 5 s"),
        EndCluster("c1", "attic is lost"),
    ]
    assert next_decision_s(state, 114.0, POLICY) == 115.0


def test_after_a_restart_the_liveness_timeout_starts_again() -> None:
    state = trained()
    assert len(decide(state, 5000.0, POLICY)) == 3
    state.reset_liveness(5000.0)
    assert decide(state, 5014.9, POLICY) == []
    assert [type(d) for d in decide(state, 5015.0, POLICY)] == [LoseNode, LoseNode, EndCluster]


def test_a_cluster_that_is_not_ready_in_time_ends_and_late_members_are_quarantined() -> None:
    state = two(planned(40.0, cluster(1, "attic", "barn")), on.NodeReady(50.0, "c1", "attic"))
    assert at(state, 159.9) == []
    assert next_decision_s(state, 159.9, POLICY) == 160.0
    assert at(state, 160.0) == [EndCluster("c1", "barn is not ready after 120 s", ("barn",))]
    execute(state, at(state, 160.0)[0], 160.0)
    assert state.free_nodes(161.0) == ()  # it has not released its stage yet
    apply(state, on.NodeReleased(161.0, "attic", 1))
    assert state.free_nodes(161.0) == ("attic",)
    assert at(state, 161.9) == []
    (plan,) = at(state, 162.0)  # there is no plan without it
    assert isinstance(plan, CreatePlan)
    assert plan.nodes == ("attic", "barn")
    apply(state, connected(150.0, "cellar"))
    (plan,) = at(state, 459.9)
    assert isinstance(plan, CreatePlan)
    assert plan.nodes == ("attic", "cellar")
    (plan,) = at(state, 460.0)
    assert isinstance(plan, CreatePlan)
    assert plan.nodes == ("attic", "barn", "cellar")


def test_a_member_that_reconnects_without_its_stage_ends_its_cluster() -> None:
    state = trained(connected(60.0, "attic", holding=1))
    assert at(state, 61.0) == []
    apply(state, connected(62.0, "attic", holding=0))
    assert at(state, 62.0) == [EndCluster("c1", "attic reconnected without a stage")]


def test_a_kicked_member_ends_its_cluster() -> None:
    assert at(trained(on.NodeKicked(60.0, "barn", "it lied")), 61.0) == [EndCluster("c1", "barn is lost")]


def test_a_plan_waits_until_no_node_connects_for_a_while() -> None:
    state = two()
    assert at(state, 34.9) == []
    assert next_decision_s(keep_alive(state, 34.0), 34.0, POLICY) == 35.0
    assert at(state, 35.0) == [CreatePlan(("attic", "barn"), "2 nodes are free, no node joined for 15 s")]
    assert at(state, 35.0, min_nodes=3) == []


def test_a_plan_waits_at_most_the_maximum_settle_time() -> None:
    state = two()
    for number in range(10):
        apply(state, connected(30.0 + 10 * number, f"n{number}"))
    assert at(state, 79.9) == []
    plan = at(state, 80.0)[0]
    assert isinstance(plan, CreatePlan)
    assert plan.reason == "12 nodes are free since 60 s"


def test_a_plan_waits_for_nodes_that_have_enrolled_with_a_limit() -> None:
    """They measure their PC before they connect."""
    state = two(on.NodeEnrolled(21.0, "den", "key", ""))
    assert plan_wait(state, 26.0, POLICY) == PlanWait(("attic", "barn"), 51.0, num_arriving=1)
    assert at(state, 50.9) == []
    assert at(state, 51.0) == [CreatePlan(("attic", "barn"), "2 nodes are free, no node joined for 15 s")]
    assert at(state, 40.0, settle_s=5.0) == [CreatePlan(("attic", "barn"), "2 nodes are free since 20 s")]
    apply(state, connected(30.0, "den"))
    assert plan_wait(state, 30.0, POLICY).num_arriving == 0
    assert at(state, 35.9) == [], "another may enrol within the settle time after den"
    assert at(state, 36.0) == [CreatePlan(("attic", "barn", "den"), "3 nodes are free, no node joined for 15 s")]


def test_the_settle_time_passes_while_a_new_node_measures_its_pc() -> None:
    state = two(on.NodeEnrolled(21.0, "den", "key", ""), connected(40.0, "den"))
    assert at(state, 40.0) == [CreatePlan(("attic", "barn", "den"), "3 nodes are free, no node joined for 15 s")]
    apply(state, connected(60.0, "den"))
    assert at(state, 74.9) == [], "it is back, and others may come back too"
    assert [type(decision) for decision in at(state, 75.0)] == [CreatePlan]


def test_a_node_that_reconnects_often_does_not_delay_a_plan() -> None:
    state = two()
    for second in range(21, 80):
        apply(state, connected(float(second), "barn"))
        assert at(state, float(second)) == []
    assert [type(d) for d in at(state, 80.0)] == [CreatePlan]


@pytest.mark.parametrize("failed", [
    on.PlanFailed(40.0, "too little memory", ("attic", "barn")), planned(40.0, idle=("attic", "barn")),
])  # fmt: skip
def test_unplaceable_nodes_are_not_planned_again_until_others_connect(failed: Event) -> None:
    state = two(failed)
    assert at(state, 1000.0) == []
    apply(state, on.NodeLost(1001.0, "barn", "x", is_voluntary=True))
    apply(state, connected(1002.0, "barn"))
    assert at(state, 1100.0) == []
    apply(state, connected(1100.0, "cellar"))
    assert at(state, 1114.9) == []
    assert at(state, 1115.0) == [CreatePlan(("attic", "barn", "cellar"), "3 nodes are free, no node joined for 15 s")]


def test_a_node_that_reconnects_with_more_resources_is_planned_again() -> None:
    state = two(on.PlanFailed(40.0, "too little memory", ("attic", "barn")), connected(50.0, "barn", gflops=99.0))
    assert [type(d) for d in at(state, 65.0)] == [CreatePlan]


def test_new_nodes_form_further_clusters_while_others_train() -> None:
    state = trained(connected(100.0, "cellar"), on.ReplanConsidered(110.0, ("cellar", "den"), (), "no"))
    assert at(state, 1000.0, min_nodes=4) == []
    apply(state, connected(1000.0, "den"))
    assert at(state, 1014.9, min_nodes=4) == []
    assert at(state, 1015.0, min_nodes=4) == [
        CreatePlan(("cellar", "den"), "2 nodes are free, no node joined for 15 s")
    ]
    assert at(state, 1015.0, min_stages=3) == []


def test_a_replan_with_an_unplaceable_node_is_considered_once() -> None:
    state = trained(connected(100.0, "cellar"))
    assert at(state, 114.9, min_stages=3) == [], "another node may be about to connect"
    assert next_decision_s(state, 114.9, POLICY) == 115.0
    assert at(state, 115.0, min_stages=3) == [ConsiderReplan(("c1",), ("cellar",), "cellar is free")]
    assert at(state, 115.0, min_stages=3, num_spares=1) == []
    apply(state, on.ReplanConsidered(116.0, ("cellar",), (), "no change is worth it"))
    assert at(state, 5000.0, min_stages=3) == []
    apply(state, on.NodeSpeedEstimated(6000.0, "barn", 0.4, "its stage shows it"))
    why = "speed estimates changed"
    assert at(state, 6000.0, min_stages=3) == [ConsiderReplan(("c1",), ("cellar",), why)]
    assert machines_of(state, ["barn"])[0].speed == pytest.approx(0.4 * state.nodes["barn"].profile.gflops)
    apply(state, on.ReplanConsidered(6001.0, ("cellar",), (), "no change is worth it"))
    assert at(state, 9000.0, min_stages=3) == [], "once is enough"
    apply(state, on.FleetSpeedEstimated(9000.0, 0.1, "their stages show it"))
    assert at(state, 9000.0, min_stages=3) == [ConsiderReplan(("c1",), ("cellar",), why)]
    assert machines_of(state, ["barn"])[0].speed == pytest.approx(0.04 * state.nodes["barn"].profile.gflops)


def test_missing_spares_lead_to_one_replan() -> None:
    state = trained(on.ReplanConsidered(100.0, (), (), "it was not worth it"), planned(110.0, generation=2))
    why = "0 of 2 spares are free"
    assert at(state, 169.9, min_stages=1, num_spares=2) == []
    assert at(state, 170.0, min_stages=1, num_spares=2) == [ConsiderReplan(("c1",), (), why)]
    assert at(state, 170.0, min_stages=2, num_spares=2) == [], "no cluster can spare a member"
    apply(state, on.ReplanConsidered(170.0, (), (), "the model would not fit"))
    assert at(state, 999.0, min_stages=1, num_spares=2) == []
    apply(state, on.ReplanConsidered(1000.0, ("cellar", "den"), (), "they were free"))
    assert at(state, 2000.0, min_stages=1, num_spares=2) == [ConsiderReplan(("c1",), (), why)], "they left"


def test_no_replan_soon_after_a_plan_or_while_a_cluster_is_to_be_replaced() -> None:
    state = trained(connected(35.0, "cellar"))
    assert at(state, 54.9, min_stages=3, replan_interval_s=15.0) == []
    assert next_decision_s(state, 54.9, POLICY) <= 55.0
    assert [type(d) for d in at(state, 55.0, min_stages=3, replan_interval_s=15.0)] == [ConsiderReplan]
    apply(state, on.ClusterEnded(56.0, "c1", "barn is gone", is_lost=True))
    assert not any(isinstance(d, ConsiderReplan) for d in at(state, 57.0, min_stages=3))


SECOND: tuple[Event, ...] = (  # a cluster besides that of attic and barn
    connected(45.0, "cellar"),
    connected(45.0, "den"),
    planned(50.0, cluster(2, "cellar", "den")),
    *(on.NodeReady(52.0, "c2", name) for name in ("cellar", "den")),
)


def lost(at_s: float, found: str, name: str) -> tuple[Event, Event]:
    return on.NodeLost(at_s, name, "its plug was pulled", is_voluntary=False), on.ClusterEnded(
        at_s, found, "", is_lost=True
    )


def test_survivors_are_replanned_with_others_if_no_node_reconnects() -> None:
    state = trained(*SECOND, *lost(500.0, "c2", "den"))
    assert at(state, 559.9) == []
    assert at(state, 560.0) == [ConsiderReplan(("c1",), ("cellar",), "cellar is free")]
    apply(state, connected(530.0, "den"))
    assert at(state, 560.0) == [CreatePlan(("cellar", "den"), "cluster c2 failed")]
    apply(state, planned(561.0, cluster(3, "cellar", "den", generation=3), generation=3))
    assert state.failed_clusters == [], "no member of it is left"


def test_when_all_clusters_fail_at_once_a_plan_waits_for_reconnects() -> None:
    state = trained(*SECOND, *lost(500.0, "c1", "barn"), *lost(500.0, "c2", "den"))
    for name in ("attic", "cellar"):
        apply(state, on.NodeReleased(500.5, name, 1))
    apply(state, connected(501.0, "barn"))
    assert at(state, 503.9) == []
    apply(state, connected(503.0, "den"))
    assert at(state, 505.9) == []
    assert at(state, 506.0) == [CreatePlan(("attic", "barn", "cellar", "den"), "cluster c1 and c2 failed")]
    for at_s in range(504, 513):
        apply(state, connected(float(at_s), "barn"))
    assert len(at(state, 512.0)) == 1, "with a limit"


def test_survivors_of_a_cluster_are_planned_at_once() -> None:
    state = state_of([START, *(connected(1.0, name) for name in ("attic", "barn", "cellar"))])
    apply(state, planned(40.0, cluster(1, "attic", "barn", "cellar")))
    for name in ("attic", "barn", "cellar"):
        apply(state, on.NodeReady(50.0, "c1", name))
    apply(state, on.NodeLost(100.0, "barn", "it left", is_voluntary=True))
    assert at(state, 100.0, min_nodes=3) == [EndCluster("c1", "barn is lost")]
    apply(state, on.ClusterEnded(100.0, "c1", "barn is gone", is_lost=True))
    assert at(state, 100.0, min_nodes=3) == []
    assert next_decision_s(state, 100.0, POLICY) <= 110.0
    apply(state, on.NodeReleased(100.5, "attic", 1))
    assert at(state, 101.0, min_nodes=3) == []
    apply(state, on.NodeReleased(101.0, "cellar", 1))
    assert at(state, 101.0, min_nodes=3) == [CreatePlan(("attic", "cellar"), "cluster c1 failed")]


def test_a_plan_waits_for_members_that_store_their_state_with_a_limit() -> None:
    state = state_of([START, *(connected(1.0, name) for name in ("attic", "barn", "cellar"))])
    apply(state, planned(40.0, cluster(1, "attic", "barn", "cellar")))
    for name in ("attic", "barn", "cellar"):
        apply(state, on.NodeReady(50.0, "c1", name))
    state.mark_disconnected("barn")  # killed: a plan does not wait for it
    apply(state, on.ClusterEnded(100.0, "c1", "the link to barn broke", is_lost=True))
    apply(state, on.NodeReleased(100.5, "attic", 1))
    assert [d for d in decide(state, 109.9, MembershipPolicy(heartbeat_s=60.0)) if isinstance(d, CreatePlan)] == []
    plans = [d for d in decide(state, 110.0, MembershipPolicy(heartbeat_s=60.0)) if isinstance(d, CreatePlan)]
    assert plans == [CreatePlan(("attic", "cellar"), "cluster c1 failed")]


def failed(at_s: float, name: str, number: int = 1, *, may_retry: bool = True) -> tuple[Event, ...]:
    """The stage of a node fails, and all members of its cluster are free."""
    ended = on.ClusterEnded(at_s, f"c{number}", f"{name} failed", is_lost=True)
    free = (on.NodeReleased(at_s, member, number) for member in ("attic", "barn"))
    return on.NodeQuarantined(at_s, name, "its worker was killed", may_retry), ended, *free


def plans(state: CoordinatorState, now_s: float) -> list[tuple[str, ...]]:
    return [decision.nodes for decision in at(state, now_s) if isinstance(decision, CreatePlan)]


def test_a_quarantined_node_is_planned_if_there_is_no_plan_without_it() -> None:
    state = trained(*failed(100.0, "barn"))
    assert plans(state, 101.9) == []
    assert plans(state, 102.0) == [("attic", "barn")]
    assert 100.0 < next_decision_s(state, 100.0, MembershipPolicy()) <= 102.0
    untrusted = trained(*failed(100.0, "barn", may_retry=False))
    assert plans(untrusted, 399.0) == []
    assert plans(untrusted, 400.0) == [("attic", "barn")]


def test_a_quarantined_node_is_not_planned_while_others_can_do_without_it() -> None:
    state = trained(*failed(100.0, "barn"), connected(100.0, "cellar"))
    assert plans(state, 110.0) == [("attic", "cellar")]
    apply(state, planned(111.0, cluster(2, "attic", "cellar", generation=2), generation=2))
    assert plans(state, 150.0) == []


def test_a_quarantined_node_is_planned_if_the_model_does_not_fit_without_it() -> None:
    state = trained(*failed(100.0, "barn"), connected(90.0, "cellar"))
    apply(state, on.PlanFailed(101.0, "4 GB are missing", ("attic", "cellar")))
    assert plans(state, 101.5) == []
    assert plans(state, 102.0) == [("attic", "barn", "cellar")]


def test_a_node_that_fails_again_and_again_waits_longer_each_time_and_then_for_the_whole_quarantine() -> None:
    state, now_s, waits = trained(*failed(100.0, "barn")), 100.0, list[float]()
    for number in range(2, 9):
        times_s = (now_s + wait_s for wait_s in (1.9, 2, 3.9, 4, 7.9, 8, 15.9, 16, 31.9, 32, 299.9, 300))
        planned_s = next(time_s for time_s in times_s if plans(state, time_s))
        waits.append(planned_s - now_s)
        now_s = planned_s + 1
        apply(state, planned(planned_s, cluster(number, "attic", "barn", generation=number), generation=number))
        for event in failed(now_s, "barn", number):
            apply(state, event)
    assert waits == [2, 4, 8, 16, 32, 300, 2]


def test_nothing_is_planned_without_a_run() -> None:
    nodes = [connected(1.0, "attic"), connected(1.0, "barn")]
    assert at(state_of(nodes), 100.0) == []
    assert at(state_of([START, *nodes, on.RunEnded(50.0, "enough")]), 100.0) == []


@pytest.mark.parametrize("wrong", [
    {"min_nodes": 0}, {"min_stages": 0}, {"settle_s": -1.0}, {"max_settle_factor": 0.5}, {"heartbeat_s": 0.0},
    {"forming_timeout_s": 0.0}, {"quarantine_s": float("inf")}, {"settle_s": float("nan")},
])  # fmt: skip
def test_invalid_policies_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        MembershipPolicy(**wrong)


def test_a_key_keeps_its_name_and_a_taken_name_gets_a_number() -> None:
    state = CoordinatorState()
    assert choose_name(state, "attic", "key 1") == "attic"
    apply(state, on.NodeEnrolled(1.0, "attic", "key 1", ""))
    assert choose_name(state, "elsewhere", "key 1") == "attic"
    assert choose_name(state, "attic", "key 2") == "attic-2"
    apply(state, on.NodeEnrolled(1.0, "attic-2", "key 2", ""))
    apply(state, on.NodeKicked(2.0, "attic-2", "it lied"))
    assert choose_name(state, "attic", "key 3") == "attic-3"
    long = "x" * 63
    apply(state, on.NodeEnrolled(1.0, long, "key 4", ""))
    assert choose_name(state, long, "key 5") == "x" * 61 + "-2"
    with pytest.raises(ValueError, match="not a valid name"):
        choose_name(state, "../etc", "key 6")


def test_a_token_is_rejected_with_a_reason() -> None:
    state = state_of([on.TokenIssued(0.0, "good", 100.0, 2), on.TokenIssued(0.0, "old", 10.0, None)])
    assert token_rejection(state, "good", 50.0) is None
    for wrong in ("", "goo", "Good", "gööd", "\ud800"):
        assert "unknown token" in (token_rejection(state, wrong, 50.0) or "")
    assert "expired" in (token_rejection(state, "old", 10.0) or "")
    for name in ("attic", "barn"):
        apply(state, on.NodeEnrolled(1.0, name, name, "good"))
    assert "used up" in (token_rejection(state, "good", 50.0) or "")
    assert token_rejection(state, "good", 50.0, check_uses=False) is None
    assert "expired" in (token_rejection(state, "good", 100.0, check_uses=False) or "")


def test_only_members_are_accepted() -> None:
    state = state_of([on.NodeEnrolled(1.0, "attic", "key", ""), on.NodeEnrolled(1.0, "barn", "key 2", "")])
    apply(state, on.NodeKicked(2.0, "barn", "it lied"))
    assert state.rejection_reason("attic") is None
    assert state.rejection_reason("barn") == "barn was removed by the requester: it lied"
    assert "not a member" in (state.rejection_reason("cellar") or "")


def test_nodes_with_one_address_form_a_site() -> None:
    hosts = {"attic": "203.0.113.5", "barn": "203.0.113.5", "cellar": "203.0.113.6", "den": "2001:db8::1:2",
             "eaves": "2001:db8::9", "foyer": ""}  # fmt: skip
    state = state_of([connected(1.0, name, host=host, gflops=7.0) for name, host in hosts.items()])
    site = {machine.name: machine.site for machine in machines_of(state, hosts)}
    assert site["attic"] == site["barn"] != site["cellar"] != ""
    assert site["den"] == site["eaves"]
    assert site["foyer"] == ""
    assert [machine.name for machine in machines_of(state, ("barn", "attic"))] == ["barn", "attic"]
    assert machines_of(state, ("attic",))[0].speed == 7.0
