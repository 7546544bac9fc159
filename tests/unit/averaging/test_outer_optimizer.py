"""The outer step, the digest and the fair queue."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravnest.averaging.codec import Floats
from ravnest.averaging.contribution import digest
from ravnest.averaging.outer_optimizer import Nesterov, OuterStep, step_nesterov
from ravnest.averaging.peer_link import FairQueue

SIZE = 100_000


def normal(seed: int, size: int = SIZE) -> Floats:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_nesterov_is_torch_sgd_on_the_pseudo_gradient() -> None:
    nesterov, reference, momentum = Nesterov(lr=0.7, momentum=0.9), normal(0), np.zeros(SIZE, np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(reference.copy()))
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(1, 4):
        average = normal(number)
        theirs.grad = theirs.detach() - torch.from_numpy(average)
        optimizer.step()
        step_nesterov(reference, average, momentum, nesterov)
        np.testing.assert_allclose(reference, theirs.detach().numpy(), rtol=2e-5, atol=2e-5)


def test_without_momentum_and_at_full_rate_it_is_the_plain_average() -> None:
    reference, average = normal(0), normal(1)
    step_nesterov(reference, average, np.zeros(SIZE, np.float32), Nesterov(lr=1.0, momentum=0.0))
    np.testing.assert_allclose(reference, average, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_invalid_rates_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="outer"):
        Nesterov(**wrong)


@given(st.integers(1, 5000), st.data())
def test_one_changed_bit_changes_the_digest(size: int, data: st.DataObject) -> None:
    vector = normal(size, size)
    before, same = digest(vector), digest(vector.copy())
    vector.view(np.uint8)[data.draw(st.integers(0, 4 * size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert before == same != digest(vector)


def test_vectors_of_zeros_of_different_lengths_differ() -> None:
    assert len({digest(np.zeros(size, np.float32)) for size in range(3000)}) == 3000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 100)), max_size=60))
def test_rings_with_something_to_send_get_equal_bytes_and_keep_their_order(items: list[tuple[int, int]]) -> None:
    queue: FairQueue[tuple[int, int, int]] = FairQueue()
    for number, (ring, num_bytes) in enumerate(items):
        queue.put(ring, (number, ring, num_bytes), num_bytes)
    had, last = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), -1)
    left = [ring for ring, _ in items]
    while (item := queue.take()) is not None:
        number, ring, num_bytes = item
        assert number > last[ring]
        assert had[ring] == min(had[other] for other in set(left))
        last[ring], had[ring] = number, had[ring] + num_bytes
        left.remove(ring)
    assert not left
    assert len(queue) == 0


def test_a_ring_that_was_idle_gets_no_credit() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(10):
        queue.put(0, "old", 100)
    assert [queue.take() for _ in range(5)] == ["old"] * 5
    for _ in range(5):
        queue.put(1, "new", 100)
    assert [queue.take() for _ in range(4)].count("old") >= 1


def test_an_outer_step_starts_from_the_first_average() -> None:
    """The first average stays as it is; later ones are moved by the momentum of those before."""
    step, nesterov = OuterStep(Nesterov(lr=0.5, momentum=0.5)), Nesterov(lr=0.5, momentum=0.5)
    reference, momentum = np.array([1.0, 2.0], np.float32), np.zeros(2, np.float32)
    average = reference.copy()
    step.apply(average)
    assert np.array_equal(average, reference)
    for number in range(3):
        average = np.array([0.5 * number, -1.0], np.float32)
        step_nesterov(reference, average, momentum, nesterov)
        step.apply(average)
        assert np.array_equal(average, reference)
