"""Defines the partition problem (one chain on nodes in a given order) and the planner's errors.

PlanError
├── TooManyNodes      more nodes than the program can be cut into stages
└── DoesNotFit        too little memory; with the missing bytes and changes that would fit
"""

from __future__ import annotations

from math import inf

from ravnest.core.config import config, require
from ravnest.errors import PlanError
from ravnest.planner.chain import Chain
from ravnest.planner.memory import MemoryModel
from ravnest.planner.partition.depth import LinkSeconds

__all__ = ["DoesNotFit", "LinkSpec", "Node", "PlanError", "Problem", "TooManyNodes"]


class TooManyNodes(PlanError):
    """The program cannot be cut into one stage per node."""


class DoesNotFit(PlanError):
    """The nodes have too little memory: each needs up to `missing_bytes` more; `remedies` would fit."""

    def __init__(self, message: str, missing_bytes: int, remedies: tuple[str, ...]) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.remedies = remedies


@config
class Node:
    """`speed` relative to the machine on which the chain's seconds were measured; memory that a stage may use.

    All that it sends (activations to the next stage, gradients to the previous one) shares `up_bytes_per_s`, and all
    that it receives `down_bytes_per_s`.
    """

    speed: float = 1.0
    memory_bytes: float = inf
    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf

    def __post_init__(self) -> None:
        require(0 < self.speed < inf, f"a node's speed must be > 0, got {self.speed}")
        require(self.memory_bytes > 0, f"a node's memory_bytes must be > 0, got {self.memory_bytes}")
        bandwidth = min(self.up_bytes_per_s, self.down_bytes_per_s)
        require(bandwidth > 0, f"a node's bandwidth must be > 0, got {bandwidth}")


@config
class LinkSpec:
    """From a node to the next: bytes/s forward and backward; not `duplex` if the two directions take turns.

    If it `uses_line`, it shares both ends' lines with their other links: see `Node`.
    """

    forward_bytes_per_s: float = inf
    backward_bytes_per_s: float = inf
    latency_s: float = 0.0
    duplex: bool = True
    uses_line: bool = True

    def __post_init__(self) -> None:
        bandwidth = min(self.forward_bytes_per_s, self.backward_bytes_per_s)
        require(bandwidth > 0, f"a link's bandwidth must be > 0, got {bandwidth}")
        require(0 <= self.latency_s < inf, f"a link's latency_s must be >= 0, got {self.latency_s}")

    def seconds(self, forward_bytes: int, backward_bytes: int) -> LinkSeconds:
        return LinkSeconds(
            forward_bytes / self.forward_bytes_per_s,
            backward_bytes / self.backward_bytes_per_s,
            self.latency_s,
            self.duplex,
        )


@config
class Problem:
    """Nodes in the order of their stages and the links between neighbours (none given: no limits).

    `depths` are the microbatches in flight for which there must be memory; None: as many as leave no bubble, but at
    most `max_depth`. Bottlenecks within `tolerance` of the best count as equal. At most
    `max_cut_points` cuts are compared.
    """

    chain: Chain
    nodes: tuple[Node, ...]
    links: tuple[LinkSpec, ...] = ()
    memory: MemoryModel = MemoryModel()
    depths: tuple[int, ...] | None = None
    max_depth: int | None = None
    slack: int = 1
    tolerance: float = 0.01
    max_cut_points: int = 512

    def __post_init__(self) -> None:
        num = len(self.nodes)
        require(num >= 1, "nodes must not be empty")
        require(len(self.links) in (0, num - 1), f"{num} nodes need {num - 1} links or none, got {len(self.links)}")
        require(self.depths is None or len(self.depths) == num, f"{num} nodes need {num} depths, got {self.depths}")
        require(self.depths is None or min(self.depths) >= 1, f"depths must be >= 1, got {self.depths}")
        require(self.max_depth is None or self.max_depth >= 1, f"max_depth must be >= 1, got {self.max_depth}")
        require(self.max_depth is None or self.depths is None, "give depths or max_depth, not both")
        require(self.slack >= 0, f"slack must be >= 0, got {self.slack}")
        require(0 <= self.tolerance < 1, f"tolerance must be >= 0 and < 1, got {self.tolerance}")
        require(self.max_cut_points >= 4, f"max_cut_points must be >= 4, got {self.max_cut_points}")

    @property
    def all_links(self) -> tuple[LinkSpec, ...]:
        """The links, one per pair of neighbours."""
        return self.links or (LinkSpec(),) * (len(self.nodes) - 1)

    @property
    def num_cut_points(self) -> int:
        """Number of cuts to compare: at least four per node."""
        return max(self.max_cut_points, 4 * len(self.nodes))
