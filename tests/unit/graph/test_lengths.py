"""Lengths that vary from batch to batch: found in the first batches, traced once, bit-equal to the whole model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import zoo
from ravnest.errors import FrameError, ProgramError, TraceError
from ravnest.graph import Interpreter, StageLimits, Value, dump, legal_cuts, load, split, trace
from ravnest.graph.batch import Length
from ravnest.graph.dry_run import dry_run_batch
from ravnest.graph.lengths import find_lengths
from ravnest.graph.program import Program, actual_shapes, varying_sizes
from tests.unit.graph.pipeline import Step, assert_same, eager_step, fresh_state, staged_step, thirds

MAX = 24


def eager(model: nn.Module, loss: Any, batch: Any) -> Step:
    torch.manual_seed(5)
    result = loss(model(batch[0]), batch[1])
    result.backward()
    return Step([result.detach()], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, {})


class Gru(nn.Module):
    """Positions, a product of batch and length, a convolution with a stride, and padding to a multiple of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 8), nn.Parameter(torch.randn(MAX, 8))
        self.mix = nn.Linear(8, 8)
        self.narrow = nn.Conv1d(8, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        x = self.mix(x.reshape(-1, 8)).reshape(x.shape).relu()
        x = x + self.narrow(x.transpose(1, 2)).mean(2)[:, None]
        result: Tensor = self.head(x)
        return result


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ids(batch: int, length: int) -> tuple[Tensor, Tensor]:
    made = torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(length))
    return made, made


@cache
def traced() -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = Gru()
    return model, trace(model, next_token, ids(3, 7), others=[ids(3, 9)], max_length=MAX)


def test_stages_train_as_the_whole_model_at_every_length() -> None:
    model, program = traced()
    cuts = legal_cuts(program)
    stages = split(program, cuts[:: max(1, len(cuts) // 12)])
    assert any(value.varying for stage in stages for value in stage.inputs)
    for batch, length in ((2, 2), (3, 7), (1, 5), (4, MAX)):
        model.zero_grad()
        leaves = program.feed(ids(batch, length))
        assert_same(staged_step(stages, fresh_state(program), leaves), eager(model, next_token, ids(batch, length)))


def cropped(batch: Any, length: int) -> Any:
    if isinstance(batch, dict):
        return {key: cropped(part, length) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(cropped(part, length) for part in batch)
    return batch[:, :length].contiguous() if batch.dim() > 1 else batch


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stock_models_take_any_length(name: str) -> None:
    case = getattr(zoo, name)()
    torch.manual_seed(1)
    model = case.build().train()
    first, second = cropped(case.batch(2), 6), cropped(case.batch(3), 9)
    program = trace(model, case.loss, first, others=[second], max_length=16)
    stages = split(program, thirds(legal_cuts(program)))
    for batch in (first, second, cropped(case.batch(2), 14)):
        model.zero_grad()
        expected = eager_step(case, model, batch)
        assert_same(staged_step(stages, fresh_state(program), program.feed(batch)), expected)


def test_every_stage_declares_the_sizes_of_its_values() -> None:
    _, program = traced()
    cuts = legal_cuts(program)
    limits = StageLimits(batch=4)
    values: list[Any] = program.feed(ids(4, 11))
    for stage in split(program, cuts[:: max(1, len(cuts) // 8)]):
        loaded = load(dump(stage), limits)
        sizes = varying_sizes(loaded.inputs, values)
        assert actual_shapes(loaded.inputs, 4, sizes) == [
            tuple(item.shape) if isinstance(item, Tensor) else (item,) for item in values
        ]
        dry_run_batch(loaded, 4, limits, sizes)
        dry_run_batch(loaded, 4, limits, _largest(loaded.inputs, 4))
        values = list(Interpreter(loaded)(fresh_state(program), values, training=True))


def _largest(values: tuple[Value, ...], batch: int) -> tuple[int, ...]:
    shapes = [(v.number,) if v.number is not None else v.shape for v in values]
    dims = [s[d] for v, s in zip(values, shapes, strict=True) for d in v.varying]
    return tuple(d if isinstance(d, int) else d[0] * batch + d[1] for d in dims)


def test_a_stage_rejects_sizes_that_do_not_fit_together() -> None:
    _, program = traced()
    stage = load(dump(split(program, legal_cuts(program)[6:7])[1]), limits := StageLimits(batch=4))
    sizes = [size - 1 for size in _largest(stage.inputs, 4)]
    assert len(sizes) > 1
    with pytest.raises(ProgramError):
        dry_run_batch(stage, 4, limits, (*sizes[:-1], sizes[-1] - 1))


VALUES = (
    Value("x", "float32", ((1, 0), 9, 4), varying=(1,)),
    Value("n", "int", number=9, varying=(0,)),
    Value("flat", "float32", ((9, 0), 4), varying=(0,)),
)


@given(batch=st.integers(1, 5), length=st.integers(0, 9))
def test_actual_shapes(batch: int, length: int) -> None:
    items = [torch.zeros(batch, length, 4), length, torch.zeros(batch * length, 4)]
    sizes = varying_sizes(VALUES, items)
    assert sizes == (length, length, batch * length)
    assert actual_shapes(VALUES, batch, sizes) == [(batch, length, 4), (length,), (batch * length, 4)]


@pytest.mark.parametrize("sizes", [(), (1, 1), (10, 1, 1), (-1, 1, 1), (1, 10, 1), (1, 1, 19), (1, 1, 1, 1)])
def test_sizes_beyond_the_declared_ones_are_rejected(sizes: tuple[int, ...]) -> None:
    with pytest.raises(FrameError):
        actual_shapes(VALUES, 2, sizes)


@pytest.mark.parametrize("varying", [(2,), (-1,), (0, 0), (1, 0)])
def test_a_stage_file_with_impossible_varying_dimensions_is_rejected(varying: tuple[int, ...]) -> None:
    _, program = traced()
    text = dump(split(program, [])[0]).replace(b'"varying":[1]', f'"varying":{list(varying)}'.encode())
    with pytest.raises(ProgramError, match="not increasing dimensions"):
        load(text)


def leaves(*shapes: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    return [(f"batch.{'abcd'[i]}", torch.empty(shape)) for i, shape in enumerate(shapes)]


def test_lengths_are_found_in_the_first_batches() -> None:
    shapes = [(4, 7), (4, 7), (4, 3, 5)], [(4, 9), (4, 9), (4, 3, 6)], [(2, 8), (2, 8), (2, 3, 9)]
    found = find_lengths([leaves(*each) for each in shapes], 64)
    assert found == (Length(((0, 1, 0), (1, 1, 0)), 2, 64), Length(((2, 2, 0),), 2, 64))


def test_targets_may_be_a_position_shorter() -> None:
    found = find_lengths([leaves((4, n), (4, n - 1)) for n in (7, 9, 8)], 64)
    assert found == (Length(((0, 1, 1), (1, 1, 0)), 2, 63),)


def test_a_declared_length_need_not_vary_at_first() -> None:
    found = find_lengths([leaves((4,), (4, 7), (4, 7), (4, 3))] * 3, 64)
    assert found == (Length(((1, 1, 0), (2, 1, 0)), 2, 64),)


def test_without_lengths_only_the_batch_size_varies() -> None:
    assert find_lengths([leaves((4, 7), (4,)), leaves((2, 7), (2,))], None) == ()


REJECTED: dict[str, tuple[list[Any], int | None, str]] = {
    "undeclared": ([leaves((4, 7)), leaves((4, 9))], None, "dimension 1 of batch.a varies from 7 to 9.*max_length"),
    "too long": ([leaves((4, 7)), leaves((4, 9))], 8, "dimension 1 of batch.a is 9 in a batch, max_length is 8"),
    "first too long": ([leaves((4, 70))], 64, "is 70 in the first batch, max_length is 64"),
    "none": ([leaves((4,))], 64, "no tensor of a batch has a second dimension"),
    "dimensions": ([leaves((4, 7)), leaves((4, 7, 1))], 64, "has 2 dimensions in the first batch and others"),
    "packed": ([leaves((4,), (30,)), leaves((4,), (31,))], 64, "the first dimension of batch.b varies from 30 to 31"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_lengths(name: str) -> None:
    examples, max_length, message = REJECTED[name]
    with pytest.raises(ValueError, match=message):
        find_lengths(examples, max_length)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        ((2, 1), (2, 1), "dimension 1 of batch.inputs is 1, the program was traced for 2 to 24"),
        ((2, 25), (2, 25), "is 25, the program was traced for 2 to 24.*change max_length"),
        ((2, 7), (2, 8), "batch.inputs and dimension 1 of batch.targets must vary together"),
        ((2, 7, 1), (2, 7), r"batch.inputs has shape \(2, 7, 1\)"),
    ],
)
def test_batches_that_do_not_fit(inputs: tuple[int, ...], targets: tuple[int, ...], message: str) -> None:
    _, program = traced()
    with pytest.raises(ValueError, match=message):
        program.feed((torch.zeros(inputs, dtype=torch.int64), torch.zeros(targets, dtype=torch.int64)))


def test_a_model_with_a_fixed_length_is_rejected() -> None:
    model = nn.Sequential(nn.Embedding(50, 1), nn.Flatten(), nn.Linear(7, 7))
    with pytest.raises(TraceError, match=r"fixes the length of its inputs[\s\S]*Pad all batches"):
        trace(model, lambda y, t: F.mse_loss(y, t.float()), ids(3, 7), max_length=16)


def test_a_model_with_a_smaller_maximum_is_rejected() -> None:
    with pytest.raises(TraceError, match="lengths of at most 24, max_length is 30"):
        trace(Gru(), next_token, ids(3, 7), max_length=30)


def test_two_lengths_vary_on_their_own() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            q, k = self.tokens(target), self.tokens(source)
            weights = (q @ k.transpose(1, 2)).softmax(-1)
            result: Tensor = F.cross_entropy(self.out(weights @ k).flatten(0, 1), target.flatten())
            return result

    def batch(size: int, source: int, target: int) -> dict[str, Tensor]:
        return {"source": ids(size, source)[0], "target": ids(size, target)[0]}

    torch.manual_seed(0)
    model = Attend()
    program = trace(model, None, batch(3, 7, 4), others=[batch(3, 5, 9)], max_length=16)
    assert len(program.feed.lengths) == 2
    stages = split(program, legal_cuts(program)[::2])
    for size in ((2, 16, 2), (2, 3, 16), (1, 2, 2)):
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(**batch(*size))
        loss.backward()
        expected = Step([loss.detach()], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, {})
        assert_same(staged_step(stages, fresh_state(program), program.feed(batch(*size))), expected)
