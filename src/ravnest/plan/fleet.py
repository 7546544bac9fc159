"""The PCs that might train a model together, the question of who should do what, and its answer.

    fleet = Fleet(machines=(Machine(name="attic", memory_bytes=8e9, speed=0.5, up_bytes_per_s=5e6, ...), ...))
    plan = form(Task(chain=chain, fleet=fleet, microbatch=4))
    plan.clusters, plan.spares, plan.left_out, plan.samples_per_s, plan.reason

A machine sends to and receives from both of its neighbours over its one line, so its line is a limit of its own
(`Node.up_bytes_per_s`), besides that of a pair: what one can send and the other can take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from ..core.config import config, require
from .chain import Chain
from .memory import MemoryModel
from .partition import Partition
from .problem import Link, Node, Problem

__all__ = ["ClusterPlan", "Fleet", "FleetPlan", "Idle", "Machine", "Task"]


@config
class Machine:
    """A PC as a planner sees it.

    `speed` is relative to the machine on which the chain's seconds were measured. `latency_s` is the one-way time to
    the exchange of its `region`. Machines of one `site` (a home, a lab) reach each other over its local network.
    `reliability` is the chance that it is still there in an hour.
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
        require(bool(self.name), "a machine has a name")
        require(self.memory_bytes > 0, f"{self.name}: memory must be above 0, not {self.memory_bytes}")
        require(0 < self.speed < inf, f"{self.name}: speed must be above 0, not {self.speed}")
        require(self.up_bytes_per_s > 0, f"{self.name}: upload must be above 0, not {self.up_bytes_per_s}")
        require(self.down_bytes_per_s > 0, f"{self.name}: download must be above 0, not {self.down_bytes_per_s}")
        require(0 <= self.latency_s < inf, f"{self.name}: latency must be 0 or more, not {self.latency_s}")
        require(0 < self.reliability <= 1, f"{self.name}: reliability is from 0 to 1, not {self.reliability}")

    @property
    def node(self) -> Node:
        """Its memory, speed and line, as a partition takes them."""
        return Node(
            speed=self.speed,
            memory_bytes=self.memory_bytes,
            up_bytes_per_s=self.up_bytes_per_s,
            down_bytes_per_s=self.down_bytes_per_s,
        )


@config
class Fleet:
    """Machines and what lies between them: another region is `far_s` away, a site's network has `lan_bytes_per_s`."""

    machines: tuple[Machine, ...]
    far_s: float = 0.04
    lan_bytes_per_s: float = 125e6
    lan_latency_s: float = 0.0005

    def __post_init__(self) -> None:
        require(len(self.machines) >= 1, "a fleet has at least one machine")
        seen = set[str]()
        for machine in self.machines:
            require(machine.name not in seen, f"two machines are called {machine.name!r}")
            seen.add(machine.name)

    @cached_property
    def _by_name(self) -> dict[str, Machine]:
        return {machine.name: machine for machine in self.machines}

    def __getitem__(self, name: str) -> Machine:
        return self._by_name[name]

    def link(self, a: Machine, b: Machine) -> Link:
        """From a to b, and back."""
        forward, backward, latency_s, uses_line = self.wire(a, b)
        return Link(
            forward_bytes_per_s=forward, backward_bytes_per_s=backward, latency_s=latency_s, uses_line=uses_line
        )

    def wire(self, a: Machine, b: Machine) -> tuple[float, float, float, bool]:
        """A link as plain numbers: bytes per second there and back, latency, and whether it uses their lines."""
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
    """What to plan: this chain on this fleet.

    The chain is for `microbatch` samples. An update comes after `accumulate` microbatches (0: as many as are in
    flight), and no gradient may be more than `max_staleness` updates late, so at most `accumulate * max_staleness`
    are in flight. Every cluster has at least `min_stages` members: with 2, no machine holds the whole model.
    `num_spares` machines are held back, to take the place of others.
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
        require(self.microbatch >= 1, f"a microbatch has at least 1 sample, not {self.microbatch}")
        require(self.accumulate >= 0, f"accumulate must be 0 or more, not {self.accumulate}")
        require(self.max_staleness >= 1, f"max_staleness must be at least 1, not {self.max_staleness}")
        require(self.min_stages >= 1, f"min_stages must be at least 1, not {self.min_stages}")
        require(self.num_spares >= 0, f"num_spares must be 0 or more, not {self.num_spares}")
        require(self.slack >= 0, f"slack must be 0 or more, not {self.slack}")

    @property
    def max_depth(self) -> int | None:
        """Most microbatches in flight at any stage; None: any number."""
        return self.accumulate * self.max_staleness or None

    def problem(self, row: Sequence[Machine], *, tolerance: float = 0.01, max_places: int = 512) -> Problem:
        """The question of how to cut the model for these machines, root first."""
        return Problem(
            chain=self.chain,
            nodes=tuple(machine.node for machine in row),
            links=tuple(self.fleet.link(a, b) for a, b in pairwise(row)),
            memory=self.memory,
            max_depth=self.max_depth,
            slack=self.slack,
            tolerance=tolerance,
            max_places=max_places,
        )


@dataclass(frozen=True)
class ClusterPlan:
    """Machines by name, root first, and what each computes."""

    members: tuple[str, ...]
    partition: Partition
    samples_per_s: float
    reason: str


@dataclass(frozen=True)
class Idle:
    """A machine without a stage, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class FleetPlan:
    """Who does what. A spare could take the place of a member; who is left out could not, or would slow all."""

    clusters: tuple[ClusterPlan, ...]
    spares: tuple[Idle, ...]
    left_out: tuple[Idle, ...]
    samples_per_s: float
    reason: str
