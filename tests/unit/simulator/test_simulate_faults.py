"""Simulated plans while machines leave, join and slow down."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.planner.fleet import Fleet, FleetPlan, Machine, Task
from ravnest.planner.replan import replan
from ravnest.simulator.results import Period, Simulation
from ravnest.simulator.simulation import Fault, FaultTrace, draw_faults, simulate
from tests.unit.simulator.simulated import PLAIN, chain_of, plan_of, random_task

HOUR_S = 3600.0


def leaves(time_s: float, machine: str) -> Fault:
    return Fault(time_s=time_s, kind="leave", machine=machine)


def joins(time_s: float, machine: str) -> Fault:
    return Fault(time_s=time_s, kind="join", machine=machine)


def slows(time_s: float, machine: str, factor: float) -> Fault:
    return Fault(time_s=time_s, kind="slow", machine=machine, factor=factor)


def trace(*faults: Fault) -> FaultTrace:
    return FaultTrace(faults=faults)


def six_ops(names: str, *, memory_bytes: float = 1e9, num_spares: int = 0, min_stages: int = 2) -> Task:
    """Equal machines; six ops of 3 s and 1000 bytes of weights each, so that a stage of k ops needs about 3 k kB."""
    machines = tuple(
        Machine(name=name, memory_bytes=memory_bytes, up_bytes_per_s=1000.0, down_bytes_per_s=1000.0) for name in names
    )
    chain = chain_of([1.0] * 6, message_bytes=1, weight_bytes=1000)
    return Task(
        chain=chain, fleet=Fleet(machines=machines), memory=PLAIN, slack=3, num_spares=num_spares, min_stages=min_stages
    )


def check_accounts(simulation: Simulation) -> None:
    for cluster in simulation.clusters:
        totals = cluster.totals
        assert totals.fed == totals.trained + totals.lost + totals.in_flight
        assert 0 <= totals.repeated <= totals.lost
        assert totals.lost == sum(period.totals.lost for period in cluster.periods)
        assert all(a.end_s <= b.start_s for a, b in pairwise(cluster.periods))


def log_of(simulation: Simulation) -> str:
    return "\n".join(f"{h.time_s:g} {h.text}" for h in simulation.events)


def steady_s(period: Period) -> float:
    assert period.steady_interval_s is not None
    return period.steady_interval_s


def test_a_spare_takes_the_place() -> None:
    task = six_ops("abcx", num_spares=1, min_stages=3)
    plan = plan_of(task, ["abc"])
    simulation = simulate(task, plan, duration_s=1200, faults=trace(leaves(300, "b")))
    before, after = simulation.clusters[0].periods
    assert before.end_reason == "b left"
    assert after.plan.members == ("a", "x", "c")
    assert after.plan.partition.cuts == before.plan.partition.cuts, "only the lost stage moves"
    move_s = 2 * 1000 / 1000.0  # two ops' weights over a line of 1000 bytes/s
    assert before.end_s == 300
    assert after.start_s == pytest.approx(300 + 2 + move_s)
    assert steady_s(after) == pytest.approx(after.plan.partition.interval_s, rel=0.01)
    assert before.totals.lost == after.totals.repeated > 0
    assert "b leaves" in log_of(simulation)
    assert "replace b by x" in log_of(simulation)
    check_accounts(simulation)


def test_without_a_spare_the_others_split_the_model_again() -> None:
    task = six_ops("abc")
    simulation = simulate(task, plan_of(task, ["abc"]), duration_s=2000, faults=trace(leaves(300, "c")))
    before, after = simulation.clusters[0].periods
    assert steady_s(before) == pytest.approx(6.0, rel=0.01)
    assert after.plan.members == ("a", "b")
    assert steady_s(after) == pytest.approx(after.plan.partition.interval_s, rel=0.01) == pytest.approx(9.0, rel=0.01)
    assert "split cluster 0 again over the 2 left" in log_of(simulation)
    check_accounts(simulation)


def test_a_cluster_without_repair_waits_for_machines() -> None:
    task = six_ops("abc", memory_bytes=8000)
    plan = plan_of(task, ["abc"])
    parked = simulate(task, plan, duration_s=2000, faults=trace(leaves(300, "c")))
    assert len(parked.clusters[0].periods) == 1
    assert "no plan for a, b: " in log_of(parked)
    assert parked.totals.unrepeated == parked.totals.lost > 0
    revived = simulate(task, plan, duration_s=2000, faults=trace(leaves(300, "c"), joins(900, "c")))
    before, after = revived.clusters[0].periods
    assert sorted(after.plan.members) == ["a", "b", "c"]
    assert after.start_s >= 900
    assert steady_s(after) == pytest.approx(after.plan.partition.interval_s, rel=0.01)
    assert revived.totals.unrepeated == 0
    assert parked.totals.trained == before.totals.trained
    check_accounts(parked)
    check_accounts(revived)


def test_members_of_a_failed_cluster_replace_others() -> None:
    task = six_ops("abcdef", memory_bytes=8000)
    faults = trace(leaves(300, "c"), leaves(600, "d"))
    simulation = simulate(task, plan_of(task, ["abc", "def"]), duration_s=1000, faults=faults)
    first, second = simulation.clusters
    assert len(first.periods) == 1
    assert second.periods[-1].plan.members in (("a", "e", "f"), ("b", "e", "f"))
    check_accounts(simulation)


def test_a_member_comes_back_before_its_loss_is_detected() -> None:
    """The cluster continues with the same plan; microbatches in flight are lost all the same."""
    task = six_ops("abc")
    faults = trace(leaves(300, "b"), joins(301, "b"))
    simulation = simulate(task, plan_of(task, ["abc"]), duration_s=1000, faults=faults)
    before, after = simulation.clusters[0].periods
    assert after.plan == before.plan
    assert after.start_s == 301
    assert simulation.totals.lost == before.totals.lost > 0


def test_the_replacement_leaves_too() -> None:
    task = six_ops("abcxy", num_spares=2, min_stages=3)
    faults = trace(leaves(300, "b"), leaves(303, "x"), leaves(304, "nobody"))
    with pytest.raises(ValueError, match="a fault names 'nobody', which is not in the fleet"):
        simulate(task, plan_of(task, ["abc"]), duration_s=1000, faults=faults)
    faults = trace(leaves(300, "b"), leaves(303, "x"))
    simulation = simulate(task, plan_of(task, ["abc"]), duration_s=1000, faults=faults)
    assert [period.plan.members for period in simulation.clusters[0].periods] == [("a", "b", "c"), ("a", "y", "c")]
    check_accounts(simulation)


def test_a_slow_machine_gets_less_work_until_it_recovers() -> None:
    """b takes 18 s a microbatch with the cuts as planned, and 9 s with one op instead of two."""
    task = six_ops("abcdef")
    plan = plan_of(task, ["abc", "def"])
    faults = trace(slows(600, "b", 3.0), slows(1200, "b", 1.0))
    simulation = simulate(task, plan, duration_s=1800, faults=faults)
    slowed, other = simulation.clusters
    assert [period.plan.members for period in slowed.periods] == [("a", "b", "c")] * 3
    assert steady_s(slowed.periods[0]) == pytest.approx(6.0, rel=0.1)
    assert steady_s(slowed.periods[1]) == pytest.approx(9.0, rel=0.1)
    assert steady_s(slowed.periods[2]) == pytest.approx(6.0, rel=0.1)
    assert other.totals.trained == pytest.approx(1800 / 6, rel=0.05)
    assert len(other.periods) == 1
    check_accounts(simulation)


def test_other_clusters_never_stop() -> None:
    task = six_ops("abcdef")
    plan = plan_of(task, ["abc", "def"])
    undisturbed = simulate(task, plan, duration_s=1000)
    simulation = simulate(task, plan, duration_s=1000, faults=trace(leaves(300, "b")))
    assert simulation.clusters[1] == undisturbed.clusters[1]
    assert simulation.clusters[0] != undisturbed.clusters[0]


def test_repairs_are_those_of_the_coordinator() -> None:
    """The failed cluster and the free machines, no others, go through `replan` as in the coordinator."""
    task = random_task(7, machines=7, num_spares=1)
    plan = plan_of(task, [["m0", "m1", "m2"], ["m3", "m4"]])
    simulation = simulate(task, plan, duration_s=60, faults=trace(leaves(10, "m1")))
    free = tuple(m for m in task.fleet.machines if m.name in ("m0", "m2", "m5", "m6"))
    failed = FleetPlan(plan.clusters[:1], (), (), plan.clusters[0].samples_per_s, "")
    expected = replan(replace(task, fleet=replace(task.fleet, machines=free)), failed).plan
    periods = [period for cluster in simulation.clusters for period in cluster.periods if period.start_s > 0]
    assert {period.plan for period in periods} == set(expected.clusters)
    assert expected.reason in log_of(simulation)


def test_free_machines_form_a_cluster_once_no_more_join() -> None:
    task = six_ops("abcxyz")
    plan = replace(plan_of(task, ["abc"]), spares=())
    faults = trace(joins(100, "x"), joins(110, "y"), joins(120, "z"))
    simulation = simulate(task, plan, duration_s=600, faults=faults)
    first, second = simulation.clusters
    assert len(first.periods) == 1
    assert set(second.periods[0].plan.members) <= {"x", "y", "z"}
    assert second.periods[0].start_s >= 120 + 15, "x and y waited for others"
    check_accounts(simulation)


def test_a_cluster_retires_for_a_better_plan_without_losses() -> None:
    """One machine more than the cluster has: after a rest it is planned with it, and trains what it was fed."""
    task = six_ops("abx")
    plan = replace(plan_of(task, ["ab"]), spares=())
    simulation = simulate(task, plan, duration_s=1200, faults=trace(joins(100, "x")))
    before, after = simulation.clusters[0].periods
    assert before.end_reason == "retired for another plan"
    assert 100 + 15 <= before.end_s <= 100 + 15 + 30 + 9
    assert sorted(after.plan.members) == ["a", "b", "x"]
    assert "a better plan" in log_of(simulation)
    check_accounts(simulation)


def test_all_microbatches_are_trained_despite_faults() -> None:
    task = six_ops("abcx", num_spares=1, min_stages=3)
    simulation = simulate(task, plan_of(task, ["abc"]), microbatches=100, faults=trace(leaves(300, "b")))
    depth = max(simulation.clusters[0].periods[0].plan.partition.depths)
    assert 100 <= simulation.totals.trained < 100 + depth
    assert simulation.totals.in_flight == simulation.totals.unrepeated == 0
    check_accounts(simulation)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_accounts_balance_for_any_trace(seed: int) -> None:
    """Microbatches add up, absent machines do not work, none works twice, and the simulation is repeatable."""
    rng = random.Random(seed)
    task = random_task(seed, machines=7, num_spares=1, min_stages=rng.choice([1, 2]))
    plan = plan_of(task, [["m0", "m1", "m2"], ["m3", "m4"]])
    kinds: list[Callable[[float, str], Fault]] = [leaves, joins, partial(slows, factor=rng.choice([0.5, 1.0, 4.0]))]
    times = sorted(rng.uniform(0, 100) for _ in range(rng.randrange(12)))
    faults = trace(*(rng.choice(kinds)(time_s, f"m{rng.randrange(7)}") for time_s in times))
    simulation = simulate(task, plan, duration_s=120, faults=faults, seed=seed, jitter=0.2)
    check_accounts(simulation)
    periods = [period for cluster in simulation.clusters for period in cluster.periods]
    for one in periods:
        assert not any(fault.kind == "leave" and one.start_s < fault.time_s < one.end_s
                       and fault.machine in one.plan.members for fault in faults)  # fmt: skip
        for other in periods:
            if one is not other and one.start_s < other.end_s and other.start_s < one.end_s:
                assert not set(one.plan.members) & set(other.plan.members)
    assert simulation == simulate(task, plan, duration_s=120, faults=faults, seed=seed, jitter=0.2)


def test_spares_are_held_back() -> None:
    task = six_ops("abcx", num_spares=1)
    plan = plan_of(task, ["abc"])
    simulation = simulate(task, plan, duration_s=600)
    assert (len(simulation.clusters), len(simulation.clusters[0].periods), simulation.events) == (1, 1, ())


def test_uptimes_follow_reliability() -> None:
    """Half of the machines with reliability 0.5 leave within an hour, a quarter stay for two."""
    fleet = Fleet(machines=tuple(Machine(name=f"m{i}", reliability=0.5) for i in range(4000)))
    drawn = draw_faults(fleet, 2 * HOUR_S, seed=3, repair_s=1e12)
    first_hour = sum(fault.time_s < HOUR_S for fault in drawn)
    assert first_hour / 4000 == pytest.approx(0.5, abs=0.03)
    assert len(drawn) / 4000 == pytest.approx(0.75, abs=0.03)
    returning = draw_faults(fleet, 2 * HOUR_S, seed=3, repair_s=60.0)
    away = _away_s(returning, 2 * HOUR_S)
    assert sum(away) / len(away) == pytest.approx(60.0, rel=0.1)


def _away_s(drawn: FaultTrace, until_s: float) -> list[float]:
    left: dict[str, float] = {}
    away = []
    for fault in drawn:
        if fault.kind == "leave":
            assert fault.machine not in left
            left[fault.machine] = fault.time_s
        else:
            away.append(fault.time_s - left.pop(fault.machine))
    return away


def test_faults_of_a_machine_do_not_depend_on_others() -> None:
    machines = tuple(Machine(name=f"m{i}", reliability=0.2) for i in range(20))
    all_of_them = draw_faults(Fleet(machines=machines), HOUR_S, seed=5)
    one = draw_faults(Fleet(machines=machines[7:8]), HOUR_S, seed=5)
    assert [fault for fault in all_of_them if fault.machine == "m7"] == list(one)
    assert draw_faults(Fleet(machines=machines), HOUR_S, seed=6) != all_of_them
    assert len(draw_faults(Fleet(machines=(Machine(name="sure"),)), 1e9)) == 0


def test_invalid_faults_are_rejected() -> None:
    with pytest.raises(ValueError, match="order of time"):
        trace(leaves(2, "a"), leaves(1, "a"))
    with pytest.raises(ValueError, match="time_s must be >= 0"):
        leaves(-1, "a")
    with pytest.raises(ValueError, match="machine must not be empty"):
        leaves(1, "")
    with pytest.raises(ValueError, match="leave, join or slow"):
        Fault(time_s=0, kind="explode", machine="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="factor"):
        slows(1, "a", 0.0)
    with pytest.raises(ValueError, match="only kind slow"):
        Fault(time_s=0, kind="leave", machine="a", factor=2.0)
