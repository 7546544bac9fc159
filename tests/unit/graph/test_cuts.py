"""Cuts at every legal index, and at random sets of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import zoo
from benchmarks.zoo import Case
from ravnest.errors import CutError
from ravnest.graph import Cutter, Program, legal_cuts, split, trace
from tests.sampling import every
from tests.unit.graph.pipeline import Step, assert_same, eager_step, fresh_state, staged_step

MODELS = {"gpt": zoo.gpt, "gpt2": zoo.gpt2, "resnet50": zoo.resnet50}


@dataclass(frozen=True)
class TracedModel:
    """A traced model and the result of one eager step."""

    case: Case
    program: Program
    reference: Step


@cache
def traced_model(name: str) -> TracedModel:
    case: Case = MODELS[name]()
    torch.manual_seed(1)
    model = case.build().train()
    program = trace(model, case.loss, case.batch(2))
    program = replace(program, tensors={n: t.detach().clone() for n, t in program.tensors.items()})
    return TracedModel(case, program, eager_step(case, model, case.batch(2)))


def check(model: TracedModel, cuts: list[int]) -> None:
    step = staged_step(split(model.program, cuts), fresh_state(model.program), model.program.feed(model.case.batch(2)))
    assert_same(step, model.reference)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", every(2, range(8)))
def test_every_legal_index(name: str, first: int) -> None:
    """Eight sets of cuts that together use every index; neighbouring cuts are eight ops apart."""
    model = traced_model(name)
    check(model, legal_cuts(model.program)[first::8])


@pytest.mark.parametrize("name", ["gpt", "gpt2"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_cut_sets(name: str, data: st.DataObject) -> None:
    model = traced_model(name)
    cuts = data.draw(st.lists(st.sampled_from(legal_cuts(model.program)), unique=True, max_size=12).map(sorted))
    check(model, cuts)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_cut_sets_resnet(data: st.DataObject) -> None:
    model = traced_model("resnet50")
    cuts = data.draw(st.lists(st.sampled_from(legal_cuts(model.program)), unique=True, max_size=12).map(sorted))
    check(model, cuts)


def test_one_op_per_stage() -> None:
    model = traced_model("gpt")
    stages = split(model.program, legal_cuts(model.program))
    prediction = model.program.prediction
    assert prediction is not None
    made = next(i for i, op in enumerate(model.program.ops) if prediction.name in op.outs)
    assert len(stages) == made + 1, "only the loss stays with the model's output"
    check(model, legal_cuts(model.program))


def test_every_op_is_in_exactly_one_stage_and_repeated_ones_need_no_gradient() -> None:
    program = traced_model("gpt2").program
    stages = split(program, [60, 100])
    bounds = [(0, 60), (60, 100), (100, len(program.ops))]
    for stage, (start, stop) in zip(stages, bounds, strict=True):
        own = program.ops[start:stop]
        assert stage.ops[len(stage.ops) - len(own) :] == own
        repeated = stage.ops[: len(stage.ops) - len(own)]
        assert all(not program.values[out].grad for op in repeated for out in op.outs if out)


def test_an_attention_mask_is_rematerialized_and_not_sent() -> None:
    """Only the inputs of the mask cross the cut: the mask has 32 x 32 elements per sample."""
    program = traced_model("gpt2").program
    crossing = Cutter(program).crossing(100)
    assert all(v.shape[-1:] != (32,) or v.shape[-2] != 32 for v in crossing if len(v.shape) == 4)


def test_a_tied_parameter_has_one_owner() -> None:
    case = zoo.gpt(tied=True)
    program = trace(case.build(), case.loss, case.batch(2))
    stages = split(program, [30, 60])
    assert program.ties == {"head.weight": "tokens.weight"}
    assert [s.target for s in stages[2].borrowed] == ["tokens.weight"]
    owners = [stage.index for stage in stages for s in stage.state if s.target == "tokens.weight" and not s.owner]
    assert owners == [0, 2]
    assert not any(v.shape == (zoo.VOCAB, 96) for stage in stages for v in stage.inputs), "it crosses as an activation"


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ([5, 5], "increasing"),
        ([9, 4], "increasing"),
        ([0], "increasing"),
        ([-1], "increasing"),
        ([10_000], "10000 is out of range"),
    ],
)
def test_impossible_cuts(cuts: list[int], message: str) -> None:
    with pytest.raises(CutError, match=message):
        split(traced_model("gpt").program, cuts)
