"""Who does what on this machine: where to cut for a number of local workers, and how deep to fill the pipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .core.config import config, require
from .core.schedule import Rule, rules
from .graph import Costs, Program, Stage, legal_cuts, measure_costs, split
from .graph.program import refs
from .graph.timing import measure_seconds
from .plan import Chain, MemoryModel, Node, Problem, Storage, partition
from .runtime.corrections import Correction, Corrector
from .runtime.optimizers import Optimizer, state_bytes_per_parameter

__all__ = ["LocalPlan", "StagePlan", "Wishes", "chain_of", "memory_model", "plan_local"]


@config
class Wishes:
    """What the user asks of a plan; None leaves it to us."""

    nodes: int
    batch_size: int
    accumulate: int | None = None
    microbatch: int | None = None
    synchronous: bool = False
    max_staleness: int | None = None
    memory_bytes: tuple[int, ...] | None = None
    speeds: tuple[float, ...] | None = None
    threads: int = 1  # torch threads of each node, and so of the measurements
    recompute: bool = False

    def __post_init__(self) -> None:
        require(self.nodes >= 1, f"a run needs at least one node, not {self.nodes}")
        require(self.accumulate is None or self.microbatch is None, "give accumulate or microbatch, not both")
        require(self.accumulate is None or self.accumulate >= 1, "accumulate must be at least 1")
        require(self.microbatch is None or self.microbatch >= 1, "microbatch must be at least 1 sample")
        require(
            self.memory_bytes is None or len(self.memory_bytes) == self.nodes,
            f"{self.nodes} nodes need as many memory sizes, not {len(self.memory_bytes or ())}",
        )


@dataclass(frozen=True)
class StagePlan:
    """One stage as it is expected to be."""

    node: str
    first_op: int
    num_ops: int
    parameter_bytes: int
    memory_bytes: int
    seconds: float  # of compute per microbatch
    sends_bytes: int  # forward, per microbatch
    depth: int
    delay: int


@dataclass(frozen=True)
class LocalPlan:
    """Everything a run needs, and what we expect of it."""

    stages: tuple[Stage, ...]
    plans: tuple[StagePlan, ...]
    rules: tuple[Rule, ...]
    cuts: tuple[int, ...]
    accumulate: int
    max_microbatch: int
    reason: str

    def write(self, path: Path) -> None:
        content = {
            "cuts": self.cuts, "accumulate": self.accumulate, "max_microbatch": self.max_microbatch,
            "reason": self.reason, "stages": [asdict(p) for p in self.plans],
        }  # fmt: skip
        path.write_text(json.dumps(content, indent=1) + "\n")


def plan_local(program: Program, optimizer: Optimizer, correction: Correction, wishes: Wishes) -> LocalPlan:
    """The cuts that give the fastest pipe within each node's memory, by operation times measured here."""
    accumulate = _accumulate(wishes)
    largest = -(-wishes.batch_size // accumulate)
    costs = measure_costs(program, largest)
    memory = memory_model(
        program, optimizer, correction, synchronous=wishes.synchronous or wishes.nodes == 1, accumulate=accumulate,
        recompute=wishes.recompute,
    )  # fmt: skip
    with _threads(wishes.threads):
        chain = chain_of(program, costs)
    # On one machine a byte over a cut costs processor time at both ends: a cheap cut is worth a little balance.
    found = partition(Problem(chain=chain, nodes=tuple(_nodes(wishes)), memory=memory, tolerance=0.03))
    depths = found.depths if wishes.accumulate or wishes.microbatch else [min(d, accumulate) for d in found.depths]
    chosen = rules(depths, accumulate, synchronous=wishes.synchronous, max_staleness=wishes.max_staleness)
    bounds = [0, *found.cuts, len(program.ops)]
    plans = tuple(
        StagePlan(
            node=f"node-{i}", first_op=bounds[i], num_ops=bounds[i + 1] - bounds[i],
            parameter_bytes=costs.parameter_bytes(bounds[i], bounds[i + 1]), memory_bytes=found.memory[i].total,
            seconds=found.stage_seconds[i], sends_bytes=costs.cuts[bounds[i + 1]].forward_bytes,
            depth=chosen[i].depth, delay=chosen[i].delay,
        )
        for i in range(wishes.nodes)
    )  # fmt: skip
    stages = tuple(split(program, found.cuts))
    return LocalPlan(stages, plans, tuple(chosen), found.cuts, accumulate, largest, found.reason)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """As many torch threads as the workers will have."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _accumulate(wishes: Wishes) -> int:
    """Microbatches per step: as asked, else as many as a pipe of equal stages has in flight, so the delay is one."""
    if wishes.microbatch is not None:
        return -(-wishes.batch_size // min(wishes.microbatch, wishes.batch_size))
    return wishes.accumulate or min(wishes.nodes + 1, wishes.batch_size)


def _nodes(wishes: Wishes) -> Iterator[Node]:
    for i in range(wishes.nodes):
        memory = float("inf") if wishes.memory_bytes is None else wishes.memory_bytes[i]
        yield Node(speed=1.0 if wishes.speeds is None else wishes.speeds[i], memory_bytes=memory)


def memory_model(
    program: Program,
    optimizer: Optimizer,
    correction: Correction,
    *,
    synchronous: bool = False,
    accumulate: int = 0,
    recompute: bool = False,
) -> MemoryModel:
    """How a training of this program uses memory."""
    return MemoryModel(
        synchronous=synchronous,
        accumulate=accumulate,
        correction_copies=Corrector(correction).extra_copies,
        optimizer_ratio=state_bytes_per_parameter(optimizer) / 4,
        gradient_copies=2 if optimizer.clip_norm is not None or program.ties else 1,
        recompute=recompute,
    )


def chain_of(program: Program, costs: Costs) -> Chain:
    """The program in numbers, as the planner takes it."""
    seconds = measure_seconds(program, costs.batch, budget_s=2.0, costs=costs)
    readers: dict[str, list[int]] = {s.name: [] for s in program.state}
    for i, op in enumerate(program.ops):
        for name in dict.fromkeys(refs(op)):
            if name in readers:
                readers[name].append(i)
    kept = [(s, Storage(s.num_bytes, tuple(readers[s.name]))) for s in program.state]
    return Chain(
        forward_s=tuple(s.forward_s for s in seconds),
        backward_s=tuple(s.backward_s for s in seconds),
        cuts=tuple(legal_cuts(program)),
        forward_bytes=tuple(c.forward_bytes for c in costs.cuts),
        backward_bytes=tuple(c.backward_bytes for c in costs.cuts),
        weights=tuple(storage for s, storage in kept if s.trainable),
        fixed=tuple(storage for s, storage in kept if not s.trainable),
        saved=tuple(Storage(s.num_bytes, s.ops) for s in costs.saved),
        work_bytes=tuple(op.result_bytes for op in costs.ops),
    )
