"""What a new cluster begins from, and who keeps copies of what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.copying import CopyWishes, decide_copies
from ravnest.coordinator.sources import find_beginning
from ravnest.coordinator.state import State, apply
from ravnest.core.control import Copy
from tests.coordinator.histories import cluster, connected, planned, state_of

NAMES = ("attic", "barn", "cellar", "den")


def trains(*members: str, at_s: float = 10.0, generation: int = 1, state: State | None = None) -> State:
    if state is None:
        state = state_of([on.RunBegun(0.0, "r", None, "1"), *(connected(1.0, name) for name in NAMES)])
    apply(state, planned(at_s, cluster(generation, *members)))
    for name in members:
        apply(state, on.NodeReady(at_s, f"c{generation}", name))
    return state


def test_nobody_has_learnt_anything() -> None:
    found = find_beginning(trains("attic", "barn"), ("cellar", "den"), (7,), 20.0, {})
    assert (found.updates, found.stages, found.lacking) == (0, ((), ()), (0, 1))


def test_a_stage_that_trains_is_the_newest_copy() -> None:
    state = trains("attic", "barn")
    cut = state.cuts["c1"][0]
    found = find_beginning(state, ("cellar", "den"), (cut,), 20.0, {("c1", 0): 30, ("c1", 1): 31})
    assert [[one.holder for one in stage] for stage in found.stages] == [["attic"], ["barn"]]
    assert (found.updates, found.lacking) == (31, ())
    assert found.words == "cellar gets what attic has learnt; den gets what barn has learnt"
    moved = find_beginning(state, ("cellar", "den"), (cut + 1,), 20.0, {("c1", 0): 30, ("c1", 1): 31})
    assert [[one.holder for one in stage] for stage in moved.stages] == [["attic", "barn"], ["barn"]]


def test_a_nodes_own_copy_is_as_good_as_one_that_is_a_little_newer() -> None:
    state = trains("attic", "barn")
    apply(state, on.ClusterEnded(100.0, "c1", "barn is gone", is_lost=True))
    apply(state, on.NodeLetGo(100.0, "attic", 1, Copy("c1", 0, 30)))
    trains("cellar", "den", at_s=101.0, generation=2, state=state)
    updates = {("c2", 0): 40, ("c2", 1): 40}
    cut = state.cuts["c1"]
    own = find_beginning(state, ("attic", "barn"), cut, 110.0, updates)
    assert [[one.holder for one in stage] for stage in own.stages] == [["attic"], ["den"]]
    old = find_beginning(state, ("attic", "barn"), cut, 130.0, updates)
    assert [[one.holder for one in stage] for stage in old.stages] == [["cellar"], ["den"]]


def test_who_is_away_gives_nothing() -> None:
    state = trains("attic", "barn")
    state.broke_off("barn")
    found = find_beginning(state, ("cellar", "den"), state.cuts["c1"], 20.0, {("c1", 0): 30, ("c1", 1): 31})
    assert found.lacking == (1,)
    assert "nobody has a copy of all of stage 1" in found.words


@given(
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=3, unique=True).map(sorted),
    kept=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 1), st.integers(0, 100)), max_size=8),
)
def test_copies_cover_what_is_not_lacking(cuts: list[int], kept: list[tuple[str, int, int]]) -> None:
    state = trains("attic", "barn")
    apply(state, on.ClusterEnded(50.0, "c1", "a test", is_lost=True))
    for name, stage, at_s in kept:
        apply(state, on.CopyKept(50.0 + at_s, name, "attic", Copy("c1", stage, 9), 1, 0.1))
    members = NAMES[: len(cuts) + 1]
    found = find_beginning(state, members, cuts, 200.0, {})
    bounds = [0, *cuts, 10**9]
    for stage in range(len(members)):
        ops = [op for op in range(40) if bounds[stage] <= op < bounds[stage + 1]]
        covered = all(any(one.first <= op < one.end for one in found.stages[stage]) for op in ops)
        assert covered or stage in found.lacking


def test_one_cluster_alone_keeps_copies_with_neighbours_and_two_do_not() -> None:
    state = trains("attic", "barn")
    wishes = CopyWishes(every_s=30.0)
    spares = {("barn", "cellar"), ("attic", "den")}
    found = {(one.giver, one.taker) for one in decide_copies(state, 20.0, wishes, ())}
    assert all(taker in ("cellar", "den") for _, taker in found)  # each gives one at a time: spares go first
    assert found <= {(a, b) for a in ("attic", "barn") for b in ("cellar", "den")} | spares
    alone = trains("attic", "barn", "cellar", "den")
    ring = {(one.giver, one.taker) for one in decide_copies(alone, 20.0, wishes, ())}
    assert ring == {("attic", "barn"), ("cellar", "den")}
    two = trains("attic", "barn")
    trains("cellar", "den", at_s=11.0, generation=2, state=two)
    assert decide_copies(two, 20.0, wishes, ()) == []
    assert len(decide_copies(two, 20.0, CopyWishes(replicas=1), ())) == 2


def test_while_a_cluster_may_be_back_soon_the_others_are_left_alone() -> None:
    state = trains("attic", "barn")
    trains("cellar", "den", at_s=11.0, generation=2, state=state)
    apply(state, on.ClusterEnded(100.0, "c2", "a test", is_lost=True))
    assert decide_copies(state, 109.9, CopyWishes(), ()) == []
    assert {one.taker for one in decide_copies(state, 110.0, CopyWishes(), ())} == {"cellar", "den"}
    apply(state, on.NodeGone(111.0, "cellar", "it left", polite=True))
    apply(state, on.NodeGone(111.0, "den", "it left", polite=True))
    assert len({one.taker for one in decide_copies(state, 111.0, CopyWishes(), ())} & {"attic", "barn"}) == 1


def test_a_copy_is_made_anew_when_it_is_old_and_takes_little_of_the_line() -> None:
    state = trains("attic", "barn", "cellar", "den")
    wishes = CopyWishes(every_s=30.0)
    for giver, taker in (("attic", "barn"), ("barn", "cellar"), ("cellar", "den"), ("den", "attic")):
        stage = state.clusters["c1"].plan.members.index(giver)
        apply(state, on.CopyKept(100.0, taker, giver, Copy("c1", stage, 9), 1, 5.0 if taker == "barn" else 0.1))
    assert decide_copies(state, 129.9, wishes, ()) == []
    due = {one.taker for one in decide_copies(state, 130.0, wishes, ())}
    assert "barn" not in due  # twenty times 5 s
    assert due
    assert "barn" in {one.taker for one in decide_copies(state, 200.0, wishes, ("cellar", "den"))}
