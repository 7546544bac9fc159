"""A pipeline trains like plain PyTorch, independent of timing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from benchmarks import zoo
from benchmarks.zoo import Case
from ravnest.core.schedule import StageSchedule, stage_schedules
from ravnest.graph import Program, legal_cuts, trace
from ravnest.graph.interpreter import linear
from ravnest.pipeline import staleness as corrections
from ravnest.pipeline.config import TrainerConfig
from ravnest.pipeline.optimizers import LAMB, SGD, AdamW, Muon, NAdam, Optimizer, Stepper
from tests.unit.graph.pipeline import call
from tests.unit.pipeline.pipe import microbatches, train

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(0.1),
    "momentum": SGD(0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": AdamW(3e-3),
}


def case_of(name: str) -> Case:
    match name:
        case "gpt":
            return zoo.gpt(dropout=0.0, layers=2, width=32, heads=2)
        case "gpt_tied":
            return zoo.gpt(tied=True, dropout=0.0, layers=2, width=32, heads=2)
        case "resnet50":
            return zoo.resnet50()
        case _:
            plain = zoo.digits()

            def build() -> nn.Module:
                model = plain.build()
                model.features[-1].p = 0.0  # type: ignore[index, union-attr]  # no dropout
                return model

            return Case("digits", build, plain.loss, plain.batch)


@cache
def made(name: str) -> tuple[Case, Program]:
    case = case_of(name)
    torch.manual_seed(1)
    return case, trace(case.build(), case.loss, case.batch(2))


def batches(case: Case, count: int, size: int) -> list[Any]:
    whole = case.batch(count * size)

    def part(item: Any, i: int) -> Any:
        if isinstance(item, Tensor):
            return item[i * size : (i + 1) * size]
        if isinstance(item, dict):
            return {k: part(v, i) for k, v in item.items()}
        return tuple(part(v, i) for v in item)

    return [part(whole, i) for i in range(count)]


def config(optimizer: Optimizer, **changes: Any) -> TrainerConfig:
    return TrainerConfig(optimizer=optimizer, correction=changes.pop("correction", corrections.none()), **changes)


def thirds(program: Program, count: int = 3) -> list[int]:
    cuts = legal_cuts(program)
    return [cuts[len(cuts) * k // count] for k in range(1, count)]


def plain(case: Case, data: Sequence[Any], accumulate: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """The loop of a PyTorch user."""
    for batch in data:
        optimizer.zero_grad()
        inputs, targets = batch
        parts = microbatches([inputs, targets], accumulate)
        for x, y in parts:
            (call(case, model, (x, y)) * (len(x) / len(inputs))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def torch_optimizer(optimizer: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    if optimizer.name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=3e-3)
    heavy = bool(optimizer.settings.get("momentum"))
    return torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9 if heavy else 0.0, weight_decay=1e-3 if heavy else 0.0
    )


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *((name, optimizer) for name in ("gpt", "gpt_tied", "digits") for optimizer in OPTIMIZERS),
        *(pytest.param("resnet50", o, marks=pytest.mark.soak if o != "momentum" else ()) for o in OPTIMIZERS),
    ],
)
def test_synchronous_mode_is_plain_pytorch_bit_for_bit(name: str, optimizer: str) -> None:
    if name == "resnet50" and optimizer != "momentum":
        optimizer = "momentum"  # one is enough for the largest
    case, program = made(name)
    accumulate = 1 if name == "gpt_tied" else 2  # shares of a tied gradient are added per step, not per microbatch
    data = batches(case, 2 if name == "resnet50" else 4, 4)
    model = case.build().train()
    model.load_state_dict({**program.tensors, **{n: program.tensors[t] for n, t in program.ties.items()}})
    plain(case, data, accumulate, torch_optimizer(OPTIMIZERS[optimizer], model), model)
    pipe = train(
        program,
        thirds(program),
        data,
        config(OPTIMIZERS[optimizer]),
        stage_schedules([3, 2, 1], accumulate, synchronous=True),
    )
    expected = {n: t for n, t in model.state_dict().items() if n not in program.ties}
    assert [n for n, t in expected.items() if not torch.equal(pipe.weights[n], t)] == []
    assert all(set(m.staleness) == {0} for m in pipe.metrics.values())


MODES = {
    "double-buffered": stage_schedules([4, 3, 2], 4),
    "paper": stage_schedules([5, 3, 1], 1),
    "bounded": stage_schedules([5, 3, 1], 1, max_staleness=2),
    "in between": stage_schedules([5, 3, 1], 2),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gpt_tied", "digits"])
def test_timing_changes_nothing(mode: str, name: str) -> None:
    """With the same seed and random delays of messages, the weights are the same bit for bit."""
    case, program = made(name)
    data = batches(case, 6, 8)
    settings = config(AdamW(3e-3, clip_norm=0.5), correction=corrections.look_ahead(1.0))
    runs = [train(program, thirds(program), data, settings, MODES[mode], jitter=jitter) for jitter in (None, 1, 2)]
    for other in runs[1:]:
        assert other.losses == runs[0].losses
        assert [n for n, t in other.weights.items() if not torch.equal(t, runs[0].weights[n])] == []
    for pipe in runs:
        for metrics, rule in zip(map(pipe.metrics.get, range(3)), MODES[mode], strict=True):
            assert metrics is not None
            assert max(metrics.staleness) <= rule.delay
            assert metrics.versions <= rule.delay + 1


def reference(
    case: Case, program: Program, data: Sequence[Any], rule: StageSchedule, optimizer: Optimizer, a: float
) -> dict[str, Tensor]:
    """The version rule, written out: step s runs on C_{s-1} and its gradient is applied to W_s."""
    model = case.build().train()
    names = [n for n, _ in model.named_parameters()]
    master = {n: program.tensors[n].detach().clone() for n in names}
    compute = [{n: t.clone() for n, t in master.items()}]
    stepper = Stepper(optimizer, master)
    for step, (inputs, targets) in enumerate(data):
        model.load_state_dict(compute[max(0, step - rule.delay)], strict=False)
        model.zero_grad()
        with patch.object(torch.nn.functional, "linear", linear):  # the interpreter's own, so that bits can be compared
            for x, y in microbatches([inputs, targets], rule.accumulate):
                (call(case, model, (x, y)) * (len(x) / len(inputs))).backward()  # type: ignore[no-untyped-call]
        before = {n: t.clone() for n, t in master.items()}
        stepper.step(master, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, step)
        compute.append({n: torch.lerp(before[n], master[n], 1.0 + a) if a else master[n].clone() for n in names})
    return master


@pytest.mark.parametrize("a", [0.0, 1.5])
@pytest.mark.parametrize(
    "optimizer", [SGD(0.1, momentum=0.9), NAdam(1e-3), Muon(1e-3), LAMB(1e-3)], ids=lambda o: o.name
)
def test_double_buffered_mode_follows_the_version_rule(optimizer: Optimizer, a: float) -> None:
    case, program = made("gpt")
    data = batches(case, 6, 8)
    rule = stage_schedules([4, 3, 2], 4)
    settings = config(optimizer, correction=corrections.look_ahead(a) if a else corrections.none(), memory="exact")
    pipe = train(program, thirds(program), data, settings, rule)
    if optimizer.name == "Muon":  # each stage distinguishes embeddings from matrices by itself
        assert all(torch.isfinite(t).all() for t in pipe.weights.values())
        return
    expected = reference(case, program, data, rule[0], optimizer, a)
    assert [n for n, t in expected.items() if not torch.equal(pipe.weights[n], t)] == []
    assert pipe.metrics[0].staleness == {0: 4, 1: 20}


def test_clipping_uses_the_norm_of_the_whole_model() -> None:
    case, program = made("gpt_tied")
    data = batches(case, 3, 4)
    model = case.build().train()
    model.load_state_dict({**program.tensors, **{n: program.tensors[t] for n, t in program.ties.items()}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for batch in data:
        optimizer.zero_grad()
        call(case, model, batch).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
    assert min(norms) > 0.3, "nothing would be clipped"
    pipe = train(
        program, thirds(program), data, config(SGD(0.5, clip_norm=0.3)), stage_schedules([3, 2, 1], 1, synchronous=True)
    )
    for name, tensor in pipe.weights.items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes", [{"recompute": True}, {"autocast": "bf16"}, {"compression": "bf16"}, {"compression": "int8"}], ids=str
)
def test_options_stay_close_to_plain_training(changes: dict[str, Any]) -> None:
    case, program = made("gpt")
    data = batches(case, 5, 8)
    plain_run, other = (
        train(program, thirds(program), data, config(SGD(0.1), **change), stage_schedules([4, 3, 2], 4))
        for change in ({}, changes)
    )
    if "recompute" in changes:
        assert all(torch.equal(plain_run.weights[n], t) for n, t in other.weights.items())
        return
    assert any(not torch.equal(plain_run.weights[n], t) for n, t in other.weights.items()), "the option does nothing"
    for n, t in other.weights.items():
        assert (t - plain_run.weights[n]).abs().max() < 0.02


def test_evaluation_does_not_change_training() -> None:
    case, program = made("gpt_tied")
    data = batches(case, 5, 8)
    held_out = case.batch(6)
    settings = config(AdamW(3e-3), correction=corrections.look_ahead(1.0))
    evaluate = {0: (held_out, False), 3: (held_out, False), 5: (held_out, True)}
    pipe = train(program, thirds(program), data, settings, stage_schedules([4, 3, 2], 4), evaluate=evaluate)
    undisturbed = train(program, thirds(program), data, settings, stage_schedules([4, 3, 2], 4))
    assert all(torch.equal(undisturbed.weights[n], t) for n, t in pipe.weights.items()), "evaluation changed training"
    model = case.build().eval()
    with torch.no_grad():
        for number, weights in ((0, program.tensors), (5, pipe.weights)):
            model.load_state_dict({**weights, **{n: weights[t] for n, t in program.ties.items()}})
            assert torch.equal(torch.tensor(pipe.evaluations[number][0]), call(case, model, held_out))


def test_a_loss_that_is_not_finite_stops_before_it_is_applied() -> None:
    case, program = made("digits")
    data = batches(case, 4, 8)
    good = train(program, thirds(program), data[:2], config(SGD(0.1)), stage_schedules([4, 3, 2], 4))
    inputs, targets = data[2]
    data[2] = (inputs.clone().index_fill_(0, torch.tensor([5]), float("nan")), targets)
    pipe = train(program, thirds(program), data, config(SGD(0.1)), stage_schedules([4, 3, 2], 4), ends_at=2)
    assert sorted(m for m, loss in pipe.losses.items() if loss[0] != loss[0]) == [10], "the third microbatch of step 2"
    assert [n for n, t in good.weights.items() if not torch.equal(pipe.weights[n], t)] == [], "buffers included"


def test_a_stage_with_a_share_of_a_core_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    case, program = made("digits")
    data, paused_s = batches(case, 2, 8), list[float]()
    clock = SimpleNamespace(thread_time=time.thread_time, sleep=paused_s.append)
    monkeypatch.setattr("ravnest.pipeline.loop.time", clock)
    rules = stage_schedules((1,), 2, synchronous=True)
    config = TrainerConfig(optimizer=SGD(0.1), correction=corrections.none())
    whole = train(program, (), data, config, rules)
    assert not paused_s
    shared = train(program, (), data, config, rules, processor_share=0.25)
    assert len(paused_s) == 2 * (2 + 2 + 1)  # after each forward, backward and update
    assert all(seconds > 0 for seconds in paused_s)
    assert whole.losses == shared.losses
