"""A model in stages trains bit-equal to the whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from benchmarks import zoo
from benchmarks.zoo import Case
from ravnest.graph import Interpreter, Program, legal_cuts, split, trace
from tests.sampling import only
from tests.unit.graph.pipeline import assert_same, eager_step, fresh_state, staged_step, thirds

CASES = {
    "gpt": zoo.gpt, "gpt_tied": lambda: zoo.gpt(tied=True), "gpt2": zoo.gpt2, "bert": zoo.bert, "llama": zoo.llama,
    "digits_cnn": zoo.digits, "resnet50": zoo.resnet50, "inception_v3": zoo.inception_v3,
}  # fmt: skip
NAMES = only(["gpt_tied", "bert", "llama", "resnet50"], CASES)


@cache
def traced(name: str) -> tuple[Case, Program]:
    """A case and its program. Tensors are copies: a step of the model does not change the program."""
    case: Case = CASES[name]()
    program = trace(built(case), case.loss, case.batch(2))
    return case, replace(program, tensors={n: t.detach().clone() for n, t in program.tensors.items()})


def built(case: Case) -> nn.Module:
    torch.manual_seed(1)
    return case.build().train()


@pytest.mark.parametrize("name", NAMES)
def test_three_stages_train_as_the_whole_model(name: str) -> None:
    case, program = traced(name)
    model = built(case)
    batch = case.batch(3)  # another size than the one that is traced
    stages = split(program, thirds(legal_cuts(program)))
    state, again = fresh_state(program), fresh_state(program)
    reference = eager_step(case, model, batch)
    assert_same(staged_step(stages, state, program.feed(batch)), reference)
    assert_same(staged_step(stages, again, program.feed(batch), recompute=True), reference)
    assert reference.gradients.keys() == {s.target for s in program.state if s.trainable}


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_is_the_same_program_with_flags_off(name: str) -> None:
    case, program = traced(name)
    model = built(case)
    batch = case.batch(2)
    state = fresh_state(program)
    before = {n: t.clone() for n, t in state.items()}
    values: tuple[object, ...] = tuple(program.feed(batch))
    for stage in split(program, thirds(legal_cuts(program))):
        with torch.no_grad():
            values = Interpreter(stage)(state, values, training=False)
    assert all(torch.equal(before[n], t) for n, t in state.items()), "evaluation changed the state"
    assert torch.equal(values[0], evaluated(case, model, program.feed(batch)))  # type: ignore[arg-type]


def evaluated(case: Case, model: nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The loss with dropout off and running statistics used. Inception skips its auxiliary head in eval mode and the
    program keeps it, so there the layers are in eval mode and the model itself stays in training mode."""
    for module in model.modules():
        if not list(module.children()):
            module.eval()
    if case.name != "inception_v3":
        model.eval()
    from tests.unit.graph.pipeline import call

    with torch.no_grad():
        return call(case, model, case.batch(2))
