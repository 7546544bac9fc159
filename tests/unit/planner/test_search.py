"""The parts of the search for clusters: quick rates, orders, groupings; and the yardsticks of its benchmark."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from hypothesis import given, settings

from benchmarks.planner.__main__ import stages_over_memory
from benchmarks.planner.bound import most_samples_per_s
from benchmarks.planner.exhaustive import best_samples_per_s
from benchmarks.planner.fleets import gpt_chain, hard_task, home_pcs
from ravnest.planner import DoesNotFit, Machine, Problem, Task, TooManyNodes
from ravnest.planner.clusters.estimate import (
    GAIN,
    RateEstimator,
    Row,
    best_order,
    latency_s,
    least_latency_order,
    with_insertion,
)
from ravnest.planner.clusters.local_search import Grouping, best_regrouping
from ravnest.planner.clusters.search import form_clusters, search_groupings
from ravnest.planner.fleet import Fleet
from ravnest.planner.partition import Partition, partition
from tests.unit.planner.fleets import tasks


def exact(task: Task, row: Row) -> Partition | None:
    machines = [task.fleet.machines[m] for m in row]
    problem = Problem(
        chain=task.chain, nodes=tuple(m.node for m in machines), memory=task.memory, max_depth=task.max_depth,
        links=tuple(task.fleet.link(a, b) for a, b in pairwise(machines)), slack=task.slack, tolerance=0.0,
    )  # fmt: skip
    try:
        return partition(problem)
    except (DoesNotFit, TooManyNodes):
        return None


@given(task=tasks(max_machines=4))
@settings(max_examples=150, deadline=None)
def test_what_is_quickly_found_can_be_held(task: Task) -> None:
    estimator, row = RateEstimator(task), tuple(range(len(task.fleet.machines)))
    rate, found = estimator.per_s(row), exact(task, row)
    if found is None:
        assert rate == 0
    elif rate:
        assert rate * found.interval_s <= 1 + 1e-6
        assert rate <= estimator.bound_per_s(row)
        assert estimator.reaches(row, rate * 0.999)


def test_equal_cuts_and_speeds_are_found_exactly() -> None:
    rng = Random(0)
    fleet = Fleet(machines=tuple(replace(m, speed=1.0) for m in home_pcs(30, 5).machines))
    task = Task(chain=gpt_chain(layers=6), fleet=fleet)
    estimator, compared = RateEstimator(task), 0
    for _ in range(40):
        row = tuple(rng.sample(range(30), rng.randint(2, 5)))
        found = exact(task, row)
        if found is not None:
            compared += 1
            assert 0.99 <= estimator.per_s(row) * found.interval_s <= 1 + 1e-6
    assert compared > 20


@given(task=tasks(max_machines=4))
@settings(max_examples=50, deadline=None)
def test_a_few_machines_are_tried_in_all_orders(task: Task) -> None:
    estimator, members = RateEstimator(task), range(len(task.fleet.machines))
    found = estimator.per_s(best_order(estimator, members))
    assert found * GAIN >= max(map(estimator.per_s, permutations(members))) * 0.999


@given(task=tasks(max_machines=5))
@settings(max_examples=50, deadline=None)
def test_longer_orders_hold_everybody_once(task: Task) -> None:
    estimator, members = RateEstimator(task), list(range(len(task.fleet.machines)))
    assert sorted(best_order(estimator, members, all_orders=2)) == members
    row = best_order(estimator, members)
    assert sorted(least_latency_order(estimator, row)) == members
    assert latency_s(estimator, least_latency_order(estimator, row)) <= latency_s(estimator, row)
    longer = with_insertion(estimator, tuple(members[1:]), 0, 0.0) if len(members) > 1 else None
    if longer:
        assert sorted(longer[0]) == members
        assert longer[1] == estimator.per_s(longer[0]) > 0


@given(task=tasks(max_machines=4))
@settings(max_examples=50, deadline=None)
def test_a_few_machines_are_grouped_in_the_best_way(task: Task) -> None:
    estimator, members = RateEstimator(task), list(range(len(task.fleet.machines)))
    rows = best_regrouping(estimator, members, task.min_stages, all_orders=4)
    used = [m for row in rows for m in row]
    assert len(used) == len(set(used))
    assert all(len(row) >= task.min_stages for row in rows)
    best = {
        chosen: estimator.per_s(best_order(estimator, chosen))
        for size in range(task.min_stages, len(members) + 1)
        for chosen in combinations(members, size)
    }
    two_rows = (a_rate + b_rate for a, a_rate in best.items() for b, b_rate in best.items() if not {*a} & {*b})
    total = sum(map(estimator.per_s, rows))
    assert total >= max(best.values(), default=0.0) - 1e-9
    assert total >= max(two_rows, default=0.0) - 1e-9


def test_groups_keep_their_books() -> None:
    estimator = RateEstimator(Task(chain=gpt_chain(layers=4), fleet=home_pcs(9, 1)))
    grouping = Grouping(estimator, range(9), [(0, 1), (2, 3), (4, 5)])
    grouping.replace([0, 2], [(5, 6, 0)])
    assert sorted(grouping.rows) == [(2, 3), (5, 6, 0)]
    assert sorted(grouping.idle) == [1, 4, 7, 8]
    assert all(grouping.rows[grouping.row_of[m]].count(m) == 1 for m in (0, 2, 3, 5, 6))
    assert grouping.rates == [estimator.per_s(row) for row in grouping.rows]
    grouping.withdraw([1, 7])
    assert sorted(grouping.idle) == [4, 8]


@pytest.mark.parametrize("seed", [1, 2, pytest.param(5, marks=pytest.mark.soak), 9, 12, 24])
def test_small_fleets_against_exhaustive_search(seed: int) -> None:
    task = hard_task(seed)
    best = best_samples_per_s(task)
    found = form_clusters(task).samples_per_s
    assert 0.95 * best <= found <= best * (1 + 1e-6) <= most_samples_per_s(task) * (1 + 1e-6)
    searched = search_groupings(RateEstimator(task), Random(0), min_stages=2, budget=4000, all_groupings=0)
    assert searched.per_s >= 0.85 * best


def test_large_fleets_come_close_to_the_bound() -> None:
    task = Task(chain=gpt_chain(), fleet=home_pcs(40, 3))
    plan = form_clusters(task, effort=0.3)
    assert 0.85 * most_samples_per_s(task) <= plan.samples_per_s <= most_samples_per_s(task)
    assert stages_over_memory(task, plan) == 0


def test_more_effort_is_no_worse() -> None:
    task = Task(chain=gpt_chain(layers=12), fleet=home_pcs(20, 4))
    assert form_clusters(task, effort=0.5).samples_per_s >= 0.98 * form_clusters(task, effort=0.02).samples_per_s


def test_the_bound_of_equal_machines_is_their_speed() -> None:
    machines = tuple(Machine(name=f"m{i}") for i in range(8))
    task = Task(chain=gpt_chain(layers=12), fleet=Fleet(machines=machines))
    ideal = 8 / sum((*task.chain.forward_s, *task.chain.backward_s))
    assert ideal <= most_samples_per_s(task) <= 1.03 * ideal
