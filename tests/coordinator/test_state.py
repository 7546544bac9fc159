"""The state is what the events make of it, however it was kept in between."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.events import Event
from ravnest.coordinator.state import State, apply, restore, snapshot
from ravnest.core.control import Copy
from tests.coordinator.histories import NAMES, cluster, connected, history, numbers, planned, state_of


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
def test_events_come_back_from_bytes_as_they_were(moves: list[tuple[int, int]]) -> None:
    decoder = msgspec.msgpack.Decoder(Event)
    for event in history(moves):
        assert decoder.decode(msgspec.msgpack.encode(event)) == event


@settings(deadline=None)
@given(numbers)
def test_nodes_and_clusters_always_agree(moves: list[tuple[int, int]]) -> None:
    state = State()
    for event in history(moves):
        apply(state, event)
        members = [name for found in state.live_clusters() for name in found.plan.members]
        assert len(members) == len(set(members)), "a node has two parts"
        assert {name for name, node in state.nodes.items() if node.cluster is not None} == set(members)
        for found in state.clusters.values():
            counts = state.leases.of(found.plan.id)
            assert counts.is_balanced
            assert found.is_live or counts.outstanding == 0
            assert (found.trains_since_s is not None) or found.phase != "training"
        assert state.leases.counts.is_balanced
        assert not set(state.free_nodes(event.at_s)) & set(members)


@settings(deadline=None)
@given(numbers, st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["attic", "nobody"]), st.integers(0, 3))))
def test_what_is_said_of_nobody_changes_nothing(
    moves: list[tuple[int, int]], strange: list[tuple[int, str, int]]
) -> None:
    state = state_of(history(moves))
    for kind, name, number in strange:
        events: tuple[Event, ...] = (
            on.NodeGone(1.0, name, "x", polite=False),
            on.NodeReady(1.0, f"c{number}", name),
            on.LinkMade(1.0, f"c{number}", name, "nobody", "direct", "", ""),
            on.ClusterEnded(1.0, f"c{number}", "x", is_lost=True),
            on.LeaseSettled(1.0, f"c{number}", 1000),
            on.LeaseReturned(1.0, f"c{number}", 1000, "x"),
            on.NodeKicked(1.0, name, "x"),
        )
        apply(state, events[kind])
    assert "nobody" not in state.nodes
    assert state.leases.counts.is_balanced


def test_a_cluster_forms_trains_and_is_lost() -> None:
    state = state_of([on.RunBegun(0.0, "r", 5, "1"), connected(1.0, "attic"), connected(2.0, "barn")])
    apply(state, planned(3.0, cluster(1, "barn", "attic")))
    assert state.free_nodes(3.0) == ()
    apply(state, on.NodeReady(4.0, "c1", "attic"))
    assert not state.is_training("c1")
    apply(state, on.NodeReady(5.0, "c1", "barn"))
    assert state.is_training("c1")
    apply(state, on.LeaseGranted(6.0, "c1", 0))
    apply(state, on.NodeGone(7.0, "barn", "its line broke", polite=False))
    apply(state, on.ClusterEnded(7.0, "c1", "barn is gone", is_lost=True))
    assert state.clusters["c1"].phase == "lost"
    assert state.leases.waiting == [0]
    assert state.free_nodes(7.0) == ()
    apply(state, on.NodeLetGo(7.5, "attic", 1, Copy("c1", 1, 3)))
    assert state.free_nodes(7.5) == ("attic",)
    assert [kept.copy for kept in state.nodes["attic"].copies] == [Copy("c1", 1, 3)]
    assert state.why_free("attic") == "cluster c1 ended: barn is gone"
    assert state.counters.lost == state.counters.clusters_lost == 1


def test_a_member_that_comes_back_without_its_part_is_not_ready() -> None:
    state = state_of([connected(1.0, "attic"), connected(1.0, "barn"), planned(2.0, cluster(7, "attic", "barn"))])
    apply(state, on.NodeReady(3.0, "c7", "attic"))
    apply(state, connected(4.0, "attic", holding=1))
    assert state.clusters["c7"].ready == {"attic"}
    apply(state, connected(5.0, "attic", holding=0))
    assert state.clusters["c7"].ready == set()
    assert state.clusters["c7"].missing == ("attic", "barn")


def test_a_new_run_keeps_members_and_tokens_and_never_uses_a_generation_twice() -> None:
    events: list[Event] = [
        on.RunBegun(0.0, "old", 5, "1"), on.TokenIssued(0.0, "secret", 99.0, 2),
        on.NodeEnrolled(0.0, "attic", "key", "secret"), connected(1.0, "attic"), connected(1.0, "barn"),
        planned(2.0, cluster(1, "attic", "barn"), generation=3), on.LeaseGranted(3.0, "c1", 0),
        on.NodeBlamed(3.0, "barn", "it failed"),
    ]  # fmt: skip
    state = state_of(events)
    apply(state, on.RunBegun(9.0, "new", None, "2"))
    assert (state.run, state.steps, state.release, state.generation) == ("new", None, "2", 3)
    assert not state.clusters
    assert state.leases.counts.granted == 0
    assert state.free_nodes(9.0) == ("attic", "barn")
    assert state.tokens["secret"].used == 1
    assert state.members["attic"].key == "key"


def test_beats_are_no_part_of_the_state_and_of_a_snapshot() -> None:
    state, other = (state_of([connected(1.0, "attic")]) for _ in range(2))
    state.heard("attic", 50.0, "training")
    assert state == other
    assert snapshot(state) == snapshot(other)
    assert state.last_heard("attic").at_s == 50.0
    state.heard("attic", 55.0)
    assert state.last_heard("attic").doing == "training"
    again = restore(snapshot(state))
    assert again.last_heard("attic").at_s == 1.0
    again.wake(60.0)
    assert again.last_heard("attic").at_s == 60.0


def test_the_same_key_takes_no_second_use_of_a_token() -> None:
    state = state_of([on.TokenIssued(0.0, "secret", 99.0, 5)])
    for _ in range(2):
        apply(state, on.NodeEnrolled(1.0, "attic", "key", "secret"))
    apply(state, on.NodeEnrolled(1.0, "barn", "other key", "secret"))
    assert state.tokens["secret"].used == 2


def test_words_are_few_plain_and_without_secrets() -> None:
    state = state_of([on.TokenIssued(0.0, "secret", 7200.0, 3), on.NodeEnrolled(1.0, "attic", "k" * 64, "secret")])
    apply(state, on.NodeGone(2.0, "attic", "x", polite=False))
    apply(state, on.Noted(2.0, "red \x1b[31m alert\nsecond line " + "z" * 5000))
    assert state.words[0][1] == "a ticket was issued: good for 2 h, 3 times"
    assert not any("secret" in text for _, text in state.words)
    assert all(text.isprintable() and len(text) <= 600 for _, text in state.words)
    for i in range(2000):
        apply(state, on.Noted(3.0, f"note {i}"))
        apply(state, on.CallerRefused(3.0, "198.51.100.7", f"reason {i}", 2))
    assert len(state.words) == 500
    assert len(state.refusals) == 50
    assert state.counters.refused == 4000
    assert restore(snapshot(state)).words.maxlen == 500


def test_leases_say_nothing_and_all_else_says_one_sentence() -> None:
    state = state_of([connected(1.0, "attic"), connected(1.0, "barn"), planned(2.0, cluster(1, "attic", "barn"))])
    before = len(state.words)
    for event in (on.LeaseGranted(3.0, "c1", 0), on.LeaseSettled(3.0, "c1", 0), on.LeaseReturned(3.0, "c1", 0, "x")):
        apply(state, event)
    assert len(state.words) == before == 3
    apply(state, on.LinkMade(4.0, "c1", "attic", "barn", "relayed", "both are behind NATs", "open port 7700"))
    assert state.words[-1] == (
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


def test_a_node_with_two_parts_is_a_bug() -> None:
    state = state_of([connected(1.0, name) for name in NAMES])
    apply(state, planned(2.0, cluster(1, "attic", "barn")))
    with pytest.raises(AssertionError, match="planned twice"):
        apply(state, planned(3.0, cluster(2, "barn", "cellar"), generation=2))
