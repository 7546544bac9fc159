"""A question for the planner: this chain, on these nodes in this order. And the ways in which there is no answer.

PlanError
├── TooManyNodes      more nodes than the program can be cut into stages
└── DoesNotFit        too little memory; says how much is missing and what would fit
"""

from __future__ import annotations

from math import inf

from ..core.config import config, require
from ..core.errors import PlanError
from .chain import Chain
from .depth import LinkSeconds
from .memory import MemoryModel

__all__ = ["DoesNotFit", "Link", "Node", "PlanError", "Problem", "TooManyNodes"]


class TooManyNodes(PlanError):
    """The program cannot be cut into as many stages as there are nodes."""


class DoesNotFit(PlanError):
    """The nodes have too little memory: each would need up to `missing_bytes` more; `remedies` would do instead."""

    def __init__(self, message: str, missing_bytes: int, remedies: tuple[str, ...]) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.remedies = remedies


@config
class Node:
    """`speed` relative to the machine on which the chain's seconds were measured; memory that a stage may use.

    What it sends (forward to the next stage, gradients to the one before) shares `up_bytes_per_s`, what it receives
    `down_bytes_per_s`.
    """

    speed: float = 1.0
    memory_bytes: float = inf
    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf

    def __post_init__(self) -> None:
        require(0 < self.speed < inf, f"a node's speed must be above 0, not {self.speed}")
        require(self.memory_bytes > 0, f"a node's memory must be above 0, not {self.memory_bytes}")
        bandwidth = min(self.up_bytes_per_s, self.down_bytes_per_s)
        require(bandwidth > 0, f"a node's bandwidth must be above 0, not {bandwidth}")


@config
class Link:
    """From a node to the next: bytes per second there (`forward`) and back; not `duplex` if the two take turns.

    If it `uses_line`, it shares both ends' lines with their other links: see `Node`.
    """

    forward_bytes_per_s: float = inf
    backward_bytes_per_s: float = inf
    latency_s: float = 0.0
    duplex: bool = True
    uses_line: bool = True

    def __post_init__(self) -> None:
        bandwidth = min(self.forward_bytes_per_s, self.backward_bytes_per_s)
        require(bandwidth > 0, f"a link's bandwidth must be above 0, not {bandwidth}")
        require(0 <= self.latency_s < inf, f"a link's latency must be 0 or more, not {self.latency_s}")

    def seconds(self, forward_bytes: int, backward_bytes: int) -> LinkSeconds:
        return LinkSeconds(
            forward_bytes / self.forward_bytes_per_s,
            backward_bytes / self.backward_bytes_per_s,
            self.latency_s,
            self.duplex,
        )


@config
class Problem:
    """Nodes in the order of their stages, root first, and the links between neighbours (none given: no limits).

    `depths` are the microbatches in flight for which there must be memory; None: as many as leave no bubble, but at
    most `max_depth`. Bottlenecks within `tolerance` of the best count as equal. At most `max_places` cuts are compared.
    """

    chain: Chain
    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
    memory: MemoryModel = MemoryModel()
    depths: tuple[int, ...] | None = None
    max_depth: int | None = None
    slack: int = 1
    tolerance: float = 0.01
    max_places: int = 512

    def __post_init__(self) -> None:
        num = len(self.nodes)
        require(num >= 1, "there is at least one node")
        require(len(self.links) in (0, num - 1), f"{num} nodes in a row have {num - 1} links, not {len(self.links)}")
        require(self.depths is None or len(self.depths) == num, f"{num} nodes need {num} depths, not {self.depths}")
        require(self.depths is None or min(self.depths) >= 1, f"depths must be at least 1, not {self.depths}")
        require(self.max_depth is None or self.max_depth >= 1, f"max_depth must be at least 1, not {self.max_depth}")
        require(self.max_depth is None or self.depths is None, "give depths or max_depth, not both")
        require(self.slack >= 0, f"slack must be 0 or more, not {self.slack}")
        require(0 <= self.tolerance < 1, f"tolerance must be from 0 to 1, not {self.tolerance}")
        require(self.max_places >= 4, f"max_places must be at least 4, not {self.max_places}")

    @property
    def wires(self) -> tuple[Link, ...]:
        """The links, one per pair of neighbours."""
        return self.links or (Link(),) * (len(self.nodes) - 1)

    @property
    def num_places(self) -> int:
        """How many cuts to compare: never so few that nodes go without."""
        return max(self.max_places, 4 * len(self.nodes))
