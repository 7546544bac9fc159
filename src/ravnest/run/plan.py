"""Plans clusters of nodes on this machine: cuts, microbatches in flight, and the expected speed.

The speed is predicted from the seconds per microbatch of each node. A node that is alone on its core processes a
microbatch in its own seconds; processes of one machine also share its cores:

    interval = max(interval of the pipeline, for each core: seconds of all nodes on it)     nodes pinned to cores
    interval = max(interval of the pipeline,
                   (seconds of all nodes * threads + seconds of the requester) / cores)     else
    step     = A * interval                       or, in synchronous mode: first trip + (A - 1) * interval
    rate     = samples of a step / step

A is the number of microbatches per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from ravnest.core.config import config, require
from ravnest.core.schedule import StageSchedule, stage_schedules
from ravnest.graph import Costs, Program, Stage, legal_cuts, measure_costs, split
from ravnest.graph.program import DTYPES, refs
from ravnest.graph.timing import OpSeconds, measure_seconds, torch_threads
from ravnest.pipeline.config import memory_mode
from ravnest.pipeline.optimizers import Optimizer, most_basis_bytes, state_bytes_per_parameter
from ravnest.pipeline.staleness import Correction, Corrector
from ravnest.planner import Chain, MemoryModel, Node, Problem, Storage, interval_s
from ravnest.planner.partition import partition
from ravnest.profiling.overhead import StageOverhead, measure_overhead, with_overhead
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
    """Cores that nodes compute on: the one of each node (`pinned`), which nodes may share, or any of `count`."""

    count: float
    threads: int = 1
    pinned: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require(self.count > 0, f"count must be > 0, got {self.count}")
        require(self.threads >= 1, f"threads must be >= 1, got {self.threads}")

    def of(self, group: Sequence[int], num_clusters: int) -> Cores:
        """Return the share of the cores that the nodes of one of several clusters have."""
        if self.pinned is not None:
            return replace(self, pinned=tuple(self.pinned[i] for i in group))
        return replace(self, count=self.count / num_clusters)

    def interval_s(self, work_s: Sequence[float], requester_s: float = 0.0) -> float:
        """Return the least seconds per microbatch, if each node needs `work_s` seconds of a whole core for it."""
        if self.pinned is None:
            return (sum(work_s) * self.threads + requester_s) / self.count
        load = dict.fromkeys(self.pinned, 0.0)
        for core, seconds in zip(self.pinned, work_s, strict=True):
            load[core] += seconds
        return max(load.values())


def expected_rate(
    work_s: Sequence[float],
    speeds: Sequence[float],
    rules: Sequence[StageSchedule],
    cores: Cores,
    batch_size: int,
    requester_s: float = 0.0,
    on_processor: Sequence[bool] | None = None,
) -> float:
    """Return samples per second.

    `work_s` are the seconds of a microbatch on each node at full speed, `speeds` the share of that speed it has,
    `requester_s` those of the requester's process. Nodes that are not `on_processor` load no core.
    """
    loads = [s if is_load else 0.0 for s, is_load in zip(work_s, on_processor or [True] * len(work_s), strict=True)]
    own_s = [seconds / speed for seconds, speed in zip(work_s, speeds, strict=True)]
    accumulate = rules[0].accumulate
    every_s = max(interval_s(own_s, (), _in_flight(rules)), cores.interval_s(loads, requester_s))
    step_s = accumulate * every_s
    if all(rule.delay == 0 for rule in rules):
        step_s = max(sum(own_s) + (accumulate - 1) * every_s, step_s)
    return batch_size / max(step_s, 1e-9)


def _in_flight(rules: Sequence[StageSchedule]) -> list[int]:
    """Return microbatches in flight: limited by the depth, and by the delay in steps."""
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
    on_processor: tuple[bool, ...] | None = None  # the nodes that need a core; None: all
    cores: Cores = Cores(count=1)
    recompute: bool = False
    memory_mode: str = "compact"

    def __post_init__(self) -> None:
        require(self.nodes >= 1, f"nodes must be >= 1, got {self.nodes}")
        require(
            1 <= self.clusters <= self.nodes,
            f"clusters must be from 1 to the number of nodes ({self.nodes}), got {self.clusters}",
        )
        require(self.accumulate is None or self.microbatch is None, "give accumulate or microbatch, not both")
        require(self.accumulate is None or self.accumulate >= 1, f"accumulate must be >= 1, got {self.accumulate}")
        require(self.microbatch is None or self.microbatch >= 1, f"microbatch must be >= 1, got {self.microbatch}")
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
        """The nodes of each cluster; sizes differ by at most one."""
        bounds = [self.nodes * i // self.clusters for i in range(self.clusters + 1)]
        return [list(range(first, end)) for first, end in pairwise(bounds)]

    @property
    def speed_of(self) -> tuple[float, ...]:
        """The speed of each node; nodes that share a core share its speed."""
        if self.speeds is None and (pinned := self.cores.pinned) is not None:
            return tuple(1 / pinned.count(core) for core in pinned)
        return self.speeds or (1.0,) * self.nodes


@dataclass(frozen=True)
class StagePlan:
    """Expected size and time of one stage."""

    node: str
    first_op: int
    num_ops: int
    parameter_bytes: int
    memory_bytes: int
    memory: dict[str, int]  # the same by purpose
    seconds: float  # of work per microbatch: operations, adding gradients, updates, messages
    sends_bytes: int  # forward, per microbatch
    depth: int
    delay: int


@dataclass(frozen=True)
class PipelinePlan:
    """The stages of one cluster with their schedules, and the expected speed."""

    stages: tuple[Stage, ...]
    plans: tuple[StagePlan, ...]
    rules: tuple[StageSchedule, ...]
    cuts: tuple[int, ...]
    accumulate: int
    max_microbatch: int
    samples_per_s: float  # expected
    reason: str

    def content(self) -> dict[str, object]:
        return {
            "cuts": self.cuts, "accumulate": self.accumulate, "max_microbatch": self.max_microbatch,
            "samples_per_s": self.samples_per_s, "reason": self.reason, "stages": [asdict(p) for p in self.plans],
        }  # fmt: skip


@dataclass(frozen=True)
class LocalTimings:
    """Measured times and sizes of a program, and the options of its training on this machine."""

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
    """Measure the operations of a program, and the overhead of a stage besides them, on this machine."""
    accumulate = _accumulate(options)
    costs = measure_costs(program, -(-options.batch_size // accumulate))
    memory = memory_model(
        program, optimizer, correction, mode=options.memory_mode,
        synchronous=options.synchronous or max(map(len, options.groups)) == 1, accumulate=accumulate,
        recompute=options.recompute,
    )  # fmt: skip
    with torch_threads(options.cores.threads):
        overhead = measure_overhead(
            program, optimizer, correction, delay=0 if memory.synchronous else 1, memory=memory.mode
        )
        chain = with_overhead(chain_of(program, costs), overhead, accumulate)
    return LocalTimings(program, options, costs, chain, overhead, memory, accumulate)


def plan_local(timings: LocalTimings, group: Sequence[int]) -> PipelinePlan:
    """Return the cuts that give these nodes the fastest pipeline within each node's memory."""
    options, chain, program, costs = timings.options, timings.chain, timings.program, timings.costs
    overhead = timings.overhead
    nodes, names = tuple(_node(options, i) for i in group), node_names(options.nodes)
    # On one machine a byte over a cut costs processor time at both ends: a cheap cut is preferred to perfect balance.
    result = partition(Problem(chain=chain, nodes=nodes, memory=timings.memory, tolerance=0.03))
    is_chosen = options.accumulate or options.microbatch
    depths = result.depths if is_chosen else [min(d, timings.accumulate) for d in result.depths]
    schedules = stage_schedules(
        depths, timings.accumulate, synchronous=options.synchronous, max_staleness=options.max_staleness
    )
    bounds = [0, *result.cuts, len(program.ops)]
    work_s = [
        seconds * node.speed + overhead.microbatch_s + overhead.move_s * sum(map(chain.cut_bytes, bounds[i : i + 2]))
        for i, (seconds, node) in enumerate(zip(result.stage_seconds, nodes, strict=True))
    ]
    rows = tuple(
        StagePlan(
            node=names[group[i]], first_op=bounds[i], num_ops=bounds[i + 1] - bounds[i],
            parameter_bytes=costs.parameter_bytes(bounds[i], bounds[i + 1]), memory_bytes=result.memory[i].total,
            memory=asdict(result.memory[i]),
            seconds=work_s[i] / nodes[i].speed, sends_bytes=costs.cuts[bounds[i + 1]].forward_bytes,
            depth=schedules[i].depth, delay=schedules[i].delay,
        )
        for i in range(len(group))
    )  # fmt: skip
    speeds = [(options.speeds or (1.0,) * options.nodes)[i] for i in group]
    cores = options.cores.of(group, options.clusters)
    on_processor = None if options.on_processor is None else [options.on_processor[i] for i in group]
    rate = expected_rate(
        work_s, speeds, schedules, cores, options.batch_size, overhead.requester_s, on_processor=on_processor
    )
    return PipelinePlan(
        tuple(split(program, result.cuts)), rows, tuple(schedules), result.cuts, timings.accumulate,
        timings.microbatch, rate, result.reason,
    )  # fmt: skip


def node_names(count: int) -> tuple[str, ...]:
    """Return the names of local nodes."""
    return tuple(f"node-{i}" for i in range(count))


def _accumulate(options: LocalPlanOptions) -> int:
    """Return microbatches per step; by default as many as a pipeline of equal stages has in flight (staleness 1)."""
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
    mode: str = "compact",
    synchronous: bool = False,
    accumulate: int = 0,
    recompute: bool = False,
    ring_copies: int = 0,
) -> MemoryModel:
    """Return the memory model of training this program."""
    dtypes = [DTYPES[s.dtype] for s in program.state if s.trainable]
    return MemoryModel(
        mode=memory_mode(mode, dtypes, delay=0 if synchronous else 1),
        ring_copies=ring_copies,
        synchronous=synchronous,
        accumulate=accumulate,
        correction_copies=Corrector(correction).extra_copies,
        optimizer_ratio=state_bytes_per_parameter(optimizer) / 4,
        basis_ratio=most_basis_bytes(optimizer, {s.target: s.shape for s in program.state if s.trainable}) / 4,
        gradient_copies=2 if optimizer.clip_norm is not None or program.ties else 1,
        recompute=recompute,
    )


_TOUCH_S_PER_BYTE = 5e-9  # of parameters: the first run of an operation also gets their memory from the system


def time_ops(program: Program, costs: Costs) -> list[OpSeconds]:
    """Measure the seconds of each operation in a training run on this machine. Tests replace it by a fixed table."""
    budget_s = 2.0 + _TOUCH_S_PER_BYTE * sum(item.num_bytes for item in program.state)
    alone = measure_seconds(program, costs.batch, budget_s=budget_s, costs=costs)
    slowdown = measure_slowdown(program, costs, alone, budget_s=0.7)
    return [OpSeconds(s.forward_s * slowdown, s.backward_s * slowdown) for s in alone]


def chain_of(program: Program, costs: Costs) -> Chain:
    """Return times and sizes of a program for the planner; times are those of a training run on this machine."""
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
        work_bytes=tuple(op.result_bytes + op.parameter_bytes for op in costs.ops),
    )
