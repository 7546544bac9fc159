"""Who computes what: pure decisions over plain numbers. No torch, no clock, no I/O.

chain = Chain(forward_s=..., backward_s=..., cuts=..., ...)      the program in numbers
plan = partition(Problem(chain=chain, nodes=(Node(), Node(speed=2.0, memory_bytes=4e9))))
plan.cuts, plan.depths, plan.memory, plan.interval_s, plan.reason

fleet = Fleet(machines=(Machine(name="attic", memory_bytes=8e9, speed=0.5), ...))    many PCs: who trains with whom
plan = form(Task(chain=chain, fleet=fleet))
plan.clusters, plan.spares, plan.left_out, plan.samples_per_s, plan.reason
choose_rings(task, plan.clusters)                       who averages what with whom
simulate(task, plan, duration_s=600)                    the same on a virtual clock
best_upgrade(task, plan)                                what to buy first
replan(changed_task, plan)                              how to go on when machines left, joined or slowed down
"""

from .chain import Chain, Storage
from .depth import LineSeconds, LinkSeconds, depths, interval_s
from .faults import Fault, FaultTrace, draw_faults
from .fit import missing_bytes
from .fleet import ClusterPlan, Fleet, FleetPlan, Idle, Machine, Task
from .form import form
from .memory import MemoryModel, Share, StageMemory, stage_memory
from .outcome import Simulation
from .partition import Partition, partition
from .problem import DoesNotFit, Link, Node, PlanError, Problem, TooManyNodes
from .replan import Change, replan
from .rings import Ring, Rings, choose_rings
from .segments import Segment, find_segments
from .simulate import SimulationSettings, simulate
from .timeline import timeline
from .upgrade import Upgrade, best_upgrade

__all__ = [
    "Chain", "Storage",
    "Problem", "Node", "Link", "Partition", "partition", "missing_bytes",
    "MemoryModel", "Share", "StageMemory", "stage_memory",
    "form", "Task", "Fleet", "Machine", "ClusterPlan", "FleetPlan", "Idle",
    "Segment", "find_segments", "Ring", "Rings", "choose_rings",
    "Change", "replan", "Upgrade", "best_upgrade",
    "simulate", "Simulation", "SimulationSettings", "Fault", "FaultTrace", "draw_faults", "timeline",
    "LineSeconds", "LinkSeconds", "depths", "interval_s",
    "PlanError", "DoesNotFit", "TooManyNodes",
]  # fmt: skip
