"""Plans on a virtual clock, while machines leave, join and slow down."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.plan.faults import Fault, FaultTrace, draw_faults
from ravnest.plan.fleet import Fleet, FleetPlan, Machine, Task
from ravnest.plan.outcome import Simulation, Spell
from ravnest.plan.problem import PlanError
from ravnest.plan.recovery import Repaired, recover
from ravnest.plan.simulate import SimulationSettings, simulate
from tests.plan.simulated import PLAIN, chain_of, plan_of, random_task

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
    for run in simulation.clusters:
        totals = run.totals
        assert totals.fed == totals.trained + totals.lost + totals.in_flight
        assert 0 <= totals.repeated <= totals.lost
        assert totals.lost == sum(spell.totals.lost for spell in run.spells)
        assert all(a.end_s <= b.start_s for a, b in pairwise(run.spells))


def told(simulation: Simulation) -> str:
    return "\n".join(f"{h.time_s:g} {h.text}" for h in simulation.happenings)


def steady_s(spell: Spell) -> float:
    assert spell.steady_interval_s is not None
    return spell.steady_interval_s


def test_a_spare_takes_the_place() -> None:
    task = six_ops("abcx")
    plan = plan_of(task, ["abc"])
    simulation = simulate(task, plan, duration_s=1200, faults=trace(leaves(300, "b")))
    before, after = simulation.clusters[0].spells
    assert before.ended == "b left"
    assert after.plan.members == ("a", "x", "c")
    assert after.plan.partition.cuts == before.plan.partition.cuts, "only the lost stage moves"
    move_s = 2 * 1000 / 1000.0  # two ops' weights over a line of 1000 bytes/s
    assert before.end_s == 300
    assert after.start_s == pytest.approx(300 + 2 + move_s)
    assert steady_s(after) == pytest.approx(after.plan.partition.interval_s, rel=0.01)
    assert before.totals.lost == after.totals.repeated > 0
    assert "b leaves" in told(simulation)
    assert "x in place of b" in told(simulation)
    check_accounts(simulation)


def test_without_a_spare_the_rest_is_cut_anew() -> None:
    task = six_ops("abc")
    simulation = simulate(task, plan_of(task, ["abc"]), duration_s=2000, faults=trace(leaves(300, "c")))
    before, after = simulation.clusters[0].spells
    assert steady_s(before) == pytest.approx(6.0, rel=0.01)
    assert after.plan.members == ("a", "b")
    assert steady_s(after) == pytest.approx(after.plan.partition.interval_s, rel=0.01) == pytest.approx(9.0, rel=0.01)
    assert "cut anew over the 2 left" in told(simulation)
    check_accounts(simulation)


def test_a_cluster_is_parked_and_comes_back() -> None:
    task = six_ops("abc", memory_bytes=8000)
    plan = plan_of(task, ["abc"])
    parked = simulate(task, plan, duration_s=2000, faults=trace(leaves(300, "c")))
    assert len(parked.clusters[0].spells) == 1
    assert "parked without c" in told(parked)
    assert parked.totals.waiting == parked.totals.lost > 0
    revived = simulate(task, plan, duration_s=2000, faults=trace(leaves(300, "c"), joins(900, "c")))
    before, after = revived.clusters[0].spells
    assert sorted(after.plan.members) == ["a", "b", "c"]
    assert after.start_s >= 900
    assert steady_s(after) == pytest.approx(after.plan.partition.interval_s, rel=0.01)
    assert revived.totals.waiting == 0
    assert parked.totals.trained == before.totals.trained
    check_accounts(parked)
    check_accounts(revived)


def test_survivors_of_a_parked_cluster_are_spares() -> None:
    task = six_ops("abcdef", memory_bytes=8000)
    faults = trace(leaves(300, "c"), leaves(600, "d"))
    simulation = simulate(task, plan_of(task, ["abc", "def"]), duration_s=1000, faults=faults)
    first, second = simulation.clusters
    assert len(first.spells) == 1
    assert second.spells[-1].plan.members in (("a", "e", "f"), ("b", "e", "f"))
    check_accounts(simulation)


def test_back_before_anybody_noticed() -> None:
    """It goes on with the same plan; what was under way is lost all the same."""
    task = six_ops("abc")
    faults = trace(leaves(300, "b"), joins(301, "b"))
    simulation = simulate(task, plan_of(task, ["abc"]), duration_s=1000, faults=faults)
    before, after = simulation.clusters[0].spells
    assert after.plan == before.plan
    assert after.start_s == 302
    assert simulation.totals.lost == before.totals.lost > 0


def test_the_spare_that_was_to_help_leaves_too() -> None:
    task = six_ops("abcxy")
    faults = trace(leaves(300, "b"), leaves(303, "x"), leaves(304, "nobody"))
    with pytest.raises(ValueError, match="'nobody' is to leave, but is not in the fleet"):
        simulate(task, plan_of(task, ["abc"]), duration_s=1000, faults=faults)
    faults = trace(leaves(300, "b"), leaves(303, "x"))
    simulation = simulate(task, plan_of(task, ["abc"]), duration_s=1000, faults=faults)
    assert [spell.plan.members for spell in simulation.clusters[0].spells] == [("a", "b", "c"), ("a", "y", "c")]
    check_accounts(simulation)


def test_a_slow_machine_slows_its_cluster_until_it_is_well() -> None:
    task = six_ops("abcdef")
    plan = plan_of(task, ["abc", "def"])
    faults = trace(slows(600, "b", 3.0), slows(1200, "b", 1.0))
    simulation = simulate(task, plan, duration_s=1800, faults=faults)
    slowed, other = simulation.clusters
    assert slowed.totals.trained == pytest.approx(600 / 6 + 600 / 18 + 600 / 6, rel=0.1)
    assert other.totals.trained == pytest.approx(1800 / 6, rel=0.05)
    assert len(slowed.spells) == 1
    assert simulation.totals.lost == 0


def test_other_clusters_never_stop() -> None:
    task = six_ops("abcdef")
    plan = plan_of(task, ["abc", "def"])
    undisturbed = simulate(task, plan, duration_s=1000)
    simulation = simulate(task, plan, duration_s=1000, faults=trace(leaves(300, "b")))
    assert simulation.clusters[1] == undisturbed.clusters[1]
    assert simulation.clusters[0] != undisturbed.clusters[0]


def test_any_recovery_can_be_plugged_in() -> None:
    """One that makes one cluster of all, whatever happens; and one that knows no way."""

    def merge(task: Task, running: FleetPlan) -> Repaired:
        return Repaired(plan_of(task, [[m.name for m in task.fleet.machines]]), 10.0, "all in one")

    def give_up(task: Task, running: FleetPlan) -> Repaired:
        raise PlanError("nobody knows")

    task = six_ops("abcd")
    plan = plan_of(task, ["ab", "cd"])
    merged = simulate(task, plan, duration_s=1000, faults=trace(leaves(300, "d")), settings=_with(merge))
    assert [len(run.spells) for run in merged.clusters] == [2, 1]
    assert merged.clusters[0].spells[1].plan.members == ("a", "b", "c")
    assert merged.clusters[0].spells[1].start_s == 312
    assert merged.clusters[0].spells[0].ended == "another plan"
    gone = simulate(task, plan, duration_s=1000, faults=trace(leaves(300, "d")), settings=_with(give_up))
    assert [len(run.spells) for run in gone.clusters] == [1, 1]
    assert gone.clusters[0].spells[0].end_s == 1000
    assert "no way to go on: nobody knows" in told(gone)
    check_accounts(merged)
    check_accounts(gone)


def _with(recovery: object) -> SimulationSettings:
    return SimulationSettings(recovery=recovery)  # type: ignore[arg-type]


def test_so_many_microbatches_whatever_happens() -> None:
    task = six_ops("abcx")
    simulation = simulate(task, plan_of(task, ["abc"]), microbatches=100, faults=trace(leaves(300, "b")))
    depth = max(simulation.clusters[0].spells[0].plan.partition.depths)
    assert 100 <= simulation.totals.trained < 100 + depth
    assert simulation.totals.in_flight == simulation.totals.waiting == 0
    check_accounts(simulation)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_trace_balances(seed: int) -> None:
    """Whatever happens: all is accounted for, nobody who is gone works, nobody works twice, and it can be repeated."""
    rng = random.Random(seed)
    task = random_task(seed, machines=7, num_spares=1, min_stages=rng.choice([1, 2]))
    plan = plan_of(task, [["m0", "m1", "m2"], ["m3", "m4"]])
    kinds: list[Callable[[float, str], Fault]] = [leaves, joins, partial(slows, factor=rng.choice([0.5, 1.0, 4.0]))]
    times = sorted(rng.uniform(0, 100) for _ in range(rng.randrange(12)))
    faults = trace(*(rng.choice(kinds)(time_s, f"m{rng.randrange(7)}") for time_s in times))
    simulation = simulate(task, plan, duration_s=120, faults=faults, seed=seed, jitter=0.2)
    check_accounts(simulation)
    spells = [spell for run in simulation.clusters for spell in run.spells]
    for one in spells:
        assert not any(fault.kind == "leave" and one.start_s < fault.time_s < one.end_s
                       and fault.machine in one.plan.members for fault in faults)  # fmt: skip
        for other in spells:
            if one is not other and one.start_s < other.end_s and other.start_s < one.end_s:
                assert not set(one.plan.members) & set(other.plan.members)
    assert simulation == simulate(task, plan, duration_s=120, faults=faults, seed=seed, jitter=0.2)


def test_recover_keeps_spares_back_and_leaves_the_whole_alone() -> None:
    task = six_ops("abcxyz", num_spares=3)
    plan = plan_of(task, ["abc"])
    kept = recover(task, plan)
    assert (kept.plan.clusters, kept.plan.spares, kept.move_s) == (plan.clusters, plan.spares, 0.0)
    assert kept.reason == "nothing is broken"
    freed = recover(six_ops("abcxyz", num_spares=1), plan)
    assert [c.members for c in freed.plan.clusters] == [("a", "b", "c"), ("y", "z")]
    assert [spare.name for spare in freed.plan.spares] == ["x"]


def test_lives_are_as_long_as_reliability_says() -> None:
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


def test_a_machines_fate_is_its_own() -> None:
    machines = tuple(Machine(name=f"m{i}", reliability=0.2) for i in range(20))
    all_of_them = draw_faults(Fleet(machines=machines), HOUR_S, seed=5)
    one = draw_faults(Fleet(machines=machines[7:8]), HOUR_S, seed=5)
    assert [fault for fault in all_of_them if fault.machine == "m7"] == list(one)
    assert draw_faults(Fleet(machines=machines), HOUR_S, seed=6) != all_of_them
    assert len(draw_faults(Fleet(machines=(Machine(name="sure"),)), 1e9)) == 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="order of time"):
        trace(leaves(2, "a"), leaves(1, "a"))
    with pytest.raises(ValueError, match="0 s or later"):
        leaves(-1, "a")
    with pytest.raises(ValueError, match="names a machine"):
        leaves(1, "")
    with pytest.raises(ValueError, match="leave, join or slow"):
        Fault(time_s=0, kind="explode", machine="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="factor"):
        slows(1, "a", 0.0)
    with pytest.raises(ValueError, match="only a slow machine"):
        Fault(time_s=0, kind="leave", machine="a", factor=2.0)
