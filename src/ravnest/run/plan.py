"""The plan of one cluster, and how to make it for nodes on this machine: where to cut, how many in flight.

How fast a run on this machine will go, before it is run: from seconds per microbatch to samples per second.

A node that is alone on its core passes a microbatch in its own seconds. Processes of one machine also share its cores:

    interval = max(the pipe's interval, for each core: the seconds of all nodes on it)       nodes pinned to cores
    interval = max(the pipe's interval, seconds of all nodes * threads / cores)              else
    window   = A * interval                                 or, flushed: first trip + (A - 1) * interval
    rate     = samples of a window / window
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from ravnest.core.config import config, require
from ravnest.core.schedule import StageSchedule, stage_schedules
from ravnest.graph import Costs, Program, Stage, legal_cuts, measure_costs, split
from ravnest.graph.program import refs
from ravnest.graph.timing import OpSeconds, measure_seconds, torch_threads
from ravnest.pipeline.optimizers import Optimizer, state_bytes_per_parameter
from ravnest.pipeline.staleness import Correction, Corrector
from ravnest.planner import Chain, MemoryModel, Node, Problem, Storage, interval_s
from ravnest.planner.partition import partition
from ravnest.profiling.overhead import StageOverhead, measure_upkeep, with_upkeep
from ravnest.profiling.speed import measure_slowdown

__all__ = [
    "LocalPlanOptions",
    "LocalTimings",
    "PipelinePlan",
    "StagePlan",
    "chain_of",
    "memory_model",
    "node_names",
    "plan_local",
    "time_local",
    "Cores",
    "expected_rate",
]


@config
class Cores:
    """Where nodes compute: on a core of their own or one that they share (`pinned`), else on any of `count`."""

    count: float
    threads: int = 1
    pinned: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require(self.count > 0, f"count must be > 0, got {self.count}")
        require(self.threads >= 1, f"a node has at least one thread, not {self.threads}")

    def of(self, group: Sequence[int], num_clusters: int) -> Cores:
        """Return the cores as the nodes of one of several clusters have them."""
        if self.pinned is not None:
            return replace(self, pinned=tuple(self.pinned[i] for i in group))
        return replace(self, count=self.count / num_clusters)

    def interval_s(self, work_s: Sequence[float]) -> float:
        """How often all nodes' work can be done, if each needs so many seconds of a whole core."""
        if self.pinned is None:
            return sum(work_s) * self.threads / self.count
        load = dict.fromkeys(self.pinned, 0.0)
        for core, seconds in zip(self.pinned, work_s, strict=True):
            load[core] += seconds
        return max(load.values())


def expected_rate(
    work_s: Sequence[float], speeds: Sequence[float], rules: Sequence[StageSchedule], cores: Cores, batch_size: int
) -> float:
    """Samples per second: `work_s` is what a microbatch takes each node at full speed, `speeds` what it has of that."""
    own_s = [seconds / speed for seconds, speed in zip(work_s, speeds, strict=True)]
    accumulate = rules[0].accumulate
    every_s = max(interval_s(own_s, (), _in_flight(rules)), cores.interval_s(work_s))
    window_s = accumulate * every_s
    if all(rule.delay == 0 for rule in rules):
        window_s = max(sum(own_s) + (accumulate - 1) * every_s, window_s)
    return batch_size / max(window_s, 1e-9)


def _in_flight(rules: Sequence[StageSchedule]) -> list[int]:
    """What the depth allows, and the delay: no more than its windows hold."""
    return [min(rule.depth, rule.accumulate * max(rule.delay, 1)) for rule in rules]


@config
class LocalPlanOptions:
    """Options of a local plan; None leaves a choice to the planner."""

    nodes: int
    batch_size: int
    clusters: int = 1
    accumulate: int | None = None
    microbatch: int | None = None
    synchronous: bool = False
    max_staleness: int | None = None
    memory_bytes: tuple[int, ...] | None = None
    speeds: tuple[float, ...] | None = None  # of each node, relative to a core of its own
    cores: Cores = Cores(count=1)
    recompute: bool = False

    def __post_init__(self) -> None:
        require(self.nodes >= 1, f"nodes must be >= 1, got {self.nodes}")
        require(
            1 <= self.clusters <= self.nodes,
            f"clusters must be from 1 to the number of nodes ({self.nodes}), got {self.clusters}",
        )
        require(self.accumulate is None or self.microbatch is None, "give accumulate or microbatch, not both")
        require(self.accumulate is None or self.accumulate >= 1, "accumulate must be at least 1")
        require(self.microbatch is None or self.microbatch >= 1, "microbatch must be at least 1 sample")
        require(
            self.memory_bytes is None or len(self.memory_bytes) == self.nodes,
            f"{self.nodes} nodes need as many memory sizes, got {len(self.memory_bytes or ())}",
        )
        require(
            self.speeds is None or len(self.speeds) == self.nodes,
            f"{self.nodes} nodes need as many speeds, got {len(self.speeds or ())}",
        )

    @property
    def groups(self) -> list[list[int]]:
        """The nodes of each cluster, as equal in number as can be."""
        bounds = [self.nodes * i // self.clusters for i in range(self.clusters + 1)]
        return [list(range(first, end)) for first, end in pairwise(bounds)]

    @property
    def speed_of(self) -> tuple[float, ...]:
        """The speed of each node, for a fair share of the work: nodes that share a core have a part of it."""
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
class PipelinePlan:
    """Everything a run needs, and what we expect of it."""

    stages: tuple[Stage, ...]
    plans: tuple[StagePlan, ...]
    rules: tuple[StageSchedule, ...]
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


@dataclass(frozen=True)
class LocalTimings:
    """A program in numbers, measured on this machine, and how it is trained here."""

    program: Program
    options: LocalPlanOptions
    costs: Costs
    chain: Chain
    overhead: StageOverhead
    memory: MemoryModel
    accumulate: int

    @property
    def microbatch(self) -> int:
        """Samples of the largest microbatch."""
        return self.costs.batch


def time_local(
    program: Program, optimizer: Optimizer, correction: Correction, options: LocalPlanOptions
) -> LocalTimings:
    """Measure the operations of a program, and what a stage's processor does besides them, on this machine."""
    accumulate = _accumulate(options)
    costs = measure_costs(program, -(-options.batch_size // accumulate))
    memory = memory_model(
        program, optimizer, correction,
        synchronous=options.synchronous or max(map(len, options.groups)) == 1, accumulate=accumulate,
        recompute=options.recompute,
    )  # fmt: skip
    with torch_threads(options.cores.threads):
        overhead = measure_upkeep(program, optimizer, correction, delay=0 if memory.synchronous else 1)
        chain = with_upkeep(chain_of(program, costs), overhead, accumulate)
    return LocalTimings(program, options, costs, chain, overhead, memory, accumulate)


def plan_local(timings: LocalTimings, group: Sequence[int]) -> PipelinePlan:
    """Return the cuts that give these nodes the fastest pipeline within each node's memory."""
    options, chain, program, costs = timings.options, timings.chain, timings.program, timings.costs
    nodes, names = tuple(_node(options, i) for i in group), node_names(options.nodes)
    # On one machine a byte over a cut costs processor time at both ends: a cheap cut is worth a little balance.
    found = partition(Problem(chain=chain, nodes=nodes, memory=timings.memory, tolerance=0.03))
    is_chosen = options.accumulate or options.microbatch
    depths = found.depths if is_chosen else [min(d, timings.accumulate) for d in found.depths]
    schedules = stage_schedules(
        depths, timings.accumulate, synchronous=options.synchronous, max_staleness=options.max_staleness
    )
    bounds = [0, *found.cuts, len(program.ops)]
    work_s = [
        seconds * node.speed + timings.overhead.move_s * sum(chain.cut_bytes(b) for b in bounds[i : i + 2])
        for i, (seconds, node) in enumerate(zip(found.stage_seconds, nodes, strict=True))
    ]
    rows = tuple(
        StagePlan(
            node=names[group[i]], first_op=bounds[i], num_ops=bounds[i + 1] - bounds[i],
            parameter_bytes=costs.parameter_bytes(bounds[i], bounds[i + 1]), memory_bytes=found.memory[i].total,
            seconds=work_s[i] / nodes[i].speed, sends_bytes=costs.cuts[bounds[i + 1]].forward_bytes,
            depth=schedules[i].depth, delay=schedules[i].delay,
        )
        for i in range(len(group))
    )  # fmt: skip
    speeds = [(options.speeds or (1.0,) * options.nodes)[i] for i in group]
    rate = expected_rate(work_s, speeds, schedules, options.cores.of(group, options.clusters), options.batch_size)
    return PipelinePlan(
        tuple(split(program, found.cuts)), rows, tuple(schedules), found.cuts, timings.accumulate,
        timings.microbatch, rate, found.reason,
    )  # fmt: skip


def node_names(count: int) -> tuple[str, ...]:
    """Return the names of local nodes."""
    return tuple(f"node-{i}" for i in range(count))


def _accumulate(options: LocalPlanOptions) -> int:
    """Microbatches per step: as chosen, else as many as a pipeline of equal stages has in flight (staleness 1)."""
    if options.microbatch is not None:
        return -(-options.batch_size // min(options.microbatch, options.batch_size))
    return options.accumulate or min(max(map(len, options.groups)) + 1, options.batch_size)


def _node(options: LocalPlanOptions, i: int) -> Node:
    memory = float("inf") if options.memory_bytes is None else options.memory_bytes[i]
    return Node(speed=options.speed_of[i], memory_bytes=memory)


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


def time_ops(program: Program, costs: Costs) -> list[OpSeconds]:
    """Seconds of each operation in a training run on this machine. Tests replace it by a fixed table."""
    alone = measure_seconds(program, costs.batch, budget_s=2.0, costs=costs)
    slowdown = measure_slowdown(program, costs, alone, budget_s=0.7)
    return [OpSeconds(s.forward_s * slowdown, s.backward_s * slowdown) for s in alone]


def chain_of(program: Program, costs: Costs) -> Chain:
    """The program in numbers, as the planner takes it: its seconds are those of a training run on this machine."""
    seconds = time_ops(program, costs)
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
