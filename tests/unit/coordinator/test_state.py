"""The state is determined by the events, with or without a snapshot in between."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.apply import apply, restore, snapshot
from ravnest.coordinator.events import Event
from ravnest.coordinator.state import CoordinatorState
from ravnest.protocol.control import ReplicaInfo
from tests.unit.coordinator.histories import NAMES, cluster, connected, history, numbers, planned, state_of


@settings(deadline=None)
@given(numbers, st.integers(0, 200))
def test_a_snapshot_and_the_rest_give_the_same_state(moves: list[tuple[int, int]], place: int) -> None:
    events = history(moves)
    place = min(place, len(events))
    restored = restore(snapshot(state_of(events[:place])))
    for event in events[place:]:
        apply(restored, event)
    assert restored == state_of(events)


@settings(deadline=None)
@given(numbers)
def test_events_survive_encoding(moves: list[tuple[int, int]]) -> None:
    decoder = msgspec.msgpack.Decoder(Event)
    for event in history(moves):
        assert decoder.decode(msgspec.msgpack.encode(event)) == event


@settings(deadline=None)
@given(numbers)
def test_nodes_and_clusters_always_agree(moves: list[tuple[int, int]]) -> None:
    state = CoordinatorState()
    for event in history(moves):
        apply(state, event)
        members = [name for found in state.live_clusters() for name in found.plan.members]
        assert len(members) == len(set(members)), "a node is in two clusters"
        assert {name for name, node in state.nodes.items() if node.cluster is not None} == set(members)
        for found in state.clusters.values():
            counts = state.leases.counts_of(found.plan.id)
            assert counts.is_balanced
            assert found.is_live or counts.outstanding == 0
            assert (found.training_since_s is not None) or found.phase != "training"
        assert state.leases.counts.is_balanced
        assert not set(state.free_nodes(event.at_s)) & set(members)


@settings(deadline=None)
@given(numbers, st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["attic", "unknown"]), st.integers(0, 3))))
def test_events_of_unknown_nodes_and_clusters_change_nothing(
    moves: list[tuple[int, int]], strange: list[tuple[int, str, int]]
) -> None:
    state = state_of(history(moves))
    for kind, name, number in strange:
        events: tuple[Event, ...] = (
            on.NodeLost(1.0, name, "x", is_voluntary=False),
            on.NodeReady(1.0, f"c{number}", name),
            on.LinkEstablished(1.0, f"c{number}", name, "unknown", "direct", "", ""),
            on.ClusterEnded(1.0, f"c{number}", "x", is_lost=True),
            on.LeaseSettled(1.0, f"c{number}", 1000),
            on.LeaseReturned(1.0, f"c{number}", 1000, "x"),
            on.NodeKicked(1.0, name, "x"),
        )
        apply(state, events[kind])
    assert "unknown" not in state.nodes
    assert state.leases.counts.is_balanced


def test_a_cluster_forms_trains_and_is_lost() -> None:
    state = state_of([on.RunStarted(0.0, "r", 5, "1"), connected(1.0, "attic"), connected(2.0, "barn")])
    apply(state, planned(3.0, cluster(1, "barn", "attic")))
    assert state.free_nodes(3.0) == ()
    apply(state, on.NodeReady(4.0, "c1", "attic"))
    assert not state.is_training("c1")
    apply(state, on.NodeReady(5.0, "c1", "barn"))
    assert state.is_training("c1")
    apply(state, on.LeaseGranted(6.0, "c1", 0))
    apply(state, on.NodeLost(7.0, "barn", "its connection failed", is_voluntary=False))
    apply(state, on.ClusterEnded(7.0, "c1", "barn is gone", is_lost=True))
    assert state.clusters["c1"].phase == "lost"
    assert state.leases.waiting == [0]
    assert state.free_nodes(7.0) == ()
    apply(state, on.NodeReleased(7.5, "attic", 1, ReplicaInfo("c1", 1, 3)))
    assert state.free_nodes(7.5) == ("attic",)
    assert [held.replica for held in state.nodes["attic"].replicas] == [ReplicaInfo("c1", 1, 3)]
    assert state.idle_reason("attic") == "cluster c1 ended: barn is gone"
    assert state.counters.lost == state.counters.clusters_lost == 1


def test_a_member_that_reconnects_without_its_assignment_is_not_ready() -> None:
    state = state_of([connected(1.0, "attic"), connected(1.0, "barn"), planned(2.0, cluster(7, "attic", "barn"))])
    apply(state, on.NodeReady(3.0, "c7", "attic"))
    apply(state, connected(4.0, "attic", holding=1))
    assert state.clusters["c7"].ready == {"attic"}
    apply(state, connected(5.0, "attic", holding=0))
    assert state.clusters["c7"].ready == set()
    assert state.clusters["c7"].not_ready == ("attic", "barn")


def test_a_new_run_keeps_members_and_tokens_and_never_uses_a_generation_twice() -> None:
    events: list[Event] = [
        on.RunStarted(0.0, "old", 5, "1"), on.TokenIssued(0.0, "secret", 99.0, 2),
        on.NodeEnrolled(0.0, "attic", "key", "secret"), connected(1.0, "attic"), connected(1.0, "barn"),
        planned(2.0, cluster(1, "attic", "barn"), generation=3), on.LeaseGranted(3.0, "c1", 0),
        on.NodeQuarantined(3.0, "barn", "it failed"),
    ]  # fmt: skip
    state = state_of(events)
    apply(state, on.RunStarted(9.0, "new", None, "2"))
    assert (state.run, state.steps, state.release, state.generation) == ("new", None, "2", 3)
    assert not state.clusters
    assert state.leases.counts.granted == 0
    assert state.free_nodes(9.0) == ("attic", "barn")
    assert state.tokens["secret"].used == 1
    assert state.members["attic"].key == "key"


def test_liveness_is_not_part_of_the_state_or_a_snapshot() -> None:
    state, other = (state_of([connected(1.0, "attic")]) for _ in range(2))
    state.mark_seen("attic", 50.0, "training")
    assert state == other
    assert snapshot(state) == snapshot(other)
    assert state.last_seen("attic").at_s == 50.0
    state.mark_seen("attic", 55.0)
    assert state.last_seen("attic").activity == "training"
    again = restore(snapshot(state))
    assert again.last_seen("attic").at_s == 1.0
    again.reset_liveness(60.0)
    assert again.last_seen("attic").at_s == 60.0


def test_the_same_key_uses_a_token_once() -> None:
    state = state_of([on.TokenIssued(0.0, "secret", 99.0, 5)])
    for _ in range(2):
        apply(state, on.NodeEnrolled(1.0, "attic", "key", "secret"))
    apply(state, on.NodeEnrolled(1.0, "barn", "other key", "secret"))
    assert state.tokens["secret"].used == 2


def test_recent_events_are_limited_printable_and_without_secrets() -> None:
    state = state_of([on.TokenIssued(0.0, "secret", 7200.0, 3), on.NodeEnrolled(1.0, "attic", "k" * 64, "secret")])
    apply(state, on.NodeLost(2.0, "attic", "x", is_voluntary=False))
    apply(state, on.NoteAdded(2.0, "red \x1b[31m alert\nsecond line " + "z" * 5000))
    assert state.recent_events[0][1] == "ticket issued: valid for 2 h, 3 uses"
    assert not any("secret" in text for _, text in state.recent_events)
    assert all(text.isprintable() and len(text) <= 600 for _, text in state.recent_events)
    for i in range(2000):
        apply(state, on.NoteAdded(3.0, f"note {i}"))
        apply(state, on.ConnectionRejected(3.0, "198.51.100.7", f"reason {i}", 2))
    assert len(state.recent_events) == 500
    assert len(state.rejections) == 50
    assert state.counters.rejected == 4000
    assert restore(snapshot(state)).recent_events.maxlen == 500


def test_leases_are_not_logged_and_other_events_are() -> None:
    state = state_of([connected(1.0, "attic"), connected(1.0, "barn"), planned(2.0, cluster(1, "attic", "barn"))])
    before = len(state.recent_events)
    for event in (on.LeaseGranted(3.0, "c1", 0), on.LeaseSettled(3.0, "c1", 0), on.LeaseReturned(3.0, "c1", 0, "x")):
        apply(state, event)
    assert len(state.recent_events) == before == 3
    apply(state, on.LinkEstablished(4.0, "c1", "attic", "barn", "relayed", "both are behind NATs", "open port 7700"))
    assert state.recent_events[-1] == (
        4.0, "cluster c1: attic has a relayed link to barn (both are behind NATs); open port 7700",
    )  # fmt: skip


def test_a_state_does_not_grow_with_the_clusters_that_ended() -> None:
    state = state_of([connected(1.0, "attic"), connected(1.0, "barn")])
    for number in range(200):
        apply(state, planned(2.0, cluster(number, "attic", "barn"), generation=number))
        apply(state, on.LeaseGranted(2.0, f"c{number}", 0))
        apply(state, on.ClusterEnded(3.0, f"c{number}", "it broke", is_lost=True))
    assert len(state.clusters) == len(state.leases.accounts) == 32
    assert list(state.clusters)[-1] == "c199"
    assert state.leases.counts.returned == 200


def test_a_node_in_two_clusters_is_a_bug() -> None:
    state = state_of([connected(1.0, name) for name in NAMES])
    apply(state, planned(2.0, cluster(1, "attic", "barn")))
    with pytest.raises(AssertionError, match="is in two clusters"):
        apply(state, planned(3.0, cluster(2, "barn", "cellar"), generation=2))
