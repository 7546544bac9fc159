"""Describes the PCs of a fleet, the planning task, and the plan of clusters.

    fleet = Fleet(machines=(Machine(name="attic", memory_bytes=8e9, speed=0.5, up_bytes_per_s=5e6, ...), ...))
    plan = form_clusters(Task(chain=chain, fleet=fleet, microbatch=4))
    plan.clusters, plan.spares, plan.left_out, plan.samples_per_s, plan.reason

A machine exchanges messages with both of its neighbours over its one line, so the line is a limit of its own
(`Node.up_bytes_per_s`), besides that of a pair: the lower of one's upload and the other's download. `plan_row` plans
one cluster of given machines in a given order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

from ravnest.core.config import config, require
from ravnest.planner.chain import Chain
from ravnest.planner.memory import MemoryModel
from ravnest.planner.partition.solver import Partition, partition, try_partition
from ravnest.planner.problem import LinkSpec, Node, Problem

__all__ = ["ClusterPlan", "Fleet", "FleetPlan", "IdleMachine", "Machine", "Task", "plan_row", "try_row"]


@config
class Machine:
    """A PC as a planner sees it.

    `speed` is relative to the machine on which the chain's seconds were measured. `latency_s` is the one-way time to
    the exchange of its `region`. Machines of one `site` (a home, a lab) reach each other over its local network.
    `reliability` is the chance that it is still present in an hour.
    """

    name: str
    memory_bytes: float = inf
    speed: float = 1.0
    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf
    latency_s: float = 0.0
    region: str = ""
    site: str = ""
    reliability: float = 1.0

    def __post_init__(self) -> None:
        require(bool(self.name), "name must not be empty")
        require(self.memory_bytes > 0, f"{self.name}: memory_bytes must be > 0, got {self.memory_bytes}")
        require(0 < self.speed < inf, f"{self.name}: speed must be > 0, got {self.speed}")
        require(self.up_bytes_per_s > 0, f"{self.name}: up_bytes_per_s must be > 0, got {self.up_bytes_per_s}")
        require(self.down_bytes_per_s > 0, f"{self.name}: down_bytes_per_s must be > 0, got {self.down_bytes_per_s}")
        require(0 <= self.latency_s < inf, f"{self.name}: latency_s must be >= 0, got {self.latency_s}")
        require(0 < self.reliability <= 1, f"{self.name}: reliability must be > 0 and <= 1, got {self.reliability}")

    @property
    def node(self) -> Node:
        """The memory, speed and line, as `Problem` needs them."""
        return Node(
            speed=self.speed,
            memory_bytes=self.memory_bytes,
            up_bytes_per_s=self.up_bytes_per_s,
            down_bytes_per_s=self.down_bytes_per_s,
        )


@config
class Fleet:
    """Machines and the network between them: another region is `far_s` away, a site's network has `lan_bytes_per_s`."""

    machines: tuple[Machine, ...]
    far_s: float = 0.04
    lan_bytes_per_s: float = 125e6
    lan_latency_s: float = 0.0005

    def __post_init__(self) -> None:
        require(len(self.machines) >= 1, "machines must not be empty")
        seen = set[str]()
        for machine in self.machines:
            require(machine.name not in seen, f"machine names must be unique, got {machine.name!r} twice")
            seen.add(machine.name)

    @cached_property
    def _by_name(self) -> dict[str, Machine]:
        return {machine.name: machine for machine in self.machines}

    def __getitem__(self, name: str) -> Machine:
        return self._by_name[name]

    def link(self, a: Machine, b: Machine) -> LinkSpec:
        """From a to b, and back."""
        forward, backward, latency_s, uses_line = self.link_numbers(a, b)
        return LinkSpec(
            forward_bytes_per_s=forward, backward_bytes_per_s=backward, latency_s=latency_s, uses_line=uses_line
        )

    def link_numbers(self, a: Machine, b: Machine) -> tuple[float, float, float, bool]:
        """A link as plain numbers: bytes/s forward and backward, latency, and whether it uses their lines."""
        if a.site and a.site == b.site:
            return self.lan_bytes_per_s, self.lan_bytes_per_s, self.lan_latency_s, False
        return (
            min(a.up_bytes_per_s, b.down_bytes_per_s),
            min(b.up_bytes_per_s, a.down_bytes_per_s),
            a.latency_s + b.latency_s + (self.far_s if a.region != b.region else 0.0),
            True,
        )


@config
class Task:
    """The chain to plan, the fleet to plan it on, and the constraints.

    The chain is for `microbatch` samples. An optimizer step follows `accumulate` microbatches (0: as many as are in
    flight), and no gradient may be more than `max_staleness` steps late, so at most `accumulate * max_staleness`
    are in flight. Every cluster has at least `min_stages` members: with 2, no machine holds the whole model.
    `num_spares` machines are held back, to replace others.
    """

    chain: Chain
    fleet: Fleet
    memory: MemoryModel = MemoryModel()
    microbatch: int = 1
    accumulate: int = 0
    max_staleness: int = 1
    min_stages: int = 2
    num_spares: int = 0
    slack: int = 1

    def __post_init__(self) -> None:
        require(self.microbatch >= 1, f"microbatch must be >= 1, got {self.microbatch}")
        require(self.accumulate >= 0, f"accumulate must be >= 0, got {self.accumulate}")
        require(self.max_staleness >= 1, f"max_staleness must be >= 1, got {self.max_staleness}")
        require(self.min_stages >= 1, f"min_stages must be >= 1, got {self.min_stages}")
        require(self.num_spares >= 0, f"num_spares must be >= 0, got {self.num_spares}")
        require(self.slack >= 0, f"slack must be >= 0, got {self.slack}")

    @property
    def max_depth(self) -> int | None:
        """The most microbatches in flight at any stage; None: no limit."""
        return self.accumulate * self.max_staleness or None

    def problem(self, row: Sequence[Machine], *, tolerance: float = 0.01, max_cut_points: int = 512) -> Problem:
        """The partition problem of these machines, first stage first."""
        return Problem(
            chain=self.chain,
            nodes=tuple(machine.node for machine in row),
            links=tuple(self.fleet.link(a, b) for a, b in pairwise(row)),
            memory=self.memory,
            max_depth=self.max_depth,
            slack=self.slack,
            tolerance=tolerance,
            max_cut_points=max_cut_points,
        )


@dataclass(frozen=True)
class ClusterPlan:
    """Machines by name, first stage first, and their partition."""

    members: tuple[str, ...]
    partition: Partition
    samples_per_s: float
    reason: str


@dataclass(frozen=True)
class IdleMachine:
    """A machine without a stage, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class FleetPlan:
    """Clusters, spares that could replace a member, and machines left out that could not."""

    clusters: tuple[ClusterPlan, ...]
    spares: tuple[IdleMachine, ...]
    left_out: tuple[IdleMachine, ...]
    samples_per_s: float
    reason: str


_NO_TIME_S = 1e-12  # so that a chain that takes no time has a finite rate
_MAX_CUT_POINTS = 96  # cuts to compare, as in `form_clusters`: more gain next to nothing


def plan_row(task: Task, members: Sequence[str], cuts: Sequence[int] | None = None) -> ClusterPlan:
    """The plan of these machines, first stage first. Raises `PlanError` if the model does not fit with such cuts."""
    return _row_plan(task, members, partition(_row_problem(task, members, cuts)))


def try_row(task: Task, members: Sequence[str], cuts: Sequence[int] | None = None) -> ClusterPlan | None:
    """As `plan_row`; None instead of an error."""
    found = try_partition(_row_problem(task, members, cuts))
    return None if found is None else _row_plan(task, members, found)


def _row_problem(task: Task, members: Sequence[str], cuts: Sequence[int] | None) -> Problem:
    if cuts is not None:
        task = replace(task, chain=replace(task.chain, cuts=tuple(cuts)))
    return task.problem([task.fleet[name] for name in members], max_cut_points=_MAX_CUT_POINTS)


def _row_plan(task: Task, members: Sequence[str], found: Partition) -> ClusterPlan:
    return ClusterPlan(tuple(members), found, task.microbatch / max(found.interval_s, _NO_TIME_S), found.reason)
