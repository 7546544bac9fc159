"""Who does what on this machine: where to cut for a number of local workers, and how deep to fill the pipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .core.config import config, require
from .core.schedule import Rule, rules
from .graph import Costs, Program, Stage, legal_cuts, measure_costs, split
from .graph.program import refs
from .graph.threads import torch_threads
from .graph.timing import measure_seconds
from .localrate import Cores, expected_rate
from .plan import Chain, MemoryModel, Node, Problem, Storage, partition
from .profile.strain import measure_strain
from .runtime.corrections import Correction, Corrector
from .runtime.optimizers import Optimizer, state_bytes_per_parameter
from .upkeep import measure_upkeep, with_upkeep

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
    speeds: tuple[float, ...] | None = None  # of each node, next to a core of its own
    cores: Cores = Cores(count=1)
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
        require(
            self.speeds is None or len(self.speeds) == self.nodes,
            f"{self.nodes} nodes need as many speeds, not {len(self.speeds or ())}",
        )

    @property
    def speed_of(self) -> tuple[float, ...]:
        """How fast each node is, for a fair share of the work: those that share a core count for a part of it."""
        if self.speeds is None and (pinned := self.cores.pinned) is not None:
            return tuple(1 / pinned.count(core) for core in pinned)
        return self.speeds or (1.0,) * self.nodes


@dataclass(frozen=True)
class StagePlan:
    """One stage as it is expected to be."""

    node: str
    first_op: int
    num_ops: int
    parameter_bytes: int
    memory_bytes: int
    seconds: float  # of work per microbatch: operations, adding gradients, updates, messages
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
    samples_per_s: float  # that we expect
    reason: str

    def content(self) -> dict[str, object]:
        return {
            "cuts": self.cuts, "accumulate": self.accumulate, "max_microbatch": self.max_microbatch,
            "samples_per_s": self.samples_per_s, "reason": self.reason, "stages": [asdict(p) for p in self.plans],
        }  # fmt: skip

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.content(), indent=1) + "\n")


def plan_local(program: Program, optimizer: Optimizer, correction: Correction, wishes: Wishes) -> LocalPlan:
    """The cuts that give the fastest pipe within each node's memory, by operation times measured here."""
    accumulate = _accumulate(wishes)
    largest = -(-wishes.batch_size // accumulate)
    costs = measure_costs(program, largest)
    memory = memory_model(
        program, optimizer, correction, synchronous=wishes.synchronous or wishes.nodes == 1, accumulate=accumulate,
        recompute=wishes.recompute,
    )  # fmt: skip
    with torch_threads(wishes.cores.threads):
        upkeep = measure_upkeep(program, optimizer, correction, delay=0 if memory.synchronous else 1)
        chain = with_upkeep(chain_of(program, costs), upkeep, accumulate)
    # On one machine a byte over a cut costs processor time at both ends: a cheap cut is worth a little balance.
    found = partition(Problem(chain=chain, nodes=tuple(_nodes(wishes)), memory=memory, tolerance=0.03))
    depths = found.depths if wishes.accumulate or wishes.microbatch else [min(d, accumulate) for d in found.depths]
    chosen = rules(depths, accumulate, synchronous=wishes.synchronous, max_staleness=wishes.max_staleness)
    bounds = [0, *found.cuts, len(program.ops)]
    work_s = [
        seconds * speed + upkeep.move_s * sum(chain.cut_bytes(b) for b in bounds[i : i + 2])
        for i, (seconds, speed) in enumerate(zip(found.stage_seconds, wishes.speed_of, strict=True))
    ]
    plans = tuple(
        StagePlan(
            node=f"node-{i}", first_op=bounds[i], num_ops=bounds[i + 1] - bounds[i],
            parameter_bytes=costs.parameter_bytes(bounds[i], bounds[i + 1]), memory_bytes=found.memory[i].total,
            seconds=work_s[i] / wishes.speed_of[i], sends_bytes=costs.cuts[bounds[i + 1]].forward_bytes,
            depth=chosen[i].depth, delay=chosen[i].delay,
        )
        for i in range(wishes.nodes)
    )  # fmt: skip
    stages = tuple(split(program, found.cuts))
    rate = expected_rate(work_s, wishes.speeds or (1.0,) * wishes.nodes, chosen, wishes.cores, wishes.batch_size)
    return LocalPlan(stages, plans, tuple(chosen), found.cuts, accumulate, largest, rate, found.reason)


def _accumulate(wishes: Wishes) -> int:
    """Microbatches per step: as asked, else as many as a pipe of equal stages has in flight, so the delay is one."""
    if wishes.microbatch is not None:
        return -(-wishes.batch_size // min(wishes.microbatch, wishes.batch_size))
    return wishes.accumulate or min(wishes.nodes + 1, wishes.batch_size)


def _nodes(wishes: Wishes) -> Iterator[Node]:
    for i in range(wishes.nodes):
        memory = float("inf") if wishes.memory_bytes is None else wishes.memory_bytes[i]
        yield Node(speed=wishes.speed_of[i], memory_bytes=memory)


def memory_model(
    program: Program,
    optimizer: Optimizer,
    correction: Correction,
    *,
    synchronous: bool = False,
    accumulate: int = 0,
    recompute: bool = False,
    ring_copies: int = 0,
) -> MemoryModel:
    """How a training of this program uses memory."""
    return MemoryModel(
        ring_copies=ring_copies,
        synchronous=synchronous,
        accumulate=accumulate,
        correction_copies=Corrector(correction).extra_copies,
        optimizer_ratio=state_bytes_per_parameter(optimizer) / 4,
        gradient_copies=2 if optimizer.clip_norm is not None or program.ties else 1,
        recompute=recompute,
    )


def chain_of(program: Program, costs: Costs) -> Chain:
    """The program in numbers, as the planner takes it: its seconds are those of a training run on this machine."""
    seconds = measure_seconds(program, costs.batch, budget_s=2.0, costs=costs)
    strain = measure_strain(program, costs, seconds, budget_s=0.7)
    readers: dict[str, list[int]] = {s.name: [] for s in program.state}
    for i, op in enumerate(program.ops):
        for name in dict.fromkeys(refs(op)):
            if name in readers:
                readers[name].append(i)
    kept = [(s, Storage(s.num_bytes, tuple(readers[s.name]))) for s in program.state]
    return Chain(
        forward_s=tuple(s.forward_s * strain for s in seconds),
        backward_s=tuple(s.backward_s * strain for s in seconds),
        cuts=tuple(legal_cuts(program)),
        forward_bytes=tuple(c.forward_bytes for c in costs.cuts),
        backward_bytes=tuple(c.backward_bytes for c in costs.cuts),
        weights=tuple(storage for s, storage in kept if s.trainable),
        fixed=tuple(storage for s, storage in kept if not s.trainable),
        saved=tuple(Storage(s.num_bytes, s.ops) for s in costs.saved),
        work_bytes=tuple(op.result_bytes for op in costs.ops),
    )
