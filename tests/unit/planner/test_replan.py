"""Plans that follow a changing fleet: no lost machine, no needless transfer, no needless change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.planner import Chain, DoesNotFit, MemoryModel, PlanError, Storage, stage_memory
from ravnest.planner.clusters.search import form_clusters
from ravnest.planner.fleet import ClusterPlan, Fleet, FleetPlan, IdleMachine, Machine, Task, plan_row, try_row
from ravnest.planner.replan import FormClusters, PlanChange, replan, state_transfers
from tests.unit.planner.instances import share

MB = 1_000_000
MODEL = MemoryModel(base_bytes=0, correction_copies=0)
NUM_OPS = 12
CHAIN = Chain(
    forward_s=(1.0,) * NUM_OPS,
    backward_s=(1.0,) * NUM_OPS,
    cuts=tuple(range(1, NUM_OPS)),
    forward_bytes=(1000,) * (NUM_OPS + 1),
    backward_bytes=(1000,) * (NUM_OPS + 1),
    weights=(*(Storage(10 * MB, (i,)) for i in range(NUM_OPS)), Storage(30 * MB, (1, NUM_OPS - 1))),
)


def machine(name: str, **changes: Any) -> Machine:
    return replace(
        Machine(name=name, memory_bytes=500 * MB, up_bytes_per_s=5 * MB, down_bytes_per_s=20 * MB), **changes
    )


def task_of(machines: Sequence[Machine]) -> Task:
    return Task(chain=CHAIN, fleet=Fleet(machines=tuple(machines)), memory=MODEL)


def in_rows(task: Task, size: int = 3) -> FleetPlan:
    """Clusters of machines in the order of the fleet; the remaining ones are spares."""
    names = [m.name for m in task.fleet.machines]
    rows = [names[i : i + size] for i in range(0, len(names), size)]
    clusters = [found for row in rows if len(row) == size and (found := try_row(task, row)) is not None]
    if not clusters:
        raise DoesNotFit("no row fits", 1, ())
    working = {name for cluster in clusters for name in cluster.members}
    spares = tuple(IdleMachine(name, "over") for name in names if name not in working)
    return FleetPlan(tuple(clusters), spares, (), sum(c.samples_per_s for c in clusters), "in rows")


def without(task: Task, *names: str) -> Task:
    return task_of([m for m in task.fleet.machines if m.name not in names])


def with_change(task: Task, name: str, **changes: Any) -> Task:
    return task_of([replace(m, **changes) if m.name == name else m for m in task.fleet.machines])


def rows(clusters: Sequence[ClusterPlan]) -> set[tuple[tuple[str, ...], tuple[int, ...]]]:
    return {(c.members, c.partition.cuts) for c in clusters}


def holdings(clusters: Sequence[ClusterPlan]) -> dict[str, set[int]]:
    """Which of the chain's weights each machine owns, the slow way."""
    return {
        name: {w for w, storage in enumerate(CHAIN.weights) if start <= min(storage.ops) < stop}
        for cluster in clusters
        for name, (start, stop) in zip(
            cluster.members, pairwise((0, *cluster.partition.cuts, CHAIN.num_ops)), strict=True
        )
    }


def moved_bytes(before: Sequence[ClusterPlan], after: Sequence[ClusterPlan]) -> int:
    had = holdings(before)
    new = [w for name, owned in holdings(after).items() for w in owned - had.get(name, set())]
    return ceil(sum(CHAIN.weights[w].num_bytes for w in new) * (1 + MODEL.optimizer_ratio))


SIX = [machine(name) for name in ("attic", "barn", "cellar", "den", "eaves", "flat")]


def test_nothing_changed_nothing_moves() -> None:
    task = task_of([*SIX, machine("spare")])
    running = in_rows(task)
    for form in (None, in_rows):
        change = replan(task, running, form=form)
        assert change == PlanChange(replace(running, reason=change.reason), 0, 0.0, 0.0, change.reason)
        assert change.reason.startswith("keep")


def test_a_spare_takes_the_place_of_the_lost() -> None:
    task = task_of([*SIX, machine("loft")])
    running = in_rows(task)
    change = replan(without(task, "barn"), running, form=None)
    assert change.plan.clusters[0].members == ("attic", "loft", "cellar")
    assert change.plan.clusters[0].partition.cuts == running.clusters[0].partition.cuts
    assert rows(change.plan.clusters[1:]) == rows(running.clusters[1:])
    assert change.plan.spares == ()
    assert change.reason.startswith("replace barn by loft: cluster 0 does")
    assert change.moved_bytes == 3 * 40 * MB
    assert change.move_s == pytest.approx(120 / 5)  # one sender: the same stage of the other cluster
    assert change.gain == pytest.approx(1.0)


def test_a_large_cluster_gives_a_spare_that_was_asked_for() -> None:
    seven = [*SIX, machine("loft", speed=0.5)]
    task = replace(task_of(seven), min_stages=3, num_spares=1)
    rows_of = [["attic", "barn", "cellar"], ["den", "eaves", "flat", "loft"]]
    clusters = tuple(plan_row(task, row) for row in rows_of)
    running = FleetPlan(clusters, (), (), sum(c.samples_per_s for c in clusters), "")
    change = replan(task, running, form=None)
    assert [c.members for c in change.plan.clusters] == [("attic", "barn", "cellar"), ("den", "eaves", "flat")]
    assert [spare.name for spare in change.plan.spares] == ["loft"], "it costs least"
    assert change.reason.startswith("hold loft back")
    assert replan(task, change.plan, form=None).plan.clusters == change.plan.clusters, "once is enough"

    after = replace(without(task, "attic"), min_stages=3, num_spares=1)
    assert replan(after, change.plan, form=None).plan.spares == (), "a loss is what spares are for"
    smallest = replace(task, min_stages=4)
    assert len(replan(smallest, running, form=None).plan.clusters[1].members) == 4


def test_survivors_share_the_work_if_there_is_no_spare() -> None:
    task = task_of(SIX)
    change = replan(without(task, "eaves"), in_rows(task), form=None)
    assert [c.members for c in change.plan.clusters] == [("attic", "barn", "cellar"), ("den", "flat")]
    assert change.reason.startswith("split cluster 1 again over the 2 left")
    assert change.moved_bytes == moved_bytes(in_rows(task).clusters, change.plan.clusters) > 0


def test_who_is_left_is_parked_if_the_model_no_longer_fits() -> None:
    task = with_change(task_of([*SIX[:5], machine("flat", memory_bytes=350 * MB)]), "den", memory_bytes=350 * MB)
    running = in_rows(task)
    assert len(running.clusters) == 2
    change = replan(without(task, "eaves"), running, form=None)
    assert [c.members for c in change.plan.clusters] == [("attic", "barn", "cellar")]
    assert {idle.name for idle in change.plan.spares} == {"den", "flat"}
    assert (change.moved_bytes, change.gain) == (0, 0.0)
    assert change.reason == "park cluster 1: eaves is gone"


def test_a_slower_machine_gets_less() -> None:
    task = task_of(SIX)
    running = in_rows(task)
    change = replan(with_change(task, "barn", speed=0.4), running, form=None)
    assert change.reason.startswith("cut cluster 0 again")
    assert change.plan.clusters[0].members == running.clusters[0].members
    first, last = change.plan.clusters[0].partition.cuts
    assert last - first == 2
    assert change.plan.clusters[1] == running.clusters[1]
    assert change.gain > 0.05


def test_a_machine_that_hardly_does_anything_is_dropped() -> None:
    task = task_of(SIX)
    change = replan(with_change(task, "barn", speed=0.02), in_rows(task), form=None)
    assert change.plan.clusters[0].members == ("attic", "cellar")
    assert [idle.name for idle in change.plan.spares] == ["barn"]


def test_a_small_change_is_not_worth_moving_for() -> None:
    task = task_of(SIX)
    running = in_rows(task)
    assert replan(with_change(task, "barn", speed=0.97), running, form=None).reason.startswith("keep")
    slower = with_change(task, "barn", speed=0.4)
    assert replan(slower, running, form=None, horizon_s=10.0).moved_bytes == 0  # it would take longer than that to move
    assert replan(slower, running, form=None, hysteresis=2.0).moved_bytes == 0


def test_new_machines_form_a_cluster_of_their_own() -> None:
    task = task_of(SIX)
    running = in_rows(task)
    wider = task_of([*SIX, *(machine(name) for name in ("gate", "hall", "inn"))])
    change = replan(wider, running, form=in_rows)
    assert rows(change.plan.clusters) > rows(running.clusters)
    assert change.plan.clusters[2].members == ("gate", "hall", "inn")
    assert change.gain == pytest.approx(0.5)
    assert "add a cluster of gate, hall, inn" in change.reason
    alone = replan(wider, running, form=None)
    assert (rows(alone.plan.clusters), alone.moved_bytes) == (rows(running.clusters), 0)
    assert [idle.name for idle in alone.plan.spares] == ["gate", "hall", "inn"]


def test_a_newcomer_too_small_for_anything_is_left_out() -> None:
    task = task_of(SIX)
    change = replan(task_of([*SIX, machine("tiny", memory_bytes=MB)]), in_rows(task), form=None)
    assert [idle.name for idle in change.plan.left_out] == ["tiny"]
    assert "smallest stage takes" in change.plan.left_out[0].reason


def test_a_much_better_plan_is_worth_moving_for() -> None:
    slow, fast = [machine(name, speed=0.2) for name in "abc"], [machine(name) for name in "xyz"]
    mixed = task_of([m for pair in zip(slow, fast, strict=True) for m in pair])
    running = replace(in_rows(mixed), reason="")
    apart = task_of([*fast, *slow])
    change = replan(apart, running, form=in_rows)
    assert rows(change.plan.clusters) == rows(in_rows(apart).clusters)
    assert change.reason.startswith("form all again")
    assert change.gain == pytest.approx(in_rows(apart).samples_per_s / running.samples_per_s - 1)
    assert change.moved_bytes == moved_bytes(running.clusters, change.plan.clusters)


def test_of_equal_gains_the_one_that_moves_less() -> None:
    task = task_of(SIX)
    running = in_rows(task)
    left = without(task, "eaves")

    def in_other_order(task: Task) -> FleetPlan:
        """As good as mending, but every machine has another stage."""
        members = [["cellar", "attic", "barn"], ["flat", "den"]]
        if len(task.fleet.machines) < 5:
            raise DoesNotFit("all or nothing", 1, ())
        clusters = tuple(plan_row(task, row) for row in members)
        return FleetPlan(clusters, (), (), sum(c.samples_per_s for c in clusters), "turned round")

    repaired, fresh = replan(left, running, form=in_other_order), in_other_order(left)
    assert repaired.plan.samples_per_s == pytest.approx(fresh.samples_per_s)
    assert 0 < repaired.moved_bytes < state_transfers(left, running.clusters, fresh.clusters).num_bytes


def test_the_last_cluster_is_formed_again_or_there_is_no_plan() -> None:
    task = task_of(SIX[:3])
    running = in_rows(task)
    only = without(task, "barn", "attic")  # its memory is not enough
    with pytest.raises(PlanError, match="form clusters again"):
        replan(only, running, form=None)
    with pytest.raises(DoesNotFit, match="no row fits"):
        replan(only, running, form=in_rows)
    other = task_of([machine(name) for name in "xyz"])
    change = replan(other, running, form=in_rows)
    assert (change.gain, change.moved_bytes) == (inf, moved_bytes((), in_rows(other).clusters))
    assert change.move_s == pytest.approx(3 * 70 / 20)  # no machine has it: the largest stage by download alone


@pytest.mark.parametrize("wrong", [{"horizon_s": 0.0}, {"horizon_s": inf}, {"hysteresis": -0.1}])
def test_invalid_values_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        replan(task_of(SIX), in_rows(task_of(SIX)), form=None, **wrong)


machines = st.builds(
    machine,
    st.just("x"),
    memory_bytes=st.sampled_from([250.0 * MB, 400.0 * MB, 900.0 * MB]),
    speed=st.sampled_from([0.5, 1.0, 2.0]),
    up_bytes_per_s=st.sampled_from([1.0 * MB, 10.0 * MB]),
)


@st.composite
def changed_fleets(draw: st.DrawFn) -> tuple[Task, Task, FleetPlan]:
    """A fleet in rows, and what became of it: some lost, some changed, some new."""
    before = [replace(m, name=f"m{i}") for i, m in enumerate(draw(st.lists(machines, min_size=4, max_size=8)))]
    size = draw(st.integers(2, 4))
    try:
        running = in_rows(task_of(before), size)
    except DoesNotFit:
        before = [replace(m, memory_bytes=900.0 * MB) for m in before]
        running = in_rows(task_of(before), size)
    lost = draw(st.sets(st.sampled_from([m.name for m in before]), max_size=2))
    rate_limiter = st.sampled_from([1.0, 1.0, 1.0, 0.3, 3.0])
    after = [replace(m, speed=m.speed * draw(rate_limiter)) for m in before if m.name not in lost]
    new = [replace(m, name=f"n{i}") for i, m in enumerate(draw(st.lists(machines, max_size=3)))]
    return task_of(before), task_of([*after, *new]), running


@pytest.mark.parametrize(("form", "examples"), [(None, 50), (in_rows, 40), (form_clusters, 5)])
def test_whatever_happens_the_plan_is_sound(form: FormClusters | None, examples: int) -> None:
    @given(case=changed_fleets())
    @settings(max_examples=examples, deadline=None)
    def check(case: tuple[Task, Task, FleetPlan]) -> None:
        check_change(*case, form)

    check()


def check_change(before: Task, task: Task, running: FleetPlan, form: FormClusters | None) -> None:
    try:
        change = replan(task, running, form=form)
    except PlanError:
        assert all(not cluster_goes_on(task, cluster) for cluster in running.clusters)
        return
    plan = change.plan
    names = [n for c in plan.clusters for n in c.members] + [i.name for i in (*plan.spares, *plan.left_out)]
    assert sorted(names) == sorted(m.name for m in task.fleet.machines)
    for cluster in plan.clusters:
        check_cluster(task, cluster)
    assert plan.samples_per_s == pytest.approx(sum(c.samples_per_s for c in plan.clusters))
    assert change.moved_bytes == moved_bytes(running.clusters, plan.clusters)
    assert (change.move_s > 0) == (change.moved_bytes > 0)
    check_hysteresis(task, running, change)
    if form is None:
        same = {m.name for m in task.fleet.machines if m in before.fleet.machines}
        untouched = [c for c in running.clusters if same.issuperset(c.members)]
        assert rows(untouched) <= rows(plan.clusters)


def cluster_goes_on(task: Task, cluster: ClusterPlan) -> bool:
    here = {m.name for m in task.fleet.machines}
    return here.issuperset(cluster.members) and try_row(task, cluster.members, cluster.partition.cuts) is not None


def check_cluster(task: Task, cluster: ClusterPlan) -> None:
    """Every op in one stage, and each stage within its machine's memory."""
    found = cluster.partition
    stages = list(pairwise((0, *found.cuts, CHAIN.num_ops)))
    assert all(start < stop for start, stop in stages)
    assert len(cluster.members) == len(stages) >= task.min_stages
    for name, (start, stop), depth in zip(cluster.members, stages, found.depths, strict=True):
        assert stage_memory(share(CHAIN, start, stop), depth, MODEL).total <= task.fleet[name].memory_bytes


def check_hysteresis(task: Task, running: FleetPlan, change: PlanChange) -> None:
    """A plan that ends running clusters must be at least 5 % faster."""
    intact = [
        plan_row(task, cluster.members, cluster.partition.cuts)
        for cluster in running.clusters
        if cluster_goes_on(task, cluster)
    ]
    given_up = [c.samples_per_s for c in intact if rows([c]) - rows(change.plan.clusters)]
    gained = [c.samples_per_s for c in change.plan.clusters if rows([c]) - rows(intact)]
    if given_up:
        assert sum(gained) > 1.05 * sum(given_up)
    assert change.gain >= -1e-9
