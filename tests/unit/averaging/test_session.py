"""Rings of clusters with different cuts, messages in any order, with and without a member that dies."""

from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.averaging.codec import CODECS
from ravnest.averaging.contribution import codec_error, digest
from ravnest.averaging.session import AttemptKey, RoundAttempt
from tests.unit.averaging.error_bound import IN_BLOCKS, error_bound
from tests.unit.averaging.network import Network, RingPlan, mean


@st.composite
def plans(draw: st.DrawFn, *, most_clusters: int = 6, most_stages: int = 6, most_elements: int = 60) -> list[RingPlan]:
    """Clusters of one to six stages with different cuts; one ring for every segment between neighbouring cuts."""
    num_elements = draw(st.integers(1, most_elements))
    places = st.sets(st.integers(1, max(1, num_elements - 1)), max_size=most_stages - 1)
    cuts = [sorted(draw(places)) for _ in range(draw(st.integers(2, most_clusters)))]
    weights = [draw(st.floats(0.1, 100.0)) for _ in cuts]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bounds = [0, *sorted({cut for own in cuts for cut in own} - {num_elements}), num_elements]
    rings = []
    for number, (lo, hi) in enumerate(pairwise(bounds)):
        owners = [f"c{c}s{sum(cut <= lo for cut in own)}" for c, own in enumerate(cuts)]
        vectors = {owner: rng.standard_normal(hi - lo).astype(np.float32) for owner in owners}
        order = rng.permutation(len(owners))
        members, shares = tuple(owners[i] for i in order), tuple(weights[i] for i in order)
        rings.append(RingPlan(number, members, shares, vectors, chunk_elements=int(rng.integers(1, 9))))
    return rings


def nodes_of(rings: list[RingPlan]) -> set[str]:
    return {member for ring in rings for member in ring.members}


def check_results(network: Network, rings: list[RingPlan], attempts: dict[str, RoundAttempt]) -> None:
    """All rings are done, every member has the same bits, and they are the weighted mean."""
    assert all(attempt.is_settled and not attempt.failures and not attempt.users for attempt in attempts.values())
    for ring in rings:
        results = [network.results[member, ring.id] for member in ring.members]
        assert len({digest(result) for result in results}) == 1
        np.testing.assert_allclose(results[0], mean(ring), rtol=1e-5, atol=1e-5)


@given(plans(), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_member_gets_the_same_bits_and_they_are_the_weighted_mean(
    rings: list[RingPlan], seed: int, shared_memory: bool
) -> None:
    network = Network(nodes_of(rings), random.Random(seed), shared_memory=shared_memory)
    attempts = network.run(AttemptKey(3, 0), rings)
    check_results(network, rings, attempts)
    for node, attempt in attempts.items():
        for ring in (ring for ring in rings if node in ring.members):
            count = len(ring.members)
            expected = 2 * (count - 1) / count * 4 * ring.vectors[node].size
            assert abs(attempt.memberships[ring.id].contribution.sent_bytes - expected) <= 8


@given(plans(most_clusters=4, most_stages=2, most_elements=10), st.integers(0, 2**32), st.data())
@settings(max_examples=16, deadline=None)
def test_survivors_of_a_member_that_dies_at_any_event_agree_without_it(
    rings: list[RingPlan], seed: int, data: st.DataObject
) -> None:
    victim, shared_memory = data.draw(st.sampled_from(sorted(nodes_of(rings)))), data.draw(st.booleans())
    undisturbed = Network(nodes_of(rings), random.Random(seed), shared_memory=shared_memory)
    undisturbed.run(AttemptKey(0, 0), rings)
    untouched = [ring for ring in rings if victim not in ring.members]
    left = [ring.without(victim) if victim in ring.members else ring for ring in rings]
    for at in range(undisturbed.num_events):
        network = Network(nodes_of(rings), random.Random(seed), shared_memory=shared_memory)
        attempts = network.run(AttemptKey(0, 0), rings, kill=victim, at=at)
        assert all(attempt.is_settled and not attempt.users for attempt in attempts.values())
        assert all(f.member == victim for attempt in attempts.values() for f in attempt.failures.values())
        assert not {ring.id for ring in untouched} & {r for a in attempts.values() for r in a.failures}
        check_results(network, left, network.run(AttemptKey(0, 1), left))


@given(plans(), st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_published_chunks_give_the_same_bits_as_sent_ones(rings: list[RingPlan], seed: int) -> None:
    networks = [
        Network(nodes_of(rings), random.Random(seed), shared_memory=shared_memory) for shared_memory in (False, True)
    ]
    for network in networks:
        network.run(AttemptKey(0, 0), rings)
    for place, result in networks[0].results.items():
        np.testing.assert_array_equal(result, networks[1].results[place])


@given(st.sampled_from(sorted(CODECS)), st.integers(2, 5), st.integers(1, 1500), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_compressed_average_is_within_the_stated_bound(codec: str, num_members: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    members = tuple(f"n{i}" for i in range(num_members))
    vectors = {m: (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3)).astype(np.float32) for m in members}
    weights = tuple(float(w) for w in rng.uniform(0.1, 10, num_members))
    ring = RingPlan(0, members, weights, vectors, codec, 512)
    network = Network(members, random.Random(seed))
    network.run(AttemptKey(0, 0), [ring])
    results = [network.results[member, 0] for member in members]
    assert len({digest(result) for result in results}) == 1
    magnitude = np.sum([np.abs(vectors[m]) * w for m, w in zip(members, weights, strict=True)], axis=0) / sum(weights)
    if codec in IN_BLOCKS:
        magnitude = np.full(size, magnitude.max())
    bound = [error_bound(codec, num_members, float(m)) + 1e-6 * float(m) for m in magnitude]
    assert np.all(np.abs(results[0] - mean(ring)) <= bound)


@pytest.mark.parametrize(
    ("codec", "least", "most"), [("fp32", 0.0, 0.0), ("bf16", 5e-4, 2.0**-8), ("int8", 2e-3, 2e-2), ("int4", 4e-2, 0.4)]
)
def test_the_reported_codec_error_is_what_the_codec_lost(codec: str, least: float, most: float) -> None:
    rng = np.random.default_rng(2)
    vectors = {m: rng.standard_normal(3000).astype(np.float32) for m in ("a", "b")}
    ring = RingPlan(0, ("a", "b"), (1.0, 1.0), vectors, codec, 1000)
    network = Network(ring.members, random.Random(1))
    for attempt in network.run(AttemptKey(0, 0), [ring]).values():
        assert least <= codec_error([attempt.memberships[0].contribution]) <= most
    off = network.results["a", 0] - mean(ring)
    np.testing.assert_allclose(off, -(network.residuals["a", 0] + network.residuals["b", 0]), atol=1e-6)


def test_error_feedback_makes_the_mean_of_many_rounds_right() -> None:
    """The error of the mean over rounds falls as 1 / rounds; without feedback it would stay constant."""
    rng = np.random.default_rng(5)
    members = ("a", "b", "c")
    vectors = {m: rng.standard_normal(1500).astype(np.float32) for m in members}
    for codec in ("bf16", "int8"):
        ring = RingPlan(0, members, (1.0, 2.0, 3.0), vectors, codec, 400)
        network, total, errors = Network(members, random.Random(1)), np.zeros(1500), {}
        for number in range(64):
            network.run(AttemptKey(number, 0), [ring])
            total += network.results["a", 0]
            errors[number + 1] = float(np.abs(total / (number + 1) - mean(ring)).max())
        assert errors[64] < errors[1] / 20
        assert max(errors[n] * n for n in errors) < 4 * error_bound(codec, 3, 4.0)


def test_a_contribution_that_is_not_finite_is_rejected_and_reported_to_all() -> None:
    for value, shared_memory in product((np.nan, np.inf, -np.inf), (False, True)):
        for place in (0, 7, 19):
            vectors = {m: np.ones(20, np.float32) for m in ("a", "b", "c", "d")}
            vectors["c"][place] = value
            ring = RingPlan(4, ("a", "b", "c", "d"), (1.0,) * 4, vectors, chunk_elements=2)
            attempts = Network(ring.members, random.Random(place), shared_memory=shared_memory).run(
                AttemptKey(0, 0), [ring]
            )
            for attempt in attempts.values():
                assert type(attempt.failures[4]).__name__ == "BadContribution"
                assert attempt.failures[4].member == "c"


def test_a_large_finite_sum_is_not_a_bad_contribution() -> None:
    vectors = {m: np.full(3000, 3e38, np.float32) for m in ("a", "b")}
    ring = RingPlan(0, ("a", "b"), (1.0, 1.0), vectors, chunk_elements=1000)
    network = Network(ring.members, random.Random(0))
    check_results(network, [ring], network.run(AttemptKey(0, 0), [ring]))


def test_a_ring_of_one_member_averages_alone() -> None:
    ring = RingPlan(0, ("a",), (2.0,), {"a": np.arange(10, dtype=np.float32)})
    network = Network(ring.members, random.Random(0))
    check_results(network, [ring], network.run(AttemptKey(0, 0), [ring]))
