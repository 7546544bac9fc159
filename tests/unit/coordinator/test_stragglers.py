"""Speed estimates of nodes and of the fleet: only if they persist, and reported once."""

from __future__ import annotations

import pytest

from ravnest.coordinator.policy.stragglers import FLEET, StageTime, StragglerDetector, estimate_speeds
from ravnest.core.metrics import StageMetrics

NODES = ("attic", "barn", "cellar")
AS_MEASURED = dict.fromkeys((FLEET, *NODES), 1.0)


def metrics(microbatches: int, busy_s: float) -> StageMetrics:
    return StageMetrics(microbatches=microbatches, busy_s=busy_s)


def test_a_node_off_by_more_than_a_factor_of_two_is_reported() -> None:
    times = {"attic": StageTime(0.1, 0.1), "barn": StageTime(0.1, 0.3), "cellar": StageTime(0.2, 0.2)}
    (estimate,) = estimate_speeds(times, AS_MEASURED)
    assert estimate.name == "barn"
    assert estimate.speed == pytest.approx(1 / 3)
    assert estimate_speeds(times, AS_MEASURED | {"barn": 0.3}) == [], "it is known"


def test_a_slowdown_of_all_nodes_is_reported_for_the_fleet() -> None:
    times = dict.fromkeys(NODES, StageTime(0.1, 0.5))
    (estimate,) = estimate_speeds(times, AS_MEASURED)
    assert estimate.name == FLEET
    assert estimate.speed == pytest.approx(0.2)
    assert estimate_speeds(times, AS_MEASURED | {FLEET: 0.25}) == [], "it is known"
    assert estimate_speeds({"attic": StageTime(0.1, 9.0)}, AS_MEASURED) == []
    assert estimate_speeds({}, AS_MEASURED) == []


def test_speed_estimates_are_limited() -> None:
    times = {"attic": StageTime(0.1, 0.1), "barn": StageTime(0.1, 9.0), "cellar": StageTime(0.1, 0.1)}
    assert [estimate.speed for estimate in estimate_speeds(times, AS_MEASURED)] == [0.25]
    assert estimate_speeds(times, AS_MEASURED | {"barn": 0.25}) == []
    quick = times | {"barn": StageTime(0.1, 0.001)}
    assert [estimate.speed for estimate in estimate_speeds(quick, AS_MEASURED)] == [1.5]
    waits = times | {"barn": StageTime(0.1, 0.001, idle_share=0.5)}
    assert estimate_speeds(waits, AS_MEASURED) == [], "the speed of a node that is often idle is unknown"
    assert [estimate.speed for estimate in estimate_speeds(waits, AS_MEASURED | {"barn": 0.3})] == [1.0]


def test_small_stages_are_skipped() -> None:
    times = {"attic": StageTime(0.1, 0.1), "barn": StageTime(0.1, 0.1), "cellar": StageTime(0.001, 0.01)}
    assert estimate_speeds(times, AS_MEASURED) == []


def test_a_node_is_reported_after_two_periods() -> None:
    detector = StragglerDetector()

    def period(number: int, barn_s: float) -> list[str]:
        """Twenty microbatches of each node, one second each except at barn."""
        for name, seconds in (("attic", 1.0), ("barn", barn_s), ("cellar", 1.0)):
            busy[name] += 20 * seconds
            detector.add_report(name, metrics(20 * number, busy[name]), 1.0, 20.0 * number)
        return [estimate.name for estimate in detector.poll(AS_MEASURED, 20.0 * number)]

    busy = dict.fromkeys(NODES, 0.0)
    assert period(0, 1.0) == []
    assert period(1, 3.0) == []
    assert period(2, 1.0) == []  # it did not persist
    assert period(3, 3.0) == []
    assert period(4, 3.0) == ["barn"]
    assert period(5, 1.0) == []


def test_a_period_waits_for_the_slowest_and_drops_lost_nodes() -> None:
    detector = StragglerDetector()
    for name in ("attic", "barn"):
        detector.add_report(name, metrics(0, 0.0), 1.0, 0.0)
    detector.add_report("attic", metrics(100, 100.0), 1.0, 30.0)
    detector.add_report("barn", metrics(3, 90.0), 1.0, 30.0)
    assert detector.poll(AS_MEASURED, 30.0) == []
    assert detector.poll({FLEET: 1.0, "attic": 1.0}, 30.0) == []
