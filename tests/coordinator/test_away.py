"""A node whose connection ended may come back, but until then no plan has it."""

from __future__ import annotations

from ravnest.coordinator.decide import MakePlan, Wishes, decide, next_look_s
from ravnest.coordinator.events import NodeConnected, RunBegun
from ravnest.coordinator.state import State, apply
from ravnest.core.control import NodeProfile, Whereabouts

_WISHES = Wishes(min_nodes=2, wait_s=1.0, beat_s=5.0)
_PROFILE = NodeProfile(memory_bytes=10**9, gflops=10.0)


def _connected(*names: str) -> State:
    state = State()
    apply(state, RunBegun(0.0, "run", None, ""))
    for name in names:
        apply(state, NodeConnected(1.0, name, _PROFILE, Whereabouts(), "192.0.2.1:7", 0))
    return state


def _planned(state: State, now_s: float) -> tuple[str, ...]:
    return next((made.nodes for made in decide(state, now_s, _WISHES) if isinstance(made, MakePlan)), ())


def test_who_is_away_is_not_planned_and_is_when_it_is_heard_again() -> None:
    state = _connected("attic", "barn", "cellar")
    state.broke_off("barn")
    assert _planned(state, 3.0) == ("attic", "cellar")
    state.heard("barn", 3.0)
    assert _planned(state, 3.0) == ("attic", "barn", "cellar")


def test_who_is_away_does_not_count_towards_enough() -> None:
    state = _connected("attic", "barn")
    state.broke_off("barn")
    assert _planned(state, 3.0) == ()
    assert next_look_s(state, 3.0, _WISHES) > 3.0


def test_who_is_away_keeps_the_time_it_was_last_heard() -> None:
    state = _connected("attic")
    state.heard("attic", 2.0, "training")
    state.broke_off("attic")
    last = state.last_heard("attic")
    assert (last.at_s, last.doing, last.is_away) == (2.0, "training", True)
