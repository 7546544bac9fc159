"""Costs compared with a real run of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import zoo
from benchmarks.zoo import Case
from ravnest.graph import legal_cuts, measure_costs, split, trace
from ravnest.graph.program import num_bytes
from tests.unit.graph.pipeline import call

MAKERS: dict[str, Callable[[], Case]] = {"gpt": zoo.gpt, "gpt2": zoo.gpt2, "llama": zoo.llama, "resnet50": zoo.resnet50}


@pytest.mark.parametrize("name", MAKERS)
def test_flops_and_saved_bytes_are_those_of_the_real_run(name: str) -> None:
    case = MAKERS[name]()
    program = trace(case.build, case.loss, case.batch(2))
    costs = measure_costs(program, batch=3)
    saved: dict[int, int] = {}
    alive: list[Tensor] = []
    model = case.build().train()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            loss = call(case, model, case.batch(3))
        forward = counter.get_total_flops()
        loss.backward()  # type: ignore[no-untyped-call]
    # torch's counter leaves out elementwise work and, on a CPU, attention; ours has both.
    assert 1.0 <= sum(op.forward_flops for op in costs.ops) / forward < 1.1
    assert 1.0 <= costs.flops(0, len(program.ops)) / counter.get_total_flops() < 1.1
    assert costs.saved_bytes(0, len(program.ops)) == sum(saved.values())
    assert costs.parameter_bytes(0, len(program.ops)) == sum(p.numel() * 4 for p in model.parameters())


def test_bytes_over_a_cut_are_those_of_the_stages() -> None:
    case = zoo.bert()
    program = trace(case.build, case.loss, case.batch(2))
    costs = measure_costs(program, batch=5)
    for cut in legal_cuts(program):
        outputs = split(program, [cut])[0].outputs
        assert costs.cuts[cut].forward_bytes == sum(num_bytes(v, 5) for v in outputs)
        assert costs.cuts[cut].backward_bytes == sum(num_bytes(v, 5) for v in outputs if v.grad)


def test_parts_add_up() -> None:
    case = zoo.gpt()
    program = trace(case.build, case.loss, case.batch(2))
    costs, end = measure_costs(program, batch=4), len(program.ops)
    assert costs.flops(0, 40) + costs.flops(40, end) == costs.flops(0, end)
    assert costs.parameter_bytes(0, 40) + costs.parameter_bytes(40, end) == costs.parameter_bytes(0, end)
    assert costs.saved_bytes(0, 40) + costs.saved_bytes(40, end) >= costs.saved_bytes(0, end)
