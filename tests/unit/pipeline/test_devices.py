"""A pipeline on accelerators computes what one on processors does, and copies no more than it sends and receives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ravnest.core.schedule import stage_schedules
from ravnest.graph import split
from ravnest.pipeline import staleness as corrections
from ravnest.pipeline.optimizers import LAMB, SOAP, AdamW, Muon, Optimizer
from ravnest.pipeline.state import join
from ravnest.pipeline.tensor_codec import StageCodecs
from tests.accelerator.devices import TestAccelerator
from tests.unit.pipeline.pipe import Pipe, train
from tests.unit.pipeline.test_training import batches, config, made, thirds

PROCESSOR, ACCELERATOR = ("cpu",) * 3, ("testacc:0",) * 3
MIXED = ("cpu", "testacc:0", "cpu")
CLIPPED = AdamW(3e-3, clip_norm=1.0)


def run(name: str, devices: tuple[str, ...], optimizer: Optimizer = CLIPPED, **settings: Any) -> Pipe:
    """Train four steps; tied weights, clipping and an evaluation included."""
    case, program = made(name)
    data, mode = batches(case, 4, 4), settings.pop("mode", "async")
    options = {key: settings.pop(key) for key in ("jitter", "start", "save_at", "whole", "steps") if key in settings}
    rules = stage_schedules([3, 2, 1], 2, synchronous=mode == "sync")
    chosen = config(optimizer, correction=settings.pop("correction", corrections.DEFAULT), **settings)
    steps = options.pop("steps", slice(0, 4))
    evaluate = {2: (data[0], False)} if steps == slice(0, 4) else None
    return train(program, thirds(program), data[steps], chosen, rules, devices=devices, evaluate=evaluate, **options)


def same(a: Pipe, b: Pipe) -> bool:
    """Whether two runs have the same bits."""
    weights = all(torch.equal(tensor, b.weights[name]) for name, tensor in a.weights.items())
    return weights and (a.losses, a.evaluations) == (b.losses, b.evaluations)


SAVED = (("compact", False), ("exact", True), ("exact", False))
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "synchronous": ("gpt_tied", {"mode": "sync"}),
    "convolutions": ("digits", {"mode": "sync"}),
    "recomputed": ("gpt", {"mode": "sync", "recompute": True}),
    "small": ("gpt", {"mode": "sync", "memory": "small"}),
    "compact": ("gpt_tied", {}),
    "exact": ("gpt", {"memory": "exact"}),
    "compensated": ("gpt", {"memory": "exact", "correction": corrections.delay_compensation(0.1)}),
    "compressed": ("gpt", {"compression": "int8"}),
    "Muon": ("gpt", {"optimizer": Muon(1e-2, clip_norm=1.0)}),
    "SOAP": ("gpt", {"optimizer": SOAP(3e-3)}),
    "LAMB": ("gpt", {"optimizer": LAMB(3e-3)}),
}


def some(*names: str) -> list[Any]:
    """All trainings; those with other names are in the soak suite."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.soak) for name in TRAININGS]


@pytest.mark.parametrize("name", some("synchronous", "compact", "exact", "compressed"))
def test_the_bits_are_those_of_the_processor(name: str, accelerator: TestAccelerator) -> None:
    model, settings = TRAININGS[name]
    assert same(run(model, ACCELERATOR, **settings), run(model, PROCESSOR, **settings))


@pytest.mark.parametrize("name", some("compact"))
def test_a_pipeline_of_both_kinds_has_the_same_bits(name: str, accelerator: TestAccelerator) -> None:
    model, settings = TRAININGS[name]
    assert same(run(model, MIXED, **settings), run(model, PROCESSOR, **settings))


@pytest.mark.soak
def test_late_messages_change_no_bit(accelerator: TestAccelerator) -> None:
    assert same(run("gpt_tied", ACCELERATOR, jitter=1), run("gpt_tied", ACCELERATOR))


def test_autocast_computes_in_bfloat16_on_the_device(accelerator: TestAccelerator) -> None:
    here, there = (run("gpt", devices, autocast="bf16") for devices in (PROCESSOR, ACCELERATOR))
    plain = run("gpt", ACCELERATOR)
    assert there.losses[0] != plain.losses[0]
    for number, losses in here.losses.items():
        assert there.losses[number] == pytest.approx(losses, rel=2e-2)


@pytest.mark.parametrize("compression", [pytest.param("none", marks=pytest.mark.soak), "int8"])
def test_a_microbatch_is_copied_at_the_edges_only(compression: str, accelerator: TestAccelerator) -> None:
    """Inputs and received gradients to the device; outputs, sent gradients and the losses to the host."""
    case, program = made("gpt")
    data, num_microbatches = batches(case, 4, 4), 8
    cuts = thirds(program)
    state = sum(len(stage.state) for stage in split(program, cuts))
    codecs = [StageCodecs.of(stage, compression, 1024) for stage in split(program, cuts)]
    inputs, gradients = codecs[0].inputs.values, [c.gradients_out for c in codecs[1:]]
    messages = sum(len(c.outputs.pack(_examples(c.outputs))) for c in codecs[:-1])
    messages += sum(len(c.pack(_examples(c))) for c in gradients)
    losses = len(codecs[-1].outputs.values)
    accelerator.reset()
    train(
        program, cuts, data, config(AdamW(3e-3), compression=compression, correction=corrections.DEFAULT),
        stage_schedules([3, 2, 1], 2), devices=ACCELERATOR,
    )  # fmt: skip
    counts = accelerator.counts
    saved = len(program.state)  # the test reads all weights at the end
    assert counts.to_device - state <= (len(inputs) + messages) * num_microbatches + 8  # a table of random numbers, ...
    assert counts.to_host - saved <= (messages + losses) * num_microbatches + 8


def _examples(codec: Any) -> list[Any]:
    return [torch.zeros(2, 2) for _ in codec.values]


@pytest.mark.parametrize(
    ("memory", "whole"),
    [("compact", True), *(pytest.param(*each, marks=pytest.mark.soak) for each in SAVED)],
)
def test_a_run_continues_on_another_kind_of_device(whole: bool, memory: str, accelerator: TestAccelerator) -> None:
    """From the accelerator to the processor and back: the same bits as on one kind."""
    for first, then in ((ACCELERATOR, PROCESSOR), (PROCESSOR, ACCELERATOR)):
        begun = run("gpt", first, memory=memory, steps=slice(0, 2), save_at=2, whole=whole)
        start = join(begun.states)
        assert {tensor.device.type for tensor in start.tensors.values()} == {"cpu"}
        options: dict[str, Any] = {"memory": memory, "steps": slice(2, 4), "start": start}
        assert same(run("gpt", then, **options), run("gpt", first, **options))


def test_too_little_memory_of_the_device_is_its_own_error(accelerator: TestAccelerator) -> None:
    accelerator.limit(1_000_000)
    with pytest.raises(torch.OutOfMemoryError, match="testacc out of memory"):
        run("gpt", ("cpu", "testacc:0", "cpu"))
