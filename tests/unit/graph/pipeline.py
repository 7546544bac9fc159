"""One training step of a whole model and of its stages, for comparison in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo import Case
from ravnest.graph import Interpreter, Program, Stage, Tape, dump, load


@dataclass(frozen=True)
class Step:
    """Results of one training step: the loss and other outputs, gradients and buffers by name."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def call(case: Case, model: nn.Module, batch: Any) -> Tensor:
    if case.loss is None:
        loss: Tensor = model(**batch).loss
        return loss
    inputs, targets = batch
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    result = case.loss(output, targets)
    scalar: Tensor = result[0] if isinstance(result, tuple) else result
    return scalar


def eager_step(case: Case, model: nn.Module, batch: Any, seed: int = 5) -> Step:
    """Plain PyTorch."""
    torch.manual_seed(seed)
    loss = call(case, model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Step([loss.detach()], gradients, {n: b.clone() for n, b in model.named_buffers()})


def fresh_state(program: Program) -> dict[str, Tensor]:
    """Copies of the model's tensors that can be trained independently."""
    return {s.target: program.tensors[s.target].detach().clone().requires_grad_(s.trainable) for s in program.state}


def over_the_wire(item: Any) -> Any:
    """A tensor as another machine receives it: contiguous and without autograd history."""
    if not isinstance(item, Tensor):
        return item
    return item.detach().clone(memory_format=torch.contiguous_format)


def staged_step(
    stages: Sequence[Stage], state: dict[str, Tensor], inputs: Sequence[Any], *, recompute: bool = False, seed: int = 5
) -> Step:
    """The same step through stages that were encoded as JSON and decoded, one after the other."""
    torch.manual_seed(seed)
    tapes: list[Tape] = []
    values: Sequence[Any] = inputs
    for stage in stages:
        tapes.append(Tape(Interpreter(load(dump(stage))), state, values, recompute=recompute))
        values = [over_the_wire(v) for v in tapes[-1].outputs]
    gradients: Sequence[Tensor | None] | None = None
    for tape in reversed(tapes):
        gradients = [over_the_wire(g) for g in tape.backward(gradients)]
    grads = {n: t.grad for n, t in state.items() if t.grad is not None}
    return Step(list(values), grads, {n: t for n, t in state.items() if not t.requires_grad})


def assert_same(step: Step, reference: Step) -> None:
    """Equal bit for bit: loss, every gradient, every buffer."""
    assert torch.equal(step.outputs[0], reference.outputs[0])
    assert step.gradients.keys() == reference.gradients.keys()
    different = [n for n, g in step.gradients.items() if not torch.equal(g, reference.gradients[n])]
    assert different == []
    changed = [
        n for n, b in step.buffers.items() if n in reference.buffers and not torch.equal(b, reference.buffers[n])
    ]
    assert changed == []


def thirds(cuts: Sequence[int]) -> list[int]:
    return [cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3]]
