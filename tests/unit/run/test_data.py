"""The user's data: read ahead, copied, passed over again, and split into microbatches with the right shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from ravnest.coordinator.requester import Microbatch
from ravnest.graph import trace
from ravnest.pipeline.tensor_codec import TensorCodec
from ravnest.run.data import Batches, BatchQueue

IGNORED = -100


def all_of(batches: Batches, limit: int = 100) -> list[Any]:
    found: list[Any] = []
    while len(found) < limit and (batch := batches.next()) is not None:
        found.append(batch)
    return found


@pytest.mark.parametrize("count", [1, 3, 8, 9, 20])
def test_reading_ahead_loses_nothing(count: int) -> None:
    assert all_of(Batches(iter(range(count)))) == list(range(count))
    assert all_of(Batches(list(range(count)), 2)) == list(range(count)) * 2
    assert all_of(Batches(list(range(count))), 50) == [i % count for i in range(50)]


class Stream(IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((3,), float(i)) for i in range(self.count))


@pytest.mark.parametrize("batch_size", [None, 4])
def test_streams_and_loaders(batch_size: int | None) -> None:
    stream = Stream(10)
    data: Any = stream if batch_size is None else DataLoader(stream, batch_size=batch_size)
    sizes = [len(batch) for batch in all_of(Batches(data, 2))]
    assert sizes == ([3] * 20 if batch_size is None else [4, 4, 2] * 2)


@pytest.mark.parametrize("at", [0, 1, 5, 8, 11])
def test_an_error_of_the_data_comes_in_its_place(at: int) -> None:
    def rows() -> Iterator[int]:
        yield from range(at)
        raise KeyError("row")

    found: list[int] = []
    with pytest.raises(KeyError) as raised:  # noqa: PT012
        batches = Batches(rows())
        while (batch := batches.next()) is not None:
            found.append(batch)
    assert found == list(range(at))
    assert raised.value.__notes__ == [f"The data raised this after {at} batches of a pass."]


def test_memory_that_a_loader_reuses_is_copied() -> None:
    def rows() -> Iterator[tuple[Tensor, Tensor]]:
        buffer = torch.zeros(2, 3)
        for i in range(10):
            yield buffer.fill_(i), torch.zeros(2, 1)

    batches = Batches(rows())
    program = trace(nn.Linear(3, 1), F.mse_loss, batches.examples[0])
    queue = BatchQueue(program, batch_size=2, max_batch=2, lead=10)
    for _ in range(10):
        queue.offer(batches.next())
    values = [decoded(program, queue.take(i, 1)[0])[0] for i in range(10)]
    assert all(torch.equal(x, torch.full((2, 3), float(i))) for i, x in enumerate(values))


def decoded(program: Any, microbatch: Microbatch) -> list[Tensor]:
    codec = TensorCodec(program.inputs, "none", max_batch=100)
    tensors = codec.allocate(microbatch.samples, [len(memoryview(b)) for b in microbatch.buffers], microbatch.sizes)
    for tensor, buffer in zip(tensors, microbatch.buffers, strict=True):
        tensor.reshape(-1).view(torch.uint8).numpy().data[:] = memoryview(buffer)
    return codec.unpack(microbatch.samples, tensors, microbatch.sizes)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 6), nn.Linear(6, 20)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.tokens(ids).cumsum(1).tanh())
        return result


def token_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def sample_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.mean(2) - targets).square().mean()


def num_tokens(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != IGNORED).sum(1)


def padded(samples: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch whose samples have different lengths, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (samples, length), generator=generator)
    lengths = torch.randint(0, length + 1, (samples,), generator=generator)
    lengths[int(torch.randint(0, samples, (), generator=generator))] = length
    return ids, torch.where(torch.arange(length) < lengths[:, None], ids, IGNORED)


torch.manual_seed(0)
TAGGER = Tagger().double()
EXAMPLES = [padded(6, 5, 0), padded(6, 7, 1)]
PROGRAMS = {
    loss: trace(TAGGER, loss, EXAMPLES[0], others=EXAMPLES[1:], max_length=9) for loss in (token_mean, sample_mean)
}


@given(
    samples=st.integers(1, 10), length=st.integers(2, 9), count=st.integers(1, 6), seed=st.integers(0, 100),
    loss=st.sampled_from([token_mean, sample_mean]),
)  # fmt: skip
def test_microbatches_have_the_gradient_of_the_whole_batch(
    samples: int, length: int, count: int, seed: int, loss: Any
) -> None:
    """Ragged batches, larger and smaller than the first, of any length, and with microbatches that are all padding."""
    program, batch = PROGRAMS[loss], padded(samples, length, seed)
    weight = num_tokens if loss is token_mean else None
    queue = BatchQueue(program, batch_size=10, max_batch=10, weight=weight)
    queue.offer(batch)
    microbatches = queue.take(0, count)
    assert len(microbatches) == count
    assert sum(m.share for m in microbatches) == pytest.approx(1.0)
    TAGGER.zero_grad()
    for microbatch in microbatches:
        ids, targets = decoded(program, microbatch)
        (loss(TAGGER(ids), targets) * microbatch.share).backward()
    found = [p.grad.clone() for p in TAGGER.parameters() if p.grad is not None]
    TAGGER.zero_grad()
    loss(TAGGER(batch[0]), batch[1]).backward()
    for gradient, parameter in zip(found, TAGGER.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, rtol=1e-10, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (padded(11, 5, 0), r"a batch has 11 samples, the largest .* had 10: declare .* max_batch_size=11"),
        (padded(3, 10, 0), "is 10, the program was traced for 2 to 9"),
        ((torch.zeros(0, 5, dtype=torch.int64),) * 2, "at least one sample"),
        ((torch.zeros(2, 5, dtype=torch.int64), torch.full((2, 5), IGNORED)), "not all 0.* leave out batches without"),
    ],
)
def test_batches_that_are_not_offered(batch: Any, message: str) -> None:
    queue = BatchQueue(PROGRAMS[token_mean], batch_size=10, max_batch=10, weight=num_tokens)
    with pytest.raises(ValueError, match=message):
        queue.offer(batch)
    assert queue.produced == 0


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda batch: 3, r"a tensor of shape \(6,\).* got a int"),
        (lambda batch: torch.tensor(3), r"got shape \(\)"),
        (lambda batch: -torch.ones(6), "at least 0"),
        (lambda batch: torch.full((6,), float("nan")), "must be finite"),
    ],
)
def test_weights_that_are_not_valid(weight: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchQueue(PROGRAMS[token_mean], batch_size=10, max_batch=10, weight=weight).offer(EXAMPLES[0])
