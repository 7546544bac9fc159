"""Clusters of uneven machines: what holds for every plan, and what a good one does."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

from benchmarks.planner.fleets import gpt_chain, home_pcs
from ravnest.planner import DoesNotFit, Fleet, Machine, MemoryModel, Problem, Storage, Task, TooManyNodes
from ravnest.planner.clusters.search import form_clusters
from ravnest.planner.partition import partition
from tests.unit.planner.fleets import check, tasks
from tests.unit.planner.test_partition import chain_of

SMALL = MemoryModel(base_bytes=0, correction_copies=0, optimizer_ratio=0.0, link_buffers=0)  # 3 times the weights


def one_row_per_s(task: Task) -> float:
    """Samples per second of all machines in one row, largest memory first; 0 if that is impossible."""
    machines = sorted(task.fleet.machines, key=lambda m: -m.memory_bytes)
    links = tuple(task.fleet.link(a, b) for a, b in pairwise(machines))
    problem = Problem(
        chain=task.chain, nodes=tuple(m.node for m in machines), links=links, memory=task.memory,
        max_depth=task.max_depth, slack=task.slack,
    )  # fmt: skip
    try:
        found = partition(problem)
    except (DoesNotFit, TooManyNodes):
        return 0.0
    return task.microbatch / found.interval_s if found.interval_s else inf


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.soak)])
def test_every_plan_is_sound_and_no_worse_than_one_row(examples: int) -> None:
    settings(max_examples=examples, deadline=None)(given(task=tasks())(check_against_one_row))()


def check_against_one_row(task: Task) -> None:
    task = replace(task, num_spares=0)
    try:
        plan = form_clusters(task)
    except DoesNotFit:
        assert one_row_per_s(task) == 0
        return
    check(task, plan)
    if len(task.fleet.machines) >= task.min_stages:
        assert plan.samples_per_s >= one_row_per_s(task) * 0.97


@given(task=tasks())
@settings(max_examples=20, deadline=None)
def test_spares_and_determinism(task: Task) -> None:
    try:
        plan = form_clusters(task, seed=3)
    except DoesNotFit:
        return
    check(task, plan)
    assert plan == form_clusters(task, seed=3)


def fleet_of(*machines: Machine, **changes: Any) -> Fleet:
    return Fleet(machines=tuple(replace(m, name=f"m{i}") for i, m in enumerate(machines)), **changes)


def weighted(num: int = 8) -> Any:
    """Ten bytes of weights an op: with SMALL 30 bytes of memory, 240 for all eight."""
    return chain_of(num, weights=tuple(Storage(10, (i,)) for i in range(num)))


ANY = Machine(name="any", memory_bytes=150.0)


def test_minimal_clusters_of_equal_machines() -> None:
    plan = form_clusters(Task(chain=weighted(), fleet=fleet_of(*[ANY] * 8), memory=SMALL))
    assert [len(cluster.members) for cluster in plan.clusters] == [2, 2, 2, 2]
    assert plan.samples_per_s == pytest.approx(4 / 12)


def test_alike_lines_end_up_together() -> None:
    estimator, slow = replace(ANY, up_bytes_per_s=100.0), replace(ANY, up_bytes_per_s=5.0)
    fleet = fleet_of(estimator, slow, estimator, slow)
    plan = form_clusters(Task(chain=weighted(), fleet=fleet, memory=SMALL))
    assert {frozenset(cluster.members) for cluster in plan.clusters} == {
        frozenset({"m0", "m2"}),
        frozenset({"m1", "m3"}),
    }


def test_a_slow_line_is_kept_at_the_end_of_a_row() -> None:
    third = replace(ANY, memory_bytes=100.0)
    plan = form_clusters(
        Task(chain=weighted(), fleet=fleet_of(third, replace(third, up_bytes_per_s=10.0), third), memory=SMALL)
    )
    assert len(plan.clusters) == 1
    assert plan.clusters[0].members[1] != "m1"
    assert plan.samples_per_s == pytest.approx(1 / 10)


def test_who_would_slow_the_others_is_no_member_and_the_reason_says_why() -> None:
    fleet = fleet_of(ANY, ANY, replace(ANY, up_bytes_per_s=0.5))
    plan = form_clusters(Task(chain=weighted(), fleet=fleet, memory=SMALL))
    assert plan.samples_per_s == pytest.approx(1 / 12)
    (spare,) = plan.spares
    assert spare.name == "m2"
    assert "its upload of 0 B/s would slow the cluster of m" in spare.reason
    assert "from 0.0832 to 0.00" in spare.reason
    assert "memory for 2 of 2 stages" in spare.reason


def test_too_small_for_anything_is_left_out() -> None:
    plan = form_clusters(
        Task(chain=weighted(), fleet=fleet_of(ANY, ANY, replace(ANY, memory_bytes=20.0)), memory=SMALL)
    )
    (left,) = plan.left_out
    assert left.name == "m2"
    assert left.reason == "too little memory: the smallest stage takes 30 B, it offers 20 B"


def test_sites_are_used() -> None:
    slow = replace(ANY, up_bytes_per_s=1.0, down_bytes_per_s=1.0)
    fleet = fleet_of(*[replace(slow, site=site) for site in ("attic", "lab", "attic", "lab")])
    plan = form_clusters(Task(chain=weighted(), fleet=fleet, memory=SMALL))
    assert plan.samples_per_s == pytest.approx(2 / 12)
    assert {frozenset(c.members) for c in plan.clusters} == {frozenset({"m0", "m2"}), frozenset({"m1", "m3"})}


def test_near_links_are_preferred() -> None:
    regions = ["eu", "us", "eu", "us", "eu", "us", "eu", "us"]
    fleet = fleet_of(*[replace(ANY, region=region) for region in regions])
    plan = form_clusters(Task(chain=weighted(), fleet=fleet, memory=SMALL))
    assert all(len({fleet[name].region for name in cluster.members}) == 1 for cluster in plan.clusters)


def test_near_links_are_found_among_many() -> None:
    rng = Random(0)
    regions = ["eu", "us", "asia"]
    fleet = fleet_of(*[replace(ANY, region=rng.choice(regions), speed=rng.choice([0.9, 1.0, 1.1])) for _ in range(30)])
    plan = form_clusters(Task(chain=weighted(), fleet=fleet, memory=SMALL))
    far = sum(len({fleet[name].region for name in cluster.members}) > 1 for cluster in plan.clusters)
    assert far <= 0.5 * len(plan.clusters)  # by chance two in three


def test_spares_are_those_that_cost_least() -> None:
    fleet = fleet_of(ANY, ANY, replace(ANY, speed=0.9), ANY, replace(ANY, speed=0.5), ANY, ANY)
    plan = form_clusters(Task(chain=weighted(), fleet=fleet, memory=SMALL, num_spares=1))
    assert [spare.name for spare in plan.spares] == ["m4"]
    assert "held back as a spare" in plan.spares[0].reason


def test_more_spares_than_machines() -> None:
    plan = form_clusters(Task(chain=weighted(), fleet=fleet_of(*[ANY] * 4), memory=SMALL, num_spares=9))
    assert len(plan.clusters) == 1
    assert len(plan.spares) == 2
    assert "9 spares requested" in plan.reason


def test_one_machine() -> None:
    plan = form_clusters(Task(chain=weighted(), fleet=fleet_of(replace(ANY, memory_bytes=inf)), memory=SMALL))
    assert [cluster.members for cluster in plan.clusters] == [("m0",)]
    assert "clusters smaller than 2 are allowed" in plan.reason


def test_no_machine_holds_the_whole_model_if_another_way_is_possible() -> None:
    plan = form_clusters(Task(chain=weighted(), fleet=fleet_of(*[replace(ANY, memory_bytes=inf)] * 5), memory=SMALL))
    assert all(len(cluster.members) >= 2 for cluster in plan.clusters)
    assert "allowed" not in plan.reason


def test_more_machines_than_cuts() -> None:
    tiny = replace(ANY, memory_bytes=130.0)
    plan = form_clusters(Task(chain=weighted(3), fleet=fleet_of(*[tiny] * 11), memory=SMALL))
    assert sum(len(cluster.members) for cluster in plan.clusters) + len(plan.spares) == 11
    assert max(len(cluster.members) for cluster in plan.clusters) <= 3


def test_a_cap_on_depth_is_kept() -> None:
    task = Task(chain=weighted(), fleet=home_pcs(12, 0), memory=SMALL, accumulate=2)
    plan = form_clusters(task)
    check(task, plan)


def test_a_model_that_does_not_fit_says_what_would() -> None:
    chain = chain_of(8, saved=tuple(Storage(100, (i,)) for i in range(8)))
    with pytest.raises(DoesNotFit) as refusal:
        form_clusters(Task(chain=chain, fleet=fleet_of(*[replace(ANY, memory_bytes=250.0)] * 3), memory=SMALL))
    text = str(refusal.value)
    for words in (
        "this fleet of 3 nodes",
        "150 B in all is missing",
        "with half the microbatch",
        "bf16",
        "1 more node",
    ):
        assert words in text
    assert refusal.value.missing_bytes == 150


def test_a_thousand_identical_machines() -> None:
    machines = tuple(Machine(name=f"m{i}", memory_bytes=8e9) for i in range(1000))
    began = time.process_time()
    plan = form_clusters(Task(chain=gpt_chain(), fleet=Fleet(machines=machines)))
    assert time.process_time() - began < 30  # about 1 s
    assert plan.samples_per_s > 0.9 * 1000 / 2.481  # 2.481 s for a machine of speed 1


@pytest.mark.parametrize("count", [40])
def test_uneven_home_pcs(count: int) -> None:
    task = Task(chain=gpt_chain(), fleet=home_pcs(count, 7), num_spares=2)
    plan = form_clusters(task, effort=0.3)
    check(task, plan)
    assert len(plan.spares) >= 2


def test_invalid_effort_is_rejected() -> None:
    with pytest.raises(ValueError, match="effort must be > 0"):
        form_clusters(Task(chain=weighted(), fleet=fleet_of(ANY)), effort=0)
