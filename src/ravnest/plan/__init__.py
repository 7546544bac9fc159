"""Who computes what: pure decisions over plain numbers. No torch, no clock, no I/O.

chain = Chain(forward_s=..., backward_s=..., cuts=..., ...)      the program in numbers
plan = partition(Problem(chain=chain, nodes=(Node(), Node(speed=2.0, memory_bytes=4e9))))
plan.cuts, plan.depths, plan.memory, plan.interval_s, plan.reason
"""

from .chain import Chain, Storage
from .depth import LineSeconds, LinkSeconds, depths, interval_s
from .fit import missing_bytes
from .memory import MemoryModel, Share, StageMemory, stage_memory
from .partition import Partition, partition
from .problem import DoesNotFit, Link, Node, PlanError, Problem, TooManyNodes

__all__ = [
    "Chain", "Storage",
    "Problem", "Node", "Link", "Partition", "partition", "missing_bytes",
    "MemoryModel", "Share", "StageMemory", "stage_memory",
    "LineSeconds", "LinkSeconds", "depths", "interval_s",
    "PlanError", "DoesNotFit", "TooManyNodes",
]  # fmt: skip
