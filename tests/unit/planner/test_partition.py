"""The best cuts, against all cuts."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from ravnest.planner import Chain, DoesNotFit, LinkSpec, MemoryModel, Node, Problem, Storage, TooManyNodes, depths
from ravnest.planner.partition import partition
from ravnest.planner.partition.fit import missing_bytes
from tests.unit.planner.instances import (
    all_cuts,
    brute_force,
    least_interval_s,
    line_seconds,
    link_seconds,
    problems,
    share,
    stage_seconds,
    want,
)

MB = 1_000_000
SMALL = MemoryModel(base_bytes=0, correction_copies=1)


@given(problem=problems())
@settings(max_examples=120, deadline=None)
def test_it_is_the_best_there_is(problem: Problem) -> None:
    assert problem.depths is not None
    best = brute_force(problem, problem.depths)
    if best is None:
        with pytest.raises(DoesNotFit):
            partition(problem)
        return
    found = partition(problem)
    assert found.bottleneck_s == pytest.approx(best[0])
    assert list(found.stage_seconds) == pytest.approx(stage_seconds(problem, found.cuts))
    assert [s.interval_s for s in found.link_seconds] == pytest.approx(link_seconds(problem, found.cuts))
    for line, expected in zip(found.line_seconds, line_seconds(problem, found.cuts), strict=True):
        assert tuple(line) == pytest.approx(expected)
    assert sum(map(problem.chain.cut_bytes, found.cuts)) == best[1]
    assert sum(s * s for s in found.stage_seconds) == pytest.approx(best[2])
    check(problem, found.cuts, found.depths)
    assert [m.total <= n.memory_bytes for m, n in zip(found.memory, problem.nodes, strict=True)] == [True] * len(
        found.memory
    )
    assert found.depths == problem.depths


def check(problem: Problem, cuts: tuple[int, ...], in_flight: tuple[int, ...]) -> None:
    """Legal cuts, every op in exactly one stage, each within its node's memory."""
    assert set(cuts) <= set(problem.chain.cuts)
    assert len(cuts) == len(problem.nodes) - 1
    assert all(a < b for a, b in pairwise((0, *cuts, problem.chain.num_ops)))
    assert want(problem, cuts, in_flight) <= 0


@given(problem=problems(given_depths=False))
@settings(max_examples=50, deadline=None)
def test_depths_that_are_not_given_are_found(problem: Problem) -> None:
    try:
        found = partition(problem)
    except DoesNotFit:
        assert brute_force(problem, (1,) * len(problem.nodes)) is None
        return
    check(problem, found.cuts, found.depths)
    wanted = depths(
        found.stage_seconds, found.link_seconds, found.line_seconds, slack=problem.slack, max_depth=problem.max_depth
    )
    assert all(d <= w for d, w in zip(found.depths, wanted, strict=True))
    assert found.interval_s >= found.bottleneck_s
    if found.depths == wanted and problem.max_depth is None:
        assert found.interval_s == pytest.approx(found.bottleneck_s)
    assert found.interval_s == pytest.approx(least_interval_s(problem), rel=1e-5)


@given(problem=problems())
@settings(max_examples=50, deadline=None)
def test_missing_memory_is_exactly_what_is_missing(problem: Problem) -> None:
    assert problem.depths is not None
    missing = missing_bytes(problem)
    assert missing == min(want(problem, cuts, problem.depths) for cuts in all_cuts(problem))
    if missing > 0:
        with pytest.raises(DoesNotFit) as refusal:
            partition(problem)
        assert refusal.value.missing_bytes == missing
        partition(
            replace(problem, nodes=tuple(replace(n, memory_bytes=n.memory_bytes + missing) for n in problem.nodes))
        )


@given(problem=problems())
@settings(max_examples=50, deadline=None)
def test_stretches_are_added_up_exactly(problem: Problem) -> None:
    cut_points = problem.chain.cut_points(512)
    for k in range(1, cut_points.end + 1):
        for i in range(k):
            assert cut_points.share(i, k) == share(problem.chain, cut_points.bounds[i], cut_points.bounds[k])


def chain_of(num: int, **changes: Any) -> Chain:
    plain = Chain(
        forward_s=(1.0,) * num,
        backward_s=(2.0,) * num,
        cuts=tuple(range(1, num)),
        forward_bytes=(100,) * (num + 1),
        backward_bytes=(100,) * (num + 1),
    )
    return replace(plain, **changes)


def test_a_faster_node_gets_more() -> None:
    found = partition(Problem(chain=chain_of(8), nodes=(Node(speed=3.0), Node())))
    assert found.cuts == (6,)
    assert found.stage_seconds == (6.0, 6.0)
    assert "100%" in found.reason


def test_within_the_tolerance_the_cheaper_cut_is_taken() -> None:
    chain = chain_of(200, forward_bytes=tuple(1 if c == 99 else 100 for c in range(201)))
    two = (Node(), Node())
    assert partition(Problem(chain=chain, nodes=two, tolerance=0.02)).cuts == (99,)
    assert partition(Problem(chain=chain, nodes=two, tolerance=0.0)).cuts == (100,)


def test_a_slow_link_moves_the_cut_and_the_reason_says_so() -> None:
    chain = chain_of(8, forward_bytes=tuple(100 if c != 2 else 10 for c in range(9)))
    found = partition(Problem(chain=chain, nodes=(Node(), Node()), links=(LinkSpec(forward_bytes_per_s=4.0),)))
    assert found.cuts == (2,)
    assert found.bottleneck_s == 18.0
    narrow = LinkSpec(forward_bytes_per_s=0.5)
    assert (
        "link from stage 0 to stage 1"
        in partition(Problem(chain=chain, nodes=(Node(), Node()), links=(narrow,))).reason
    )


def test_one_node_needs_no_cut() -> None:
    found = partition(Problem(chain=chain_of(3), nodes=(Node(),)))
    assert (found.cuts, found.depths, found.bottleneck_s) == ((), (1,), 9.0)


def test_recomputation_takes_time() -> None:
    memory = MemoryModel(recompute=True)
    assert partition(Problem(chain=chain_of(4), nodes=(Node(), Node()), memory=memory)).bottleneck_s == 8.0


def test_more_nodes_than_stages() -> None:
    with pytest.raises(
        TooManyNodes, match="4 nodes given, but the program can be cut into 3 stages at most: use 3 nodes"
    ):
        partition(Problem(chain=chain_of(3), nodes=(Node(),) * 4))


def heavy_chain(num: int = 16) -> Chain:
    return chain_of(
        num,
        weights=tuple(Storage(1 * MB, (i,)) for i in range(num)),
        saved=tuple(Storage(10 * MB, (i,)) for i in range(num)),
    )


def test_what_does_not_fit_says_what_would() -> None:
    nodes = tuple(Node(memory_bytes=m * MB) for m in (100, 100))
    with pytest.raises(DoesNotFit) as refusal:
        partition(Problem(chain=heavy_chain(), nodes=nodes, memory=SMALL))
    assert 0 < refusal.value.missing_bytes < 200 * MB
    text = str(refusal.value)
    for words in ("MB more is needed", "with half the microbatch", "1 more node of 100.0 MB"):
        assert words in text


def test_given_depths_that_do_not_fit() -> None:
    problem = Problem(chain=heavy_chain(), nodes=(Node(memory_bytes=150 * MB),) * 2, memory=SMALL, depths=(3, 1))
    with pytest.raises(DoesNotFit, match="one microbatch in flight"):
        partition(problem)
    found = partition(replace(problem, depths=None))
    assert found.depths == (1, 1)
    assert found.interval_s == 2 * found.bottleneck_s
    assert "too few microbatches are in flight" in found.reason


def test_a_slow_upload_is_shared_by_both_neighbours_and_the_reason_says_so() -> None:
    chain = chain_of(9)
    nodes = (Node(), Node(up_bytes_per_s=10.0), Node())
    found = partition(Problem(chain=chain, nodes=nodes))
    assert found.line_seconds[1].up_s == found.interval_s == 20.0  # 100 bytes each way at 10 bytes a second
    assert "the upload of stage 1 is the slowest, 20 s per microbatch at 10 B/s" in found.reason
    at_the_end = partition(Problem(chain=chain, nodes=(nodes[1], nodes[0], nodes[2])))
    assert at_the_end.interval_s == 10.0
    on_one_site = partition(Problem(chain=chain, nodes=nodes, links=(LinkSpec(uses_line=False),) * 2))
    assert on_one_site.interval_s == 9.0


def test_a_cap_on_depth_counts_and_the_reason_says_so() -> None:
    nodes, links = (Node(),) * 3, (LinkSpec(latency_s=3.0),) * 2
    free = partition(Problem(chain=chain_of(9), nodes=nodes, links=links))
    assert (free.interval_s, free.depths[0]) == (9.0, 6)
    capped = partition(Problem(chain=chain_of(9), nodes=nodes, links=links, max_depth=2))
    assert capped.depths == (2, 2, 1)
    assert capped.interval_s == (27 + 12) / 2
    assert "the limit is 2" in capped.reason


def test_a_cap_on_depth_makes_a_fast_node_worth_more_than_balance() -> None:
    problem = Problem(chain=chain_of(8), nodes=(Node(), Node(speed=3.0)), max_depth=1)
    assert partition(problem).cuts == (1,)


def test_a_node_too_small_for_anything_is_better_left_out() -> None:
    nodes = (Node(memory_bytes=1000 * MB), Node(memory_bytes=10), Node(memory_bytes=1000 * MB))
    with pytest.raises(DoesNotFit, match="without the smallest node"):
        partition(Problem(chain=heavy_chain(), nodes=nodes, memory=SMALL))


def test_nothing_helps() -> None:
    with pytest.raises(DoesNotFit, match="give the nodes more memory") as refusal:
        partition(Problem(chain=heavy_chain(), nodes=(Node(memory_bytes=1),) * 2, memory=SMALL))
    assert refusal.value.remedies == ()


def test_memory_moves_work_to_the_larger_node() -> None:
    nodes = (Node(memory_bytes=60 * MB), Node(memory_bytes=1000 * MB))
    found = partition(Problem(chain=heavy_chain(), nodes=nodes, memory=SMALL, depths=(1, 1)))
    assert found.cuts == (3,)  # 16 MB a piece: weights 3, gradient 1, Adam 2, activations 10
    assert found.memory[0].total < 60 * MB
    assert "stage 0 is the fullest" in found.reason


def large_chain(layers: int = 48, per_layer: int = 38) -> Chain:
    """Like a GPT: few heavy ops among many that take next to nothing, weights and activations in each layer."""
    rng = random.Random(1)
    num = layers * per_layer
    seconds = tuple(rng.uniform(1e-3, 9e-3) if i % 6 == 0 else rng.uniform(0, 1e-5) for i in range(num))
    return Chain(
        forward_s=seconds,
        backward_s=tuple(2 * s for s in seconds),
        cuts=tuple(range(1, num)),
        forward_bytes=tuple(rng.randrange(1, 5) * MB for _ in range(num + 1)),
        backward_bytes=tuple(rng.randrange(1, 5) * MB for _ in range(num + 1)),
        weights=(*(Storage(8 * MB, (i,)) for i in range(0, num, 6)), Storage(80 * MB, (0, num - 2))),
        saved=tuple(Storage(4 * MB, (i, i + 1, min(i + 30, num - 1))) for i in range(num - 1)),
    )


@pytest.mark.parametrize("memory_bytes", [float("inf"), 13_000 * MB])
def test_a_large_model_is_cut_quickly(memory_bytes: float) -> None:
    chain = large_chain()
    nodes = tuple(Node(speed=1 + j % 3, memory_bytes=memory_bytes) for j in range(8))
    began = time.process_time()
    found = partition(Problem(chain=chain, nodes=nodes, links=(LinkSpec(forward_bytes_per_s=1e9),) * 7))
    assert time.process_time() - began < 10  # about 0.2 s
    assert found.interval_s < 1.1 * (sum(chain.forward_s) + sum(chain.backward_s)) / sum(n.speed for n in nodes)


def test_fewer_places_lose_little() -> None:
    chain, nodes = large_chain(layers=12), (Node(), Node(speed=2.0), Node())
    best = partition(Problem(chain=chain, nodes=nodes, tolerance=0.0)).bottleneck_s
    assert chain.cut_points(100).end <= 101
    assert set(chain.cut_points(40).bounds) < set(chain.cut_points(100).bounds)
    for cut_points, loss in ((100, 0.02), (40, 0.1)):
        found = partition(Problem(chain=chain, nodes=nodes, tolerance=0.0, max_cut_points=cut_points)).bottleneck_s
        assert best <= found <= (1 + loss) * best


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": ()},
        {"links": (LinkSpec(),) * 3},
        {"depths": (1,)},
        {"depths": (0, 1)},
        {"slack": -1},
        {"tolerance": 1.0},
        {"max_depth": 0},
        {"max_depth": 2, "depths": (1, 1)},
    ],
)
def test_invalid_values_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|need|not both"):
        replace(Problem(chain=chain_of(3), nodes=(Node(), Node())), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_s": ()}, {"backward_s": (1.0,)}, {"backward_s": (-1.0, 0.0, 0.0)}, {"forward_bytes": (1, 2)},
        {"cuts": (0,)}, {"cuts": (3,)}, {"cuts": (2, 1)}, {"saved": (Storage(1, (5,)),)}, {"work_bytes": (1,)},
    ],
)  # fmt: skip
def test_invalid_chains_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|need|outside"):
        chain_of(3, **changes)
