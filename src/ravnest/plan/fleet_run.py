"""A fleet from the beginning of a simulation to its end: machines leave, join and slow down, clusters follow.

Clusters have nothing to do with each other until something happens, so each is run by itself, from what happens to it
to what happens to it next. A member that leaves stops its cluster at once. When that is noticed, a recovery decides
how the fleet goes on; clusters it changes start when the parameters have moved. Others never stop.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple, TypeAlias

from ..core.config import require
from .faults import Fault, FaultTrace
from .fleet import ClusterPlan, FleetPlan, Idle, Task
from .life import Life, World
from .outcome import Happening, Simulation
from .problem import PlanError
from .recovery import Recovery

__all__ = ["FleetRun"]


class _Decide(NamedTuple):
    """How to go on, now that this is known of a machine."""

    machine: str


_Event: TypeAlias = tuple[float, int, Fault | _Decide | Life]  # a life: it starts again


class FleetRun:
    """Clusters by their plans, and who is there."""

    def __init__(
        self, world: World, task: Task, plan: FleetPlan, microbatches: float, recovery: Recovery, detection_s: float
    ) -> None:
        self._world, self._task, self._plan, self._microbatches = world, task, plan, microbatches
        self._recovery, self._detection_s = recovery, detection_s
        self._machines = {machine.name: machine for machine in task.fleet.machines}  # as fast as they are now
        idle = {machine.name for machine in (*plan.spares, *plan.left_out)}
        self._here = idle.union(*(cluster.members for cluster in plan.clusters))
        require(self._here <= self._machines.keys(), "the plan has machines that the fleet does not have")
        self._lives = [Life(world, number, cluster, microbatches) for number, cluster in enumerate(plan.clusters)]
        self._life_of = {name: life for life in self._lives for name in life.last_plan.members}
        self._now: Task | None = None  # what `_task_now` found, until something happens
        self._happenings: list[Happening] = []
        self._events: list[_Event] = []
        self._order = count()

    def run(self, faults: FaultTrace, until_s: float) -> Simulation:
        for fault in faults:
            require(fault.machine in self._machines, f"{fault.machine!r} is to {fault.kind}, but is not in the fleet")
        self._events = [(fault.time_s, next(self._order), fault) for fault in faults]
        heapify(self._events)
        for life in self._lives:
            life.start(self._task, 0.0)
        while self._events and self._events[0][0] < until_s:
            now_s, _, event = heappop(self._events)
            match event:
                case Fault():
                    self._happen(now_s, event)
                case _Decide(machine):
                    self._decide(now_s, machine)
                case Life():
                    if event.starts_at_s == now_s:
                        event.start(self._task_now(), now_s)
        for life in self._lives:
            life.run(until_s)
            life.stop("all is trained" if life.finished else "the simulation is over", at_end=True)
        duration_s = until_s if until_s < inf else max(life.end_s for life in self._lives)
        runs = tuple(
            life.result(until_s if until_s < inf else life.end_s, self._task.microbatch) for life in self._lives
        )
        return Simulation(runs, tuple(self._happenings), duration_s, self._world.bucket_s)

    def _happen(self, now_s: float, fault: Fault) -> None:
        name = fault.machine
        if (fault.kind == "join") == (name in self._here):
            return  # it is there already, or gone
        life, self._now = self._life_of.get(name), None
        if fault.kind == "leave":
            self._here.remove(name)
            self._tell(now_s, name, f"{name} leaves")
            if life is not None:
                self._halt(now_s, life, f"{name} left")
                self._later(now_s + self._detection_s, _Decide(name))
        elif fault.kind == "join":
            self._here.add(name)
            self._tell(now_s, name, f"{name} joins")
            if life is None:
                self._plan = replace(self._plan, spares=(*self._plan.spares, Idle(name, "it joined")))
                self._later(now_s, _Decide(name))
        else:
            self._slow(now_s, fault, life)

    def _slow(self, now_s: float, fault: Fault, life: Life | None) -> None:
        machine = self._task.fleet[fault.machine]
        machine = self._machines[fault.machine] = replace(machine, speed=machine.speed / fault.factor)
        self._tell(now_s, machine.name, f"{machine.name} takes {fault.factor:g} times as long as planned")
        if life is not None:
            life.run(now_s)
            life.slow(machine)
            self._later(now_s + self._detection_s, _Decide(machine.name))

    def _decide(self, now_s: float, machine: str) -> None:
        """Ask the recovery, and follow it."""
        running = self._plan
        running = replace(running, spares=self._present(running.spares), left_out=self._present(running.left_out))
        try:
            repair = self._recovery(self._task_now(), running)
        except PlanError as error:
            whole = tuple(c for c in running.clusters if self._here.issuperset(c.members))
            self._adopt(now_s, replace(running, clusters=whole), 0.0)
            self._tell(now_s, machine, f"no way to go on: {error}")
            return
        if self._adopt(now_s, repair.plan, repair.move_s):
            moving = f"; parameters move for {repair.move_s:.1f} s" if repair.move_s else ""
            self._tell(now_s, machine, repair.reason + moving)

    def _present(self, idle: tuple[Idle, ...]) -> tuple[Idle, ...]:
        return tuple(machine for machine in idle if machine.name in self._here)

    def _task_now(self) -> Task:
        """With the machines that are there, as fast as they are."""
        if self._now is None:
            machines = tuple(machine for name, machine in self._machines.items() if name in self._here)
            self._now = replace(self._task, fleet=replace(self._task.fleet, machines=machines))
        return self._now

    def _adopt(self, now_s: float, plan: FleetPlan, move_s: float) -> bool:
        """Follow a new plan: same clusters go on, changed ones start after the move, others are parked. Any change?"""
        self._plan = plan
        kept, changed = self._sorted_out(plan.clusters)
        free = [life for life in self._lives if life not in kept]
        starting = [life for life in kept if not life.runs and life.starts_at_s is None]
        for cluster in changed:
            life = _nearest(cluster, free) or self._new_life(cluster)
            free = [other for other in free if other is not life]
            self._halt(now_s, life, "another plan")
            self._assign(life, cluster)
            starting.append(life)
        parked = [life for life in free if life.plan is not None]
        for life in parked:
            self._halt(now_s, life, "parked")
            self._assign(life, None)
        for life in starting:
            if not life.finished:
                life.starts_at_s = now_s + move_s
                self._later(life.starts_at_s, life)
        return bool(starting or parked)

    def _sorted_out(self, clusters: tuple[ClusterPlan, ...]) -> tuple[dict[Life, None], list[ClusterPlan]]:
        """Who has the same work in a new plan, in order, and the clusters that nobody is yet."""
        kept, changed = dict[Life, None](), list[ClusterPlan]()
        for cluster in clusters:
            life = self._life_of.get(cluster.members[0])
            if life is not None and life.plan is not None and _same_work(life.plan, cluster):
                kept[life] = None
            else:
                changed.append(cluster)
        return kept, changed

    def _halt(self, now_s: float, life: Life, why: str) -> None:
        life.run(now_s)
        life.starts_at_s = None
        life.stop(why)

    def _assign(self, life: Life, plan: ClusterPlan | None) -> None:
        for name in life.plan.members if life.plan else ():
            if self._life_of.get(name) is life:
                del self._life_of[name]
        life.plan = plan
        for name in plan.members if plan else ():
            self._life_of[name] = life

    def _new_life(self, cluster: ClusterPlan) -> Life:
        life = Life(self._world, len(self._lives), cluster, self._microbatches)
        self._lives.append(life)
        return life

    def _later(self, time_s: float, event: _Decide | Life) -> None:
        heappush(self._events, (time_s, next(self._order), event))

    def _tell(self, time_s: float, machine: str, text: str) -> None:
        self._happenings.append(Happening(time_s, machine, text))


def _same_work(a: ClusterPlan, b: ClusterPlan) -> bool:
    """Whether a plan changes nothing for its members."""
    one, other = a.partition, b.partition
    return a is b or (a.members, one.cuts, one.depths) == (b.members, other.cuts, other.depths)


def _nearest(cluster: ClusterPlan, lives: list[Life]) -> Life | None:
    """Whose work a cluster continues: the one that had most of its members."""
    members = set(cluster.members)
    best = max(lives, key=lambda life: len(members.intersection(life.last_plan.members)), default=None)
    return best if best is not None and members.intersection(best.last_plan.members) else None
