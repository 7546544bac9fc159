"""Plans which machine computes what: pure decisions over plain numbers. No torch, no clock, no I/O.

chain = Chain(forward_s=..., backward_s=..., cuts=..., ...)      the program in numbers

from ravnest.planner.partition import partition                  one row of nodes
plan = partition(Problem(chain=chain, nodes=(Node(), Node(speed=2.0, memory_bytes=4e9))))
plan.cuts, plan.depths, plan.memory, plan.interval_s, plan.reason

fleet = Fleet(machines=(Machine(name="attic", memory_bytes=8e9, speed=0.5), ...))    many PCs, grouped into clusters
plan = form_clusters(Task(chain=chain, fleet=fleet))
plan.clusters, plan.spares, plan.left_out, plan.samples_per_s, plan.reason

choose_rings(task, plan.clusters)        the rings in which clusters average
best_upgrade(task, plan)                 the one change of a machine that helps most
replan(changed_task, plan)               the next plan when machines left, joined or changed speed
"""

from ravnest.planner.chain import Chain, Storage
from ravnest.planner.clusters.search import form_clusters
from ravnest.planner.fleet import ClusterPlan, Fleet, FleetPlan, IdleMachine, Machine, Task
from ravnest.planner.memory import MemoryModel, StageMemory, StageShare, stage_memory
from ravnest.planner.partition.depth import LineSeconds, LinkSeconds, depths, interval_s
from ravnest.planner.partition.fit import missing_bytes
from ravnest.planner.problem import DoesNotFit, LinkSpec, Node, PlanError, Problem, TooManyNodes
from ravnest.planner.replan import PlanChange, replan
from ravnest.planner.rings import Ring, Rings, Segment, choose_rings, find_segments
from ravnest.planner.upgrade import Upgrade, best_upgrade

__all__ = [
    "Chain", "Storage",
    "Problem", "Node", "LinkSpec", "missing_bytes",
    "MemoryModel", "StageShare", "StageMemory", "stage_memory",
    "form_clusters", "Task", "Fleet", "Machine", "ClusterPlan", "FleetPlan", "IdleMachine",
    "Segment", "find_segments", "Ring", "Rings", "choose_rings",
    "PlanChange", "replan", "Upgrade", "best_upgrade",
    "LineSeconds", "LinkSeconds", "depths", "interval_s",
    "PlanError", "DoesNotFit", "TooManyNodes",
]  # fmt: skip
