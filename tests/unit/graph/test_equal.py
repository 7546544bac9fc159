"""A model in stages trains bit-equal to the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import zoo
from benchmarks.zoo import Case
from ravnest.graph import Interpreter, legal_cuts, split, trace
from tests.unit.graph.pipeline import assert_same, eager_step, fresh_state, staged_step, thirds

CASES = {
    "gpt": zoo.gpt, "gpt_tied": lambda: zoo.gpt(tied=True), "gpt2": zoo.gpt2, "bert": zoo.bert, "llama": zoo.llama,
    "digits_cnn": zoo.digits, "resnet50": zoo.resnet50, "inception_v3": zoo.inception_v3,
}  # fmt: skip


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.soak if n == "inception_v3" else ()) for n in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = CASES[request.param]()
    return made


def built(case: Case) -> nn.Module:
    torch.manual_seed(1)
    return case.build().train()


def test_three_stages_train_as_the_whole_model(case: Case) -> None:
    model = built(case)
    batch = case.batch(3)  # another size than the one that is traced
    program = trace(model, case.loss, case.batch(2))
    stages = split(program, thirds(legal_cuts(program)))
    state, again = fresh_state(program), fresh_state(program)
    reference = eager_step(case, model, batch)
    assert_same(staged_step(stages, state, program.feed(batch)), reference)
    assert_same(staged_step(stages, again, program.feed(batch), recompute=True), reference)
    assert reference.gradients.keys() == {s.target for s in program.state if s.trainable}


def test_evaluation_is_the_same_program_with_flags_off(case: Case) -> None:
    model = built(case)
    batch = case.batch(2)
    program = trace(model, case.loss, batch)
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
