"""Decisions: when nodes are lost, clusters ended and plans made, and that carrying one out settles it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.decide import (
    Decision,
    EndCluster,
    LoseNode,
    MakePlan,
    Reconsider,
    Wishes,
    choose_name,
    decide,
    judge_token,
    machines_of,
    next_look_s,
)
from ravnest.coordinator.events import Event
from ravnest.coordinator.state import State, apply
from tests.coordinator.histories import cluster, connected, history, numbers, planned, state_of

WISHES = Wishes(beat_s=5.0, rest_s=15.0)
BEGIN = on.RunBegun(0.0, "r", None, "1")
wishes = st.builds(
    Wishes,
    min_nodes=st.integers(1, 4),
    min_stages=st.integers(1, 3),
    wait_s=st.sampled_from([0.0, 3.0, 15.0]),
    beat_s=st.sampled_from([1.0, 5.0, 100.0]),
    forming_s=st.sampled_from([5.0, 120.0]),
    blame_s=st.sampled_from([0.0, 20.0, 300.0]),
    num_spares=st.integers(0, 2),
)


def keep_alive(state: State, now_s: float) -> State:
    for name in state.nodes:
        state.heard(name, now_s)
    return state


def at(state: State, now_s: float, **changes: Any) -> list[Decision]:
    """What is decided if everybody was heard just now."""
    return decide(keep_alive(state, now_s), now_s, Wishes(**changes))


def two(*events: Event) -> State:
    return state_of([BEGIN, connected(10.0, "attic"), connected(20.0, "barn"), *events])


def trained(*events: Event) -> State:
    ready = (on.NodeReady(41.0, "c1", "attic"), on.NodeReady(42.0, "c1", "barn"))
    return two(planned(40.0, cluster(1, "attic", "barn")), *ready, *events)


def carry_out(state: State, decision: Decision, now_s: float) -> None:
    match decision:
        case LoseNode(name=name, reason=reason):
            apply(state, on.NodeGone(now_s, name, reason, polite=False))
        case EndCluster(cluster=found, reason=reason, blamed=blamed):
            for name in blamed:
                apply(state, on.NodeBlamed(now_s, name, reason))
            apply(state, on.ClusterEnded(now_s, found, reason, is_lost=True))
        case MakePlan(nodes=nodes):
            generation = state.generation + 1
            made = [cluster(1000 + generation, *nodes[:3], generation=generation)] if len(nodes) >= 3 else []
            apply(state, planned(now_s, *made, idle=nodes[3:] if made else nodes, generation=generation))
        case Reconsider(nodes=nodes):
            apply(state, on.Considered(now_s, nodes, (), "no change is worth it"))


@settings(deadline=None)
@given(numbers, wishes, st.floats(0, 400))
def test_decisions_that_are_carried_out_are_not_made_again(
    moves: list[tuple[int, int]], wished: Wishes, later_s: float
) -> None:
    events = history(moves)
    state, now_s = state_of(events), events[-1].at_s + later_s
    for _ in range(4):
        decisions = decide(state, now_s, wished)
        for decision in decisions:
            carry_out(state, decision, now_s)
        if not decisions:
            break
    assert decide(state, now_s, wished) == []
    assert all(state.nodes[name].is_present for found in state.live_clusters() for name in found.plan.members)


@settings(deadline=None)
@given(numbers, wishes, st.floats(0, 400))
def test_a_plan_is_asked_for_nodes_that_can_be_had(
    moves: list[tuple[int, int]], wished: Wishes, later_s: float
) -> None:
    events = history(moves)
    state, now_s = state_of(events), events[-1].at_s + later_s
    decisions = decide(state, now_s, wished)
    silent = {d.name for d in decisions if isinstance(d, LoseNode)}
    for plan in (d for d in decisions if isinstance(d, MakePlan)):
        assert state.ended is None
        assert len(plan.nodes) >= wished.min_stages
        assert not set(plan.nodes) & silent
        assert not set(plan.nodes) <= state.hopeless
        assert set(plan.nodes) <= set(state.free_nodes(now_s, wished.blame_s))
    assert all(decision.reason for decision in decisions)


@settings(deadline=None)
@given(numbers, wishes, st.floats(0, 400), st.floats(0, 1, exclude_max=True), st.booleans())
def test_nothing_changes_before_the_next_look(
    moves: list[tuple[int, int]], wished: Wishes, later_s: float, part: float, is_heard: bool
) -> None:
    events = history(moves)
    state, now_s = state_of(events), events[-1].at_s + later_s
    if is_heard:
        keep_alive(state, now_s)
    look_s = next_look_s(state, now_s, wished)
    assert now_s < look_s <= now_s + wished.beat_s
    between_s = now_s + part * (look_s - now_s)
    if between_s < look_s:
        assert decide(state, between_s, wished) == decide(state, now_s, wished)


def test_who_is_not_heard_for_three_beats_is_lost_and_its_cluster_ends() -> None:
    state = trained()
    state.heard("attic", 100.0)
    state.heard("barn", 103.0)
    assert decide(state, 114.9, WISHES) == []
    assert decide(state, 115.0, WISHES) == [
        LoseNode("attic", "it was not heard for 3 beats of 5 s"),
        EndCluster("c1", "attic is gone"),
    ]
    assert next_look_s(state, 114.0, WISHES) == 115.0


def test_after_a_restart_everybody_has_time_to_be_heard() -> None:
    state = trained()
    assert len(decide(state, 5000.0, WISHES)) == 3
    state.wake(5000.0)
    assert decide(state, 5014.9, WISHES) == []
    assert [type(d) for d in decide(state, 5015.0, WISHES)] == [LoseNode, LoseNode, EndCluster]


def test_a_cluster_that_does_not_get_ready_ends_and_the_late_are_blamed() -> None:
    state = two(planned(40.0, cluster(1, "attic", "barn")), on.NodeReady(50.0, "c1", "attic"))
    assert at(state, 159.9) == []
    assert next_look_s(state, 159.9, WISHES) == 160.0
    assert at(state, 160.0) == [EndCluster("c1", "barn is not ready after 120 s", ("barn",))]
    carry_out(state, at(state, 160.0)[0], 160.0)
    assert state.free_nodes(161.0) == ()  # it has not let go of its stage yet
    apply(state, on.NodeLetGo(161.0, "attic", 1))
    assert state.free_nodes(161.0) == ("attic",)
    assert at(state, 459.9) == []
    assert next_look_s(state, 459.9, WISHES) == 460.0
    assert at(state, 460.0)[0] == MakePlan(("attic", "barn"), "cluster c1 broke")


def test_a_member_that_came_back_without_its_stage_ends_its_cluster() -> None:
    state = trained(connected(60.0, "attic", holding=1))
    assert at(state, 61.0) == []
    apply(state, connected(62.0, "attic", holding=0))
    assert at(state, 62.0) == [EndCluster("c1", "attic came back without a stage")]


def test_a_kicked_member_ends_its_cluster() -> None:
    assert at(trained(on.NodeKicked(60.0, "barn", "it lied")), 61.0) == [EndCluster("c1", "barn is gone")]


def test_a_plan_waits_until_nobody_came_for_a_while() -> None:
    state = two()
    assert at(state, 34.9) == []
    assert next_look_s(keep_alive(state, 34.0), 34.0, WISHES) == 35.0
    assert at(state, 35.0) == [MakePlan(("attic", "barn"), "2 nodes are free, and nobody came for 15 s")]
    assert at(state, 35.0, min_nodes=3) == []


def test_a_plan_waits_no_longer_than_a_few_times_that() -> None:
    state = two()
    for number in range(10):
        apply(state, connected(30.0 + 10 * number, f"n{number}"))
    assert at(state, 79.9) == []
    plan = at(state, 80.0)[0]
    assert isinstance(plan, MakePlan)
    assert plan.reason == "12 nodes are free, and have waited for 60 s"


def test_a_node_that_connects_again_and_again_keeps_nobody_waiting() -> None:
    state = two()
    for second in range(21, 80):
        apply(state, connected(float(second), "barn"))
        assert at(state, float(second)) == []
    assert [type(d) for d in at(state, 80.0)] == [MakePlan]


@pytest.mark.parametrize("failed", [
    on.PlanFailed(40.0, "too little memory", ("attic", "barn")), planned(40.0, idle=("attic", "barn")),
])  # fmt: skip
def test_nodes_of_which_nothing_could_be_made_are_not_planned_again_until_others_come(failed: Event) -> None:
    state = two(failed)
    assert at(state, 1000.0) == []
    apply(state, on.NodeGone(1001.0, "barn", "x", polite=True))
    apply(state, connected(1002.0, "barn"))
    assert at(state, 1100.0) == []
    apply(state, connected(1100.0, "cellar"))
    assert at(state, 1114.9) == []
    assert at(state, 1115.0) == [MakePlan(("attic", "barn", "cellar"), "3 nodes are free, and nobody came for 15 s")]


def test_a_node_that_comes_back_with_more_to_lend_is_planned_again() -> None:
    state = two(on.PlanFailed(40.0, "too little memory", ("attic", "barn")), connected(50.0, "barn", gflops=99.0))
    assert [type(d) for d in at(state, 65.0)] == [MakePlan]


def test_newcomers_make_further_clusters_while_others_train() -> None:
    state = trained(connected(100.0, "cellar"), on.Considered(110.0, ("cellar", "den"), (), "no"))
    assert at(state, 1000.0, min_nodes=4) == []
    apply(state, connected(1000.0, "den"))
    assert at(state, 1014.9, min_nodes=4) == []
    assert at(state, 1015.0, min_nodes=4) == [MakePlan(("cellar", "den"), "2 nodes are free, and nobody came for 15 s")]
    assert at(state, 1015.0, min_stages=3) == []


def test_a_node_without_a_place_is_looked_at_together_with_running_clusters() -> None:
    state = trained(connected(100.0, "cellar"))
    assert at(state, 114.9, min_stages=3) == [], "another may be about to come"
    assert next_look_s(state, 114.9, WISHES) == 115.0
    assert at(state, 115.0, min_stages=3) == [Reconsider(("c1",), ("cellar",), "cellar is free")]
    assert at(state, 115.0, min_stages=3, num_spares=1) == []
    apply(state, on.Considered(116.0, ("cellar",), (), "no change is worth it"))
    assert at(state, 5000.0, min_stages=3) == []
    apply(state, on.NodeSlowed(6000.0, "barn", 0.4, "its stage shows it"))
    why = "nodes are faster or slower than they were taken to be"
    assert at(state, 6000.0, min_stages=3) == [Reconsider(("c1",), ("cellar",), why)]
    assert machines_of(state, ["barn"])[0].speed == pytest.approx(0.4 * state.nodes["barn"].profile.gflops)
    apply(state, on.Considered(6001.0, ("cellar",), (), "no change is worth it"))
    assert at(state, 9000.0, min_stages=3) == [], "once is enough"
    apply(state, on.FleetPaced(9000.0, 0.1, "their stages show it"))
    assert at(state, 9000.0, min_stages=3) == [Reconsider(("c1",), ("cellar",), why)]
    assert machines_of(state, ["barn"])[0].speed == pytest.approx(0.04 * state.nodes["barn"].profile.gflops)


def test_who_lacks_the_spares_that_were_asked_for_looks_for_some_once() -> None:
    state = trained(on.Considered(100.0, (), (), "it was not worth it"), planned(110.0, generation=2))
    why = "2 spares are asked for, and 0 there"
    assert at(state, 169.9, min_stages=1, num_spares=2) == []
    assert at(state, 170.0, min_stages=1, num_spares=2) == [Reconsider(("c1",), (), why)]
    assert at(state, 170.0, min_stages=2, num_spares=2) == [], "no cluster can do without a member"
    apply(state, on.Considered(170.0, (), (), "the model would not fit"))
    assert at(state, 999.0, min_stages=1, num_spares=2) == []
    apply(state, on.Considered(1000.0, ("cellar", "den"), (), "they had come"))
    assert at(state, 2000.0, min_stages=1, num_spares=2) == [Reconsider(("c1",), (), why)], "they have left"


def test_nothing_is_reconsidered_soon_after_a_plan_or_while_a_cluster_is_broken() -> None:
    state = trained(connected(35.0, "cellar"))
    assert at(state, 54.9, min_stages=3, rest_s=15.0) == []
    assert next_look_s(state, 54.9, WISHES) <= 55.0
    assert [type(d) for d in at(state, 55.0, min_stages=3, rest_s=15.0)] == [Reconsider]
    apply(state, on.ClusterEnded(56.0, "c1", "barn is gone", is_lost=True))
    assert not any(isinstance(d, Reconsider) for d in at(state, 57.0, min_stages=3))


SECOND: tuple[Event, ...] = (  # a cluster besides that of attic and barn
    connected(45.0, "cellar"),
    connected(45.0, "den"),
    planned(50.0, cluster(2, "cellar", "den")),
    *(on.NodeReady(52.0, "c2", name) for name in ("cellar", "den")),
)


def lost(at_s: float, found: str, name: str) -> tuple[Event, Event]:
    return on.NodeGone(at_s, name, "its plug was pulled", polite=False), on.ClusterEnded(at_s, found, "", is_lost=True)


def test_who_is_left_of_a_cluster_is_looked_at_with_the_others_when_nobody_has_come_back() -> None:
    state = trained(*SECOND, *lost(500.0, "c2", "den"))
    assert at(state, 559.9) == []
    assert at(state, 560.0) == [Reconsider(("c1",), ("cellar",), "cellar is free")]
    apply(state, connected(530.0, "den"))
    assert at(state, 560.0) == [MakePlan(("cellar", "den"), "cluster c2 broke")]
    apply(state, planned(561.0, cluster(3, "cellar", "den", generation=3), generation=3))
    assert state.broken == [], "whatever the plan says of it: nobody is left to mend"


def test_when_all_clusters_broke_at_once_all_are_waited_for_a_moment() -> None:
    state = trained(*SECOND, *lost(500.0, "c1", "barn"), *lost(500.0, "c2", "den"))
    for name in ("attic", "cellar"):
        apply(state, on.NodeLetGo(500.5, name, 1))
    apply(state, connected(501.0, "barn"))
    assert at(state, 503.9) == []
    apply(state, connected(503.0, "den"))
    assert at(state, 505.9) == []
    assert at(state, 506.0) == [MakePlan(("attic", "barn", "cellar", "den"), "cluster c1 and c2 broke")]
    for at_s in range(504, 513):
        apply(state, connected(float(at_s), "barn"))
    assert len(at(state, 512.0)) == 1, "not for ever"


def test_survivors_of_a_cluster_are_planned_at_once() -> None:
    state = state_of([BEGIN, *(connected(1.0, name) for name in ("attic", "barn", "cellar"))])
    apply(state, planned(40.0, cluster(1, "attic", "barn", "cellar")))
    for name in ("attic", "barn", "cellar"):
        apply(state, on.NodeReady(50.0, "c1", name))
    apply(state, on.NodeGone(100.0, "barn", "it left", polite=True))
    assert at(state, 100.0, min_nodes=3) == [EndCluster("c1", "barn is gone")]
    apply(state, on.ClusterEnded(100.0, "c1", "barn is gone", is_lost=True))
    assert at(state, 100.0, min_nodes=3) == []
    assert next_look_s(state, 100.0, WISHES) <= 110.0
    apply(state, on.NodeLetGo(100.5, "attic", 1))
    assert at(state, 101.0, min_nodes=3) == []
    apply(state, on.NodeLetGo(101.0, "cellar", 1))
    assert at(state, 101.0, min_nodes=3) == [MakePlan(("attic", "cellar"), "cluster c1 broke")]


def test_who_does_not_let_go_of_its_stage_is_waited_for_but_not_long() -> None:
    state = state_of([BEGIN, *(connected(1.0, name) for name in ("attic", "barn", "cellar"))])
    apply(state, planned(40.0, cluster(1, "attic", "barn", "cellar")))
    for name in ("attic", "barn", "cellar"):
        apply(state, on.NodeReady(50.0, "c1", name))
    state.broke_off("barn")  # it is killed: nobody waits for it
    apply(state, on.ClusterEnded(100.0, "c1", "the link to barn broke", is_lost=True))
    apply(state, on.NodeLetGo(100.5, "attic", 1))
    assert [d for d in decide(state, 109.9, Wishes(beat_s=60.0)) if isinstance(d, MakePlan)] == []
    plans = [d for d in decide(state, 110.0, Wishes(beat_s=60.0)) if isinstance(d, MakePlan)]
    assert plans == [MakePlan(("attic", "cellar"), "cluster c1 broke")]


def test_nothing_is_planned_without_a_run() -> None:
    nodes = [connected(1.0, "attic"), connected(1.0, "barn")]
    assert at(state_of(nodes), 100.0) == []
    assert at(state_of([BEGIN, *nodes, on.RunEnded(50.0, "enough")]), 100.0) == []


@pytest.mark.parametrize("wrong", [
    {"min_nodes": 0}, {"min_stages": 0}, {"wait_s": -1.0}, {"max_wait": 0.5}, {"beat_s": 0.0}, {"forming_s": 0.0},
    {"blame_s": float("inf")}, {"wait_s": float("nan")},
])  # fmt: skip
def test_wishes_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|at least|has"):
        Wishes(**wrong)


def test_a_key_keeps_its_name_and_a_taken_name_gets_a_number() -> None:
    state = State()
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


def test_a_token_is_refused_with_a_reason() -> None:
    state = state_of([on.TokenIssued(0.0, "good", 100.0, 2), on.TokenIssued(0.0, "old", 10.0, None)])
    assert judge_token(state, "good", 50.0) is None
    for wrong in ("", "goo", "Good", "gööd", "\ud800"):
        assert "not known" in (judge_token(state, wrong, 50.0) or "")
    assert "expired" in (judge_token(state, "old", 10.0) or "")
    for name in ("attic", "barn"):
        apply(state, on.NodeEnrolled(1.0, name, name, "good"))
    assert "used up" in (judge_token(state, "good", 50.0) or "")
    assert judge_token(state, "good", 50.0, counts=False) is None
    assert "expired" in (judge_token(state, "good", 100.0, counts=False) or "")


def test_who_may_come_in() -> None:
    state = state_of([on.NodeEnrolled(1.0, "attic", "key", ""), on.NodeEnrolled(1.0, "barn", "key 2", "")])
    apply(state, on.NodeKicked(2.0, "barn", "it lied"))
    assert state.why_not_member("attic") is None
    assert state.why_not_member("barn") == "barn was sent away for good: it lied"
    assert "not known" in (state.why_not_member("cellar") or "")


def test_nodes_behind_one_address_are_a_site() -> None:
    hosts = {"attic": "203.0.113.5", "barn": "203.0.113.5", "cellar": "203.0.113.6", "den": "2001:db8::1:2",
             "eaves": "2001:db8::9", "foyer": ""}  # fmt: skip
    state = state_of([connected(1.0, name, host=host, gflops=7.0) for name, host in hosts.items()])
    site = {machine.name: machine.site for machine in machines_of(state, hosts)}
    assert site["attic"] == site["barn"] != site["cellar"] != ""
    assert site["den"] == site["eaves"]
    assert site["foyer"] == ""
    assert [machine.name for machine in machines_of(state, ("barn", "attic"))] == ["barn", "attic"]
    assert machines_of(state, ("attic",))[0].speed == 7.0
