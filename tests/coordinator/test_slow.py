"""Who is slower than they measured, each and all together: only if it stays so, and said once."""

from __future__ import annotations

import pytest

from ravnest.coordinator.slow import FLEET, StageTime, Watch, judge
from ravnest.core.metrics import StageMetrics

NODES = ("attic", "barn", "cellar")
AS_MEASURED = dict.fromkeys((FLEET, *NODES), 1.0)


def metrics(microbatches: int, busy_s: float) -> StageMetrics:
    return StageMetrics(microbatches=microbatches, busy_s=busy_s)


def test_who_is_off_by_more_than_a_factor_of_two_is_named_with_its_speed() -> None:
    times = {"attic": StageTime(0.1, 0.1), "barn": StageTime(0.1, 0.3), "cellar": StageTime(0.2, 0.2)}
    (found,) = judge(times, AS_MEASURED)
    assert found.name == "barn"
    assert found.speed == pytest.approx(1 / 3)
    assert judge(times, AS_MEASURED | {"barn": 0.3}) == [], "it is known"


def test_what_slows_everybody_is_nobodys_fault() -> None:
    times = dict.fromkeys(NODES, StageTime(0.1, 0.5))
    (found,) = judge(times, AS_MEASURED)
    assert found.name == FLEET
    assert found.speed == pytest.approx(0.2)
    assert judge(times, AS_MEASURED | {FLEET: 0.25}) == [], "it is known"
    assert judge({"attic": StageTime(0.1, 9.0)}, AS_MEASURED) == []
    assert judge({}, AS_MEASURED) == []


def test_a_node_is_believed_to_be_so_much_slower_or_faster_and_no_more() -> None:
    times = {"attic": StageTime(0.1, 0.1), "barn": StageTime(0.1, 9.0), "cellar": StageTime(0.1, 0.1)}
    assert [found.speed for found in judge(times, AS_MEASURED)] == [0.25]
    assert judge(times, AS_MEASURED | {"barn": 0.25}) == []
    quick = times | {"barn": StageTime(0.1, 0.001)}
    assert [found.speed for found in judge(quick, AS_MEASURED)] == [1.5]
    waits = times | {"barn": StageTime(0.1, 0.001, waited=0.5)}
    assert judge(waits, AS_MEASURED) == [], "who waits a lot has not shown what it can do"
    assert [found.speed for found in judge(waits, AS_MEASURED | {"barn": 0.3})] == [1.0]


def test_a_small_stage_says_nothing_of_its_node() -> None:
    times = {"attic": StageTime(0.1, 0.1), "barn": StageTime(0.1, 0.1), "cellar": StageTime(0.001, 0.01)}
    assert judge(times, AS_MEASURED) == []


def test_a_node_is_named_after_two_periods_and_not_before() -> None:
    watch = Watch()

    def period(number: int, barn_s: float) -> list[str]:
        """Twenty microbatches of everybody, one second each but at the barn."""
        for name, seconds in (("attic", 1.0), ("barn", barn_s), ("cellar", 1.0)):
            busy[name] += 20 * seconds
            watch.heard(name, metrics(20 * number, busy[name]), 1.0, 20.0 * number)
        return [found.name for found in watch.look(AS_MEASURED, 20.0 * number)]

    busy = dict.fromkeys(NODES, 0.0)
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
    assert watch.look(AS_MEASURED, 30.0) == []
    assert watch.look({FLEET: 1.0, "attic": 1.0}, 30.0) == []
