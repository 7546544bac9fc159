"""Who is slower than planned: relative to the others, and only if it stays so."""

from __future__ import annotations

import pytest

from ravnest.coordinator.slow import Pace, Watch, judge
from ravnest.core.metrics import StageMetrics


def metrics(microbatches: int, busy_s: float) -> StageMetrics:
    return StageMetrics(microbatches=microbatches, busy_s=busy_s)


def test_who_is_off_by_more_than_half_is_named_with_its_share() -> None:
    paces = {"attic": Pace(0.1, 0.1), "barn": Pace(0.1, 0.3), "cellar": Pace(0.2, 0.2)}
    (found,) = judge(paces)
    assert found.name == "barn"
    assert found.share == pytest.approx(1 / 3)


def test_what_slows_everybody_is_nobodys_fault() -> None:
    assert judge({name: Pace(0.1, 0.5) for name in ("attic", "barn", "cellar")}) == []
    assert judge({"attic": Pace(0.1, 9.0)}) == []
    assert judge({}) == []


def test_a_small_stage_says_nothing_of_its_node() -> None:
    paces = {"attic": Pace(0.1, 0.1), "barn": Pace(0.1, 0.1), "cellar": Pace(0.001, 0.01)}
    assert judge(paces) == []


def test_a_node_is_named_after_two_periods_and_not_before() -> None:
    watch = Watch()

    def period(number: int, barn_s: float) -> list[str]:
        """Twenty microbatches of everybody, one second each but at the barn."""
        for name, seconds in (("attic", 1.0), ("barn", barn_s), ("cellar", 1.0)):
            busy[name] += 20 * seconds
            watch.heard(name, metrics(20 * number, busy[name]), 1.0, 20.0 * number)
        return [found.name for found in watch.look(busy, 20.0 * number)]

    busy = {"attic": 0.0, "barn": 0.0, "cellar": 0.0}
    assert period(0, 1.0) == []
    assert period(1, 3.0) == []
    assert period(2, 1.0) == []  # it was a moment
    assert period(3, 3.0) == []
    assert period(4, 3.0) == ["barn"]
    assert period(5, 1.0) == []


def test_a_period_waits_for_the_slowest_and_forgets_who_is_gone() -> None:
    watch = Watch()
    for name in ("attic", "barn"):
        watch.heard(name, metrics(0, 0.0), 1.0, 0.0)
    watch.heard("attic", metrics(100, 100.0), 1.0, 30.0)
    watch.heard("barn", metrics(3, 90.0), 1.0, 30.0)
    assert watch.look(["attic", "barn"], 30.0) == []
    assert watch.look(["attic"], 30.0) == []
