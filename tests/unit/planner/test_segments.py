"""Segments share out all ops and parameters, and every cluster has one owner of each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.planner import Chain, Storage
from ravnest.planner.rings import Segment, find_segments
from tests.unit.planner.instances import chains, share


def chain_of(num: int, *weights: Storage) -> Chain:
    return Chain(
        forward_s=(1.0,) * num,
        backward_s=(1.0,) * num,
        cuts=tuple(range(1, num)),
        forward_bytes=(1,) * (num + 1),
        backward_bytes=(1,) * (num + 1),
        weights=weights,
    )


@st.composite
def cut_chains(draw: st.DrawFn) -> tuple[Chain, list[tuple[int, ...]]]:
    """A chain, and the cuts of 1 to 6 clusters of 1 to 6 stages."""
    chain = draw(chains(max_ops=20, max_cuts=19))
    some = st.sets(st.sampled_from(chain.cuts), max_size=5) if chain.cuts else st.just(set[int]())
    return chain, draw(st.lists(some.map(lambda cuts: tuple(sorted(cuts))), min_size=1, max_size=6))


@given(case=cut_chains())
@settings(max_examples=200, deadline=None)
def test_ops_and_parameters_are_shared_out(case: tuple[Chain, list[tuple[int, ...]]]) -> None:
    chain, cuts = case
    found = find_segments(chain, cuts)
    assert [op for s in found for op in range(s.start, s.stop)] == list(range(chain.num_ops))
    assert all(s.start < s.stop for s in found)
    assert sorted(w for s in found for w in s.weights) == list(range(len(chain.weights)))
    for segment in found:
        assert all(segment.start <= min(chain.weights[w].ops) < segment.stop for w in segment.weights)
        assert segment.parameter_bytes == sum(chain.weights[w].num_bytes for w in segment.weights)
    assert {s.start for s in found} == {0, *(cut for own in cuts for cut in own)}


@given(case=cut_chains())
@settings(max_examples=200, deadline=None)
def test_each_cluster_has_the_one_owner_that_computes_it(case: tuple[Chain, list[tuple[int, ...]]]) -> None:
    chain, cuts = case
    found = find_segments(chain, cuts)
    for cluster, own in enumerate(cuts):
        stages = list(pairwise((0, *own, chain.num_ops)))
        held = [0] * len(stages)
        for segment in found:
            assert len(segment.owners) == len(cuts)
            start, stop = stages[segment.owners[cluster]]
            assert start <= segment.start < segment.stop <= stop
            held[segment.owners[cluster]] += segment.parameter_bytes
        assert held == [share(chain, start, stop).parameter_bytes for start, stop in stages]


def test_three_clusters_by_hand() -> None:
    chain = chain_of(6, Storage(10, (0, 5)), Storage(3, (2,)), Storage(4, (3, 4)), Storage(5, (4,)))
    assert find_segments(chain, [(2,), (), (2, 4)]) == (
        Segment(0, 2, (0, 0, 0), (0,), 10),
        Segment(2, 4, (1, 0, 1), (1, 2), 7),
        Segment(4, 6, (1, 0, 2), (3,), 5),
    )


def test_a_tied_parameter_is_its_first_users_alone() -> None:
    first, last = find_segments(chain_of(4, Storage(9, (3, 0))), [(2,)])
    assert (first.parameter_bytes, last.parameter_bytes) == (9, 0)


@pytest.mark.parametrize("cuts", [[], [(2, 2)], [(3, 1)], [(0,)], [(1,), (6,)]])
def test_invalid_cuts_are_rejected(cuts: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"one entry per cluster|must be ascending|does not allow"):
        find_segments(chain_of(6), cuts)
