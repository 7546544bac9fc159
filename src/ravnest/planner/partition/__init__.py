"""Cuts the model for one row of nodes: exact cuts for given depths, memory limits, depths from stage and link times."""

from ravnest.planner.partition.solver import Partition, partition

__all__ = ["Partition", "partition"]
