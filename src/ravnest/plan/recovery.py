"""How a simulated fleet goes on when machines leave and join: a pure function from what ran to what runs next.

A recovery gets the task with the machines that are there now, and the plan that ran until now, of which some members
may be gone; it answers with another plan, and with how long parameters move before changed clusters go on. `replan`
is one. `recover` is the plain one, which looks at one cluster at a time:

1. a spare that has the memory takes the place of who is gone, and all else stays where it is;
2. else the cluster is cut anew over those who are left;
3. else it is parked, and its members are spares. Spares beyond those to be held back form a cluster when they can.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from .fleet import ClusterPlan, FleetPlan, Idle, Task
from .memory import stage_memory
from .moves import moves
from .row import try_row

__all__ = ["Recovery", "Repair", "Repaired", "recover"]

_TRIES = 3  # spares looked at for one place
_SOURCES = 16  # clusters from which parameters may come


class Repair(Protocol):
    """What a recovery answers."""

    @property
    def plan(self) -> FleetPlan: ...
    @property
    def move_s(self) -> float: ...
    @property
    def reason(self) -> str: ...


Recovery: TypeAlias = Callable[[Task, FleetPlan], Repair]


@dataclass(frozen=True)
class Repaired:
    """The plan to follow from now on, how long parameters move for it, and why it is this one."""

    plan: FleetPlan
    move_s: float
    reason: str


def recover(task: Task, running: FleetPlan) -> Repaired:
    """Each broken cluster repaired if it can be; whole ones are left alone."""
    here = {machine.name for machine in task.fleet.machines}
    spares = [spare for spare in running.spares if spare.name in here]
    kept, made, reasons = list[ClusterPlan](), list[ClusterPlan](), list[str]()
    for cluster in running.clusters:
        gone = [name for name in cluster.members if name not in here]
        if not gone:
            kept.append(cluster)
            continue
        repaired, reason = _repair(task, cluster, gone, spares)
        reasons.append(reason)
        if repaired is not None:
            made.append(repaired)
            spares = [spare for spare in spares if spare.name not in repaired.members]
        else:
            spares += [Idle(name, reason) for name in cluster.members if name in here]
    revived = _of_spares(task, spares[task.num_spares :])
    if revived is not None:
        made.append(revived)
        reasons.append(f"{', '.join(revived.members)} form a cluster")
        spares = [spare for spare in spares if spare.name not in revived.members]
    clusters = (*kept, *made)
    left_out = tuple(idle for idle in running.left_out if idle.name in here)
    reason = "; ".join(reasons) or "nothing is broken"
    plan = FleetPlan(clusters, tuple(spares), left_out, sum(c.samples_per_s for c in clusters), reason)
    return Repaired(plan, _move_s(task, running, kept, made, here), reason)


def _repair(
    task: Task, cluster: ClusterPlan, gone: Collection[str], spares: list[Idle]
) -> tuple[ClusterPlan | None, str]:
    """A cluster without those who are gone, and what was done, in words."""
    who = " and ".join(gone)
    replaced = [row for names in _stand_ins(task, cluster, gone, spares) if (row := _swapped(task, cluster, names))]
    if replaced:
        best = max(replaced, key=lambda row: row.samples_per_s)
        new = [name for name in best.members if name not in cluster.members]
        return best, f"{' and '.join(new)} in place of {who}"
    left = [name for name in cluster.members if name not in gone]
    recut = try_row(task, left) if len(left) >= max(1, task.min_stages) else None
    if recut is not None:
        return recut, f"without {who} the cluster is cut anew over the {len(left)} left"
    return None, f"parked without {who}: no spare fits in, and the {len(left)} left cannot go on alone"


def _stand_ins(task: Task, cluster: ClusterPlan, gone: Collection[str], spares: list[Idle]) -> list[dict[str, str]]:
    """Who might take whose place: of spares with the memory the fastest, one place after the other."""
    fastest = sorted((task.fleet[spare.name] for spare in spares), key=lambda machine: -machine.speed)
    choices = list[dict[str, str]]()
    for skip in range(_TRIES):
        names = dict[str, str]()
        for stage, name in enumerate(cluster.members):
            if name not in gone:
                continue
            need = cluster.partition.memory[stage].total
            fit = [m.name for m in fastest if m.memory_bytes >= need and m.name not in names.values()]
            if len(fit) <= skip:
                return choices
            names[name] = fit[skip]
        choices.append(names)
    return choices


def _swapped(task: Task, cluster: ClusterPlan, names: dict[str, str]) -> ClusterPlan | None:
    return try_row(task, [names.get(name, name) for name in cluster.members], cluster.partition.cuts)


def _of_spares(task: Task, free: list[Idle]) -> ClusterPlan | None:
    """The first few that the model may fit on, in their order; one or two numbers of them are tried."""
    places = task.chain.places(1)
    whole = stage_memory(places.share(0, places.end), 1, task.memory)
    room, tries = 0.0, 0
    for num, idle in enumerate(free, start=1):
        room += task.fleet[idle.name].memory_bytes - task.memory.base_bytes
        if num >= task.min_stages and room >= whole.total - whole.base - whole.links:
            tries += 1
            row = try_row(task, [spare.name for spare in free[:num]])
            if row is not None or tries == 2:
                return row
    return None


def _move_s(
    task: Task, running: FleetPlan, kept: list[ClusterPlan], made: list[ClusterPlan], here: Collection[str]
) -> float:
    if not made:
        return 0.0
    broken = [cluster for cluster in running.clusters if not all(name in here for name in cluster.members)]
    return moves(task, [*broken, *kept[:_SOURCES]], made).longest_s
