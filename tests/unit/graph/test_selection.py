"""Selections by masks, whose sizes depend on values, train as in plain PyTorch, and never cross a cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.coverage.case import FORMS, Case, examine
from ravnest.errors import CutError, ProgramError
from ravnest.graph import Interpreter, dump, legal_cuts, load, split, trace
from ravnest.graph.limits import StageLimits
from ravnest.graph.verify import verify

EOS = 9


class Tokens(nn.Module):
    """A layer over tokens, and something after it."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.out, self.function = nn.Embedding(10, 8), nn.Linear(8, 3), function
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.token = nn.Parameter(torch.ones(8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.function(self, ids, self.embed(ids))


def tokens(model: Tokens, ids: Tensor, hidden: Tensor) -> Tensor:
    return model.out(hidden)  # type: ignore[no-any-return]


def some_rows(model: Tokens, ids: Tensor, hidden: Tensor) -> Tensor:
    changed = hidden.clone()
    mask = ids > 4
    changed[mask] = model.inner(hidden[mask])
    return model.out(changed)  # type: ignore[no-any-return]


def experts(model: Tokens, ids: Tensor, hidden: Tensor) -> Tensor:
    rows = hidden.reshape(-1, 8)
    weights, chosen = model.gate(rows).softmax(-1).topk(2)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(model.experts):
        is_chosen = chosen == number
        hit = is_chosen.any(-1)
        out[hit] += (weights * is_chosen).sum(-1)[hit][:, None] * expert(rows[hit])
    return model.out(out.view(hidden.shape))  # type: ignore[no-any-return]


def masked_tokens(model: Tokens, ids: Tensor, hidden: Tensor) -> Tensor:
    hidden = model.inner(hidden)
    hidden[ids > 6] = model.token
    hidden[ids < 2] = 0
    return model.out(hidden)  # type: ignore[no-any-return]


def pooled(model: Tokens, ids: Tensor, hidden: Tensor) -> Tensor:
    mask = ids == EOS
    if torch.unique_consecutive(mask.sum(1)).numel() > 1:
        raise ValueError("another number of ends in each sample")
    last = model.inner(hidden)[mask, :].view(ids.shape[0], -1, 8)[:, -1, :]
    return model.out(last)[:, None].expand(-1, ids.shape[1], -1)  # type: ignore[no-any-return]


def by_one_mask(y: Tensor, t: Tensor) -> Tensor:
    active = t.view(-1) != -100
    return F.cross_entropy(y.reshape(-1, 3)[active], t.view(-1)[active])


def by_two_masks(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y[t != -100], t[t.ne(-100)])


def by_written_masks(y: Tensor, t: Tensor) -> Tensor:
    first, second = t >= 0, t >= 0
    second &= t != 1
    return F.cross_entropy(y[first], t[first]) + y[second].sum()


def by_written_targets(y: Tensor, t: Tensor) -> Tensor:
    first = y[t >= 1].square().sum()
    t.add_(1)
    return first + F.cross_entropy(y[t >= 1], t[t >= 1] % 3)


def by_sum(y: Tensor, t: Tensor) -> Tensor:
    losses = F.cross_entropy(y.transpose(1, 2), t, reduction="none")
    kept = losses.masked_select(t >= 0)
    return kept.sum() / kept.numel()


MODELS = [tokens, some_rows, experts, masked_tokens, pooled]
LOSSES = [by_one_mask, by_two_masks, by_written_masks, by_written_targets, by_sum]


def example(samples: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, EOS, (samples, 6), generator=generator)
    ids[:, 3] = EOS
    targets = torch.randint(0, 3, (samples, 6), generator=generator)
    targets[torch.rand(samples, 6, generator=generator) < 0.4] = -100
    return ids, targets


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", MODELS, ids=lambda f: f.__name__)
def test_models_that_select_train_as_they_are(function: Any, form: str) -> None:
    outcome = examine(Case("model", "test", partial(Tokens, function), by_one_mask, example), form)
    assert outcome.kind in ("exact", "close"), outcome.reason


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_losses_that_select_train_as_they_are(loss: Any) -> None:
    outcome = examine(Case("loss", "test", partial(Tokens, tokens), loss, example), "instance")
    assert outcome.kind == "exact", outcome.reason


@pytest.mark.parametrize("function", [some_rows, experts, pooled], ids=lambda f: f.__name__)
def test_a_program_takes_batches_with_other_selections(function: Any) -> None:
    torch.manual_seed(0)
    model = Tokens(function)
    program = trace(model, by_one_mask, example())
    for samples in (2, 5):
        leaves = program.feed(example(samples, seed=samples))
        assert verify(program, model, by_one_mask, leaves, seed=0).largest_difference < 1e-5


def test_a_selection_does_not_cross_a_cut() -> None:
    program = trace(Tokens(some_rows), by_one_mask, example())
    legal = legal_cuts(program)
    selects = next(i for i, op in enumerate(program.ops) if op.op == "aten.index.Tensor")
    assert selects + 1 not in legal
    with pytest.raises(CutError):
        split(program, [selects + 1])
    assert legal[0] < selects < legal[-1] or len(legal) > 1


def test_the_memory_of_a_selection_is_bounded_by_what_it_selects_from() -> None:
    program = trace(Tokens(some_rows), by_one_mask, example())
    data = dump(split(program, [])[0])
    load(data, StageLimits(batch=3))
    with pytest.raises(ProgramError, match="the limit is"):
        load(data, StageLimits(batch=3, value_bytes=3 * 6 * 8 * 4 - 1))


def test_a_mask_of_another_shape_is_rejected() -> None:
    program = trace(Tokens(some_rows), by_one_mask, example())
    stage = split(program, [])[0]
    assert len(Interpreter(stage)(program.tensors, program.feed(example()))) == 1
    data = dump(stage)
    selects = next(op for op in stage.ops if op.op == "aten.index.Tensor")
    tensor, mask = str(selects.args[0]).encode(), str(selects.args[1][0]).encode()  # type: ignore[index]
    swapped = data.replace(b'["%s",["%s"]]' % (tensor, mask), b'["%s",["%s"]]' % (mask, mask))
    assert swapped != data
    with pytest.raises(ProgramError):
        load(swapped.replace(b'["%s",["%s"]]' % (mask, mask), b'["%s",[null,"%s"]]' % (tensor, mask)))
