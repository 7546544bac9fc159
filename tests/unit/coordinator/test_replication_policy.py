"""Replicas that a new cluster is restored from, and where stages are replicated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.apply import apply
from ravnest.coordinator.policy.replication import ReplicationPolicy, decide_replication, plan_restore
from ravnest.coordinator.state import CoordinatorState
from ravnest.protocol.control import ReplicaInfo
from tests.unit.coordinator.histories import cluster, connected, planned, state_of

NAMES = ("attic", "barn", "cellar", "den")


def trains(
    *members: str, at_s: float = 10.0, generation: int = 1, state: CoordinatorState | None = None
) -> CoordinatorState:
    if state is None:
        state = state_of([on.RunStarted(0.0, "r", None, "1"), *(connected(1.0, name) for name in NAMES)])
    apply(state, planned(at_s, cluster(generation, *members)))
    for name in members:
        apply(state, on.NodeReady(at_s, f"c{generation}", name))
    return state


def test_without_replicas_all_stages_are_missing() -> None:
    plan = plan_restore(trains("attic", "barn"), ("cellar", "den"), (7,), 20.0, {})
    assert (plan.updates, plan.stages, plan.missing_stages) == (0, ((), ()), (0, 1))


def test_a_training_stage_is_the_newest_replica() -> None:
    state = trains("attic", "barn")
    cut = state.cuts["c1"][0]
    plan = plan_restore(state, ("cellar", "den"), (cut,), 20.0, {("c1", 0): 30, ("c1", 1): 31})
    assert [[one.holder for one in stage] for stage in plan.stages] == [["attic"], ["barn"]]
    assert (plan.updates, plan.missing_stages) == (31, ())
    assert plan.description == "cellar gets its state from attic; den gets its state from barn"
    moved = plan_restore(state, ("cellar", "den"), (cut + 1,), 20.0, {("c1", 0): 30, ("c1", 1): 31})
    assert [[one.holder for one in stage] for stage in moved.stages] == [["attic", "barn"], ["barn"]]


def test_a_nodes_own_replica_is_preferred_to_a_little_newer_one() -> None:
    state = trains("attic", "barn")
    apply(state, on.ClusterEnded(100.0, "c1", "barn is gone", is_lost=True))
    apply(state, on.NodeReleased(100.0, "attic", 1, ReplicaInfo("c1", 0, 30)))
    trains("cellar", "den", at_s=101.0, generation=2, state=state)
    updates = {("c2", 0): 40, ("c2", 1): 40}
    cut = state.cuts["c1"]
    own = plan_restore(state, ("attic", "barn"), cut, 110.0, updates)
    assert [[one.holder for one in stage] for stage in own.stages] == [["attic"], ["den"]]
    old = plan_restore(state, ("attic", "barn"), cut, 130.0, updates)
    assert [[one.holder for one in stage] for stage in old.stages] == [["cellar"], ["den"]]


def test_only_the_node_that_computed_a_stage_has_its_frozen_tensors() -> None:
    state = trains("attic", "barn")
    cut = state.cuts["c1"]
    running = plan_restore(state, ("cellar", "den"), cut, 20.0, {("c1", 0): 30, ("c1", 1): 31})
    assert running.missing_frozen == ()
    apply(state, on.ReplicaRecorded(90.0, "cellar", "barn", ReplicaInfo("c1", 1, 29), 1, 0.1))
    apply(state, on.ClusterEnded(100.0, "c1", "barn is gone", is_lost=True))
    apply(state, on.NodeReleased(100.0, "attic", 1, ReplicaInfo("c1", 0, 30)))
    apply(state, on.NodeLost(100.0, "barn", "it is gone", is_voluntary=False))
    same = plan_restore(state, ("attic", "cellar"), cut, 110.0, {})
    assert (same.missing_stages, same.missing_frozen) == ((), (1,))
    moved = plan_restore(state, ("den", "cellar"), (cut[0] + 1,), 110.0, {})
    assert (moved.missing_stages, moved.missing_frozen) == ((), (0, 1))
    assert plan_restore(state, ("den",), (), 110.0, {}).missing_frozen == (0,)


def test_disconnected_nodes_are_no_sources() -> None:
    state = trains("attic", "barn")
    state.mark_disconnected("barn")
    plan = plan_restore(state, ("cellar", "den"), state.cuts["c1"], 20.0, {("c1", 0): 30, ("c1", 1): 31})
    assert plan.missing_stages == (1,)
    assert "no complete replica of stage 1" in plan.description


@given(
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=3, unique=True).map(sorted),
    held=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 1), st.integers(0, 100)), max_size=8),
)
def test_replicas_cover_stages_that_are_not_missing(cuts: list[int], held: list[tuple[str, int, int]]) -> None:
    state = trains("attic", "barn")
    apply(state, on.ClusterEnded(50.0, "c1", "a test", is_lost=True))
    for name, stage, at_s in held:
        apply(state, on.ReplicaRecorded(50.0 + at_s, name, "attic", ReplicaInfo("c1", stage, 9), 1, 0.1))
    members = NAMES[: len(cuts) + 1]
    plan = plan_restore(state, members, cuts, 200.0, {})
    bounds = [0, *cuts, 10**9]
    for stage in range(len(members)):
        ops = [op for op in range(40) if bounds[stage] <= op < bounds[stage + 1]]
        covered = all(any(one.first <= op < one.end for one in plan.stages[stage]) for op in ops)
        assert covered or stage in plan.missing_stages


def test_a_single_cluster_replicates_to_neighbours_and_two_do_not() -> None:
    state = trains("attic", "barn")
    policy = ReplicationPolicy(interval_s=30.0)
    spares = {("barn", "cellar"), ("attic", "den")}
    plan = {(one.source, one.target) for one in decide_replication(state, 20.0, policy, ())}
    assert all(target in ("cellar", "den") for _, target in plan)  # one transfer per source: spares go first
    assert plan <= {(a, b) for a in ("attic", "barn") for b in ("cellar", "den")} | spares
    alone = trains("attic", "barn", "cellar", "den")
    ring = {(one.source, one.target) for one in decide_replication(alone, 20.0, policy, ())}
    assert ring == {("attic", "barn"), ("cellar", "den")}
    two = trains("attic", "barn")
    trains("cellar", "den", at_s=11.0, generation=2, state=two)
    assert decide_replication(two, 20.0, policy, ()) == []
    assert len(decide_replication(two, 20.0, ReplicationPolicy(replicas=1), ())) == 2


def test_no_replication_to_neighbours_while_a_cluster_may_be_back_soon() -> None:
    state = trains("attic", "barn")
    trains("cellar", "den", at_s=11.0, generation=2, state=state)
    apply(state, on.ClusterEnded(100.0, "c2", "a test", is_lost=True))
    assert decide_replication(state, 109.9, ReplicationPolicy(), ()) == []
    assert {one.target for one in decide_replication(state, 110.0, ReplicationPolicy(), ())} == {"cellar", "den"}
    apply(state, on.NodeLost(111.0, "cellar", "it left", is_voluntary=True))
    apply(state, on.NodeLost(111.0, "den", "it left", is_voluntary=True))
    assert (
        len({one.target for one in decide_replication(state, 111.0, ReplicationPolicy(), ())} & {"attic", "barn"}) == 1
    )


def test_a_replica_is_refreshed_by_age_and_transfer_time() -> None:
    state = trains("attic", "barn", "cellar", "den")
    policy = ReplicationPolicy(interval_s=30.0)
    for requester, target in (("attic", "barn"), ("barn", "cellar"), ("cellar", "den"), ("den", "attic")):
        stage = state.clusters["c1"].plan.members.index(requester)
        apply(
            state,
            on.ReplicaRecorded(
                100.0, target, requester, ReplicaInfo("c1", stage, 9), 1, 5.0 if target == "barn" else 0.1
            ),
        )
    assert decide_replication(state, 129.9, policy, ()) == []
    due = {one.target for one in decide_replication(state, 130.0, policy, ())}
    assert "barn" not in due  # twenty times 5 s
    assert due
    assert "barn" in {one.target for one in decide_replication(state, 200.0, policy, ("cellar", "den"))}
