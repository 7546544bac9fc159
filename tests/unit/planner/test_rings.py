"""Rings have one owner per cluster in the best order, and send what the formula says."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.planner import Chain, Node, Problem, Storage
from ravnest.planner.fleet import ClusterPlan, Fleet, Machine, Task
from ravnest.planner.partition import Partition, partition
from ravnest.planner.rings import Rings, choose_rings, order_ring
from tests.unit.planner.test_segments import chain_of, cut_chains

MB = 1_000_000


@st.composite
def fleets(draw: st.DrawFn, least: int = 2, most: int = 6) -> Fleet:
    """Machines of a few sites and regions; a site lies in one region, and its network is quick."""
    regions = {"": ("", "eu", "us"), "home": ("eu",), "lab": ("us",), "den": ("eu",)}
    lines = st.sampled_from([1.0, 2.0, 5.0, 10.0])

    def machine(number: int) -> Machine:
        site = draw(st.sampled_from(sorted(regions)))
        return Machine(
            name=f"m{number}",
            up_bytes_per_s=draw(lines),
            down_bytes_per_s=draw(lines),
            latency_s=draw(st.sampled_from([0.001, 0.01, 0.02])),
            site=site,
            region=draw(st.sampled_from(regions[site])),
        )

    num = draw(st.integers(least, most))
    return Fleet(machines=tuple(map(machine, range(num))), lan_bytes_per_s=draw(st.sampled_from([10.0, 100.0])))


def quality(fleet: Fleet, order: Sequence[Machine]) -> tuple[float, float]:
    links = [fleet.link(a, b) for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    return -min(link.forward_bytes_per_s for link in links), sum(link.latency_s for link in links)


@given(fleet=fleets())
@settings(max_examples=150, deadline=None)
def test_the_order_is_the_best_of_all(fleet: Fleet) -> None:
    order = order_ring(fleet.machines)
    assert sorted(m.name for m in order) == sorted(m.name for m in fleet.machines)
    first, *others = fleet.machines
    best = min(quality(fleet, (first, *rest)) for rest in permutations(others))
    assert quality(fleet, order) == pytest.approx(best)


def test_a_slow_line_hides_behind_its_site() -> None:
    slow = Machine(name="slow", up_bytes_per_s=1.0, down_bytes_per_s=9.0, site="home")
    others = [Machine(name=f"m{i}", up_bytes_per_s=5.0, down_bytes_per_s=5.0) for i in range(3)]
    estimator = Machine(name="quick", up_bytes_per_s=8.0, down_bytes_per_s=2.0, site="home")
    fleet = Fleet(machines=(slow, estimator, *others))
    order = [m.name for m in order_ring(fleet.machines)]
    assert order[(order.index("slow") + 1) % 5] == "quick"
    assert quality(fleet, order_ring(fleet.machines))[0] == -5.0


def as_clusters(chain: Chain, cuts: Sequence[tuple[int, ...]]) -> list[ClusterPlan]:
    """Clusters that are cut so, of machines m0, m1, ..."""
    clusters: list[ClusterPlan] = []
    for own in cuts:
        first = sum(len(cluster.members) for cluster in clusters)
        members = tuple(f"m{first + j}" for j in range(len(own) + 1))
        clusters.append(ClusterPlan(members, cut_at(chain, own), 1.0, ""))
    return clusters


def cut_at(chain: Chain, cuts: tuple[int, ...]) -> Partition:
    return partition(Problem(chain=replace(chain, cuts=cuts), nodes=(Node(),) * (len(cuts) + 1)))


@st.composite
def averaged(draw: st.DrawFn) -> tuple[Task, list[ClusterPlan]]:
    chain, cuts = draw(cut_chains())
    clusters = as_clusters(chain, cuts)
    num = sum(len(cluster.members) for cluster in clusters)
    return Task(chain=chain, fleet=draw(fleets(num, num))), clusters


@given(case=averaged())
@settings(max_examples=60, deadline=None)
def test_rings_have_one_owner_per_cluster_and_share_out_the_parameters(case: tuple[Task, list[ClusterPlan]]) -> None:
    task, clusters = case
    found = choose_rings(task, clusters)
    if len(clusters) == 1:
        assert found == Rings((), dict.fromkeys(clusters[0].members, 0.0), 0.0, found.reason)
        return
    averaged = sorted(w for ring in found.rings for w in ring.segment.weights)
    assert [w for w in averaged if task.chain.weights[w].num_bytes] == [
        w for w, storage in enumerate(task.chain.weights) if storage.num_bytes
    ]
    for ring in found.rings:
        assert len(ring.members) == len(clusters)
        for cluster, stage in zip(clusters, ring.segment.owners, strict=True):
            assert set(ring.members) & set(cluster.members) == {cluster.members[stage]}


@given(case=averaged())
@settings(max_examples=60, deadline=None)
def test_a_node_sends_what_the_formula_says(case: tuple[Task, list[ClusterPlan]]) -> None:
    task, clusters = case
    found, count = choose_rings(task, clusters), len(clusters)
    assert found.sent_bytes.keys() == {name for cluster in clusters for name in cluster.members}
    for cluster in clusters:
        stages = pairwise((0, *cluster.partition.cuts, task.chain.num_ops))
        for name, (start, stop) in zip(cluster.members, stages, strict=True):
            owned = sum(s.num_bytes for s in task.chain.weights if start <= min(s.ops) < stop)
            assert found.sent_bytes[name] == pytest.approx(2 * (count - 1) / count * owned)
            if not task.fleet[name].site:  # else a part of it stays within the site
                machine = task.fleet[name]
                line = min(machine.up_bytes_per_s, machine.down_bytes_per_s)
                assert found.round_s >= found.sent_bytes[name] / line * (1 - 1e-9)
    assert found.round_s >= max((ring.seconds for ring in found.rings), default=0.0)


def test_two_clusters_by_hand() -> None:
    chain = chain_of(4, *(Storage(100 * MB, (i,)) for i in range(4)))
    clusters = as_clusters(chain, [(1,), (3,)])
    lines = {"m0": 10, "m1": 20, "m2": 50, "m3": 50}
    machines = tuple(
        Machine(name=name, up_bytes_per_s=up * MB, down_bytes_per_s=100 * MB, latency_s=0.01)
        for name, up in lines.items()
    )
    found = choose_rings(Task(chain=chain, fleet=Fleet(machines=machines)), clusters)
    assert [set(ring.members) for ring in found.rings] == [{"m0", "m2"}, {"m1", "m2"}, {"m1", "m3"}]
    assert found.sent_bytes == {"m0": 100 * MB, "m1": 300 * MB, "m2": 300 * MB, "m3": 100 * MB}
    assert [ring.seconds for ring in found.rings] == pytest.approx([10.04, 10.04, 5.04])
    assert found.round_s == pytest.approx(15.0)
    assert found.reason == "3 rings of 2: the upload of m1, 300.0 MB, is the longest part of a round, 15 s"


def test_a_ring_of_long_ways_is_as_slow_as_its_latency() -> None:
    chain = chain_of(2, Storage(10, (0,)))
    machines = tuple(Machine(name=f"m{i}", latency_s=0.1, up_bytes_per_s=1e9) for i in range(3))
    found = choose_rings(Task(chain=chain, fleet=Fleet(machines=machines)), as_clusters(chain, [(), (), ()]))
    assert found.round_s == pytest.approx(4 * 0.2)
    assert found.reason.startswith("1 ring of 3: the ring of ops 0 to 2, 10 B, is the slowest")


def test_without_parameters_there_is_no_ring() -> None:
    chain = chain_of(3)
    fleet = Fleet(machines=tuple(Machine(name=f"m{i}") for i in range(4)))
    found = choose_rings(Task(chain=chain, fleet=fleet), as_clusters(chain, [(1,), (2,)]))
    assert (found.rings, found.round_s) == ((), 0.0)
    assert "nothing to average" in found.reason


def test_a_thousand_machines_are_ringed_quickly() -> None:
    rng = random.Random(1)
    chain = chain_of(800, *(Storage(MB, (i,)) for i in range(800)))
    some = cut_at(chain, (100, 200))
    cuts = rng.sample(range(1, 800), 666)  # no two alike: every ring has other members
    clusters = [
        ClusterPlan(tuple(f"m{c + j}" for j in range(3)), replace(some, cuts=tuple(sorted(own))), 1.0, "")
        for c, own in zip(range(0, 999, 3), zip(cuts[::2], cuts[1::2], strict=True), strict=True)
    ]
    machines = tuple(
        Machine(
            name=f"m{i}",
            up_bytes_per_s=rng.uniform(1e6, 1e8),
            down_bytes_per_s=rng.uniform(1e6, 1e8),
            site=rng.choice(["", f"site{i // 5}"]),
            region=f"r{i // 200}",
        )
        for i in range(999)
    )
    began = time.process_time()
    found = choose_rings(Task(chain=chain, fleet=Fleet(machines=machines)), clusters)
    assert time.process_time() - began < 3  # about 0.5 s
    assert len(found.rings) == 667
    assert found.round_s < inf
