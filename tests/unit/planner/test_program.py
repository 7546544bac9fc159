"""A traced model in numbers: what is predicted for its stages is what they are."""

from __future__ import annotations

import pytest

from benchmarks import zoo
from ravnest.graph import Costs, Program, legal_cuts, measure_costs, split, trace
from ravnest.graph.program import refs
from ravnest.graph.timing import OpSeconds
from ravnest.planner import Chain, MemoryModel, Node, Problem, Storage
from ravnest.planner.partition import partition


def to_chain(program: Program, costs: Costs, seconds: tuple[OpSeconds, ...]) -> Chain:
    readers: dict[str, list[int]] = {s.name: [] for s in program.state}
    for i, op in enumerate(program.ops):
        for name in dict.fromkeys(refs(op)):
            if name in readers:
                readers[name].append(i)
    trained = [s for s in program.state if s.kind == "parameter" and s.trainable]
    fixed = [s for s in program.state if s not in trained]
    return Chain(
        forward_s=tuple(s.forward_s for s in seconds),
        backward_s=tuple(s.backward_s for s in seconds),
        cuts=tuple(legal_cuts(program)),
        forward_bytes=tuple(c.forward_bytes for c in costs.cuts),
        backward_bytes=tuple(c.backward_bytes for c in costs.cuts),
        weights=tuple(Storage(s.num_bytes, tuple(readers[s.name])) for s in trained),
        fixed=tuple(Storage(s.num_bytes, tuple(readers[s.name])) for s in fixed),
        saved=tuple(Storage(s.num_bytes, s.ops) for s in costs.saved),
        work_bytes=tuple(op.result_bytes for op in costs.ops),
    )


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_gpt(tied: bool) -> None:
    case = zoo.gpt(tied=tied)
    program = trace(case.build, case.loss, case.batch(2))
    costs = measure_costs(program, 4)
    seconds = tuple(OpSeconds(c.forward_flops * 1e-10, c.backward_flops * 1e-10) for c in costs.ops)
    memory = MemoryModel(base_bytes=0, optimizer_ratio=0.0, synchronous=True, link_buffers=0)
    problem = Problem(chain=to_chain(program, costs, seconds), nodes=(Node(), Node(), Node(speed=2.0)), memory=memory)
    found = partition(problem)
    stages = split(program, found.cuts)
    assert found.interval_s < 1.2 * sum(s.total_s for s in seconds) / 4
    for stage, taken, depth, start, stop in zip(
        stages, found.memory, found.depths, (0, *found.cuts), (*found.cuts, len(program.ops)), strict=True
    ):
        assert taken.weights == taken.gradients == sum(s.num_bytes for s in stage.parameters)
        assert taken.activations == depth * costs.saved_bytes(start, stop)
    assert bool(stages[-1].borrowed) is tied
