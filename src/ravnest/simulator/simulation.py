"""Simulates a plan on a virtual clock, with the schedule of the workers and the repair policy of the coordinator.

    simulation = simulate(task, plan, duration_s=600, faults=draw_faults(task.fleet, 600))
    simulation.samples_per_s, simulation.bubble, simulation.totals.lost, simulation.events

Clusters are independent until an event changes their machines, so each is run by itself from one such event to the
next. A member that leaves stops its cluster at once. When that is detected, `SimulatedMembership` decides the next
plan, and new clusters start when the state of their stages has arrived. Other clusters never stop. The same seed gives
the same simulation.

Machines leave, come back and slow down at given times (`FaultTrace`), or at times drawn from a seed (`draw_faults`).
`Machine.reliability` r is the chance that a machine is still present in an hour. With exponentially distributed
uptimes, the mean uptime is

    3600 s / -ln(r)

and after it the machine is away for a time drawn from an exponential distribution with a mean of `repair_s`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count, pairwise
from math import inf, log
from typing import Literal, NamedTuple, TypeAlias

from ravnest.core.config import config, require
from ravnest.planner.fleet import ClusterPlan, Fleet, FleetPlan, Machine, Task
from ravnest.planner.problem import PlanError
from ravnest.simulator.cluster import ClusterSimulation, NetworkModel, SimulationWorld, StepSeconds
from ravnest.simulator.membership import Planner, SimulatedMembership, SimulatedPlan, SimulatedReplan, most_shared
from ravnest.simulator.results import SimulatedEvent, Simulation

__all__ = ["SimulationSettings", "simulate", "Fault", "FaultTrace", "draw_faults"]

_HOUR_S = 3600.0


@config
class Fault:
    """At `time_s` a machine leaves, joins, or takes `factor` times as long as planned (1: as planned)."""

    time_s: float
    kind: Literal["leave", "join", "slow"]
    machine: str
    factor: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.time_s < inf, f"time_s must be >= 0, got {self.time_s}")
        require(self.kind in ("leave", "join", "slow"), f"kind must be leave, join or slow, got {self.kind!r}")
        require(bool(self.machine), "machine must not be empty")
        require(0 < self.factor < inf, f"factor must be > 0, got {self.factor}")
        require(self.kind == "slow" or self.factor == 1, f"only kind slow has a factor, got {self.kind}")


@config
class FaultTrace:
    """Faults in order of time."""

    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        require(all(a.time_s <= b.time_s for a, b in pairwise(self.faults)), "faults must be in order of time")

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __len__(self) -> int:
        return len(self.faults)


def draw_faults(fleet: Fleet, duration_s: float, *, seed: int = 0, repair_s: float = 900.0) -> FaultTrace:
    """Draw when each machine leaves and comes back, by its reliability.

    The times of a machine depend only on the seed and its name, not on the other machines.
    """
    require(0 <= duration_s < inf, f"duration_s must be >= 0, got {duration_s}")
    require(repair_s > 0, f"repair_s must be > 0, got {repair_s}")
    drawn = [fault for machine in fleet.machines for fault in _faults_of(machine, duration_s, seed, repair_s)]
    return FaultTrace(faults=tuple(sorted(drawn, key=lambda fault: (fault.time_s, fault.machine))))


def _faults_of(machine: Machine, duration_s: float, seed: int, repair_s: float) -> Iterator[Fault]:
    if machine.reliability == 1:
        return
    rng = random.Random(f"{seed}/{machine.name}")
    leaves_per_s = -log(machine.reliability) / _HOUR_S
    time_s = rng.expovariate(leaves_per_s)
    while time_s < duration_s:
        yield Fault(time_s=time_s, kind="leave", machine=machine.name)
        time_s += rng.expovariate(1 / repair_s)
        if time_s < duration_s:
            yield Fault(time_s=time_s, kind="join", machine=machine.name)
        time_s += rng.expovariate(leaves_per_s)


# The simulation.

_NUM_BUCKETS = 60  # of the simulated time, for bytes over links
_RETIRE_S = 30.0  # for a retired cluster to train its fed microbatches, as in the coordinator


class _Start(NamedTuple):
    """The state of a cluster's stages has arrived."""

    cluster: ClusterSimulation


class _Lost(NamedTuple):
    """The loss of a member is detected."""

    cluster: ClusterSimulation
    plan: ClusterPlan


class _Drain(NamedTuple):
    """Check whether a retired cluster has trained all microbatches that it was fed."""

    cluster: ClusterSimulation
    retired_s: float


class _Tick(NamedTuple):
    """Decide again; `has_new_speed` if a member was found to be faster or slower than planned."""

    has_new_speed: bool = False


_Event: TypeAlias = Fault | _Start | _Lost | _Drain | _Tick


@config
class SimulationSettings:
    """Times of a simulation, in seconds; `wait_s` and `rest_s` are those of the coordinator's `MembershipPolicy`.

    Args:
        step_s: Duration of an optimizer step: a number, or a function of the machine and its share of the model.
        detection_s: Time from a failure or a change of speed to its detection.
        wait_s: Free machines are planned once none has joined for this long.
        max_wait: Free machines are planned after this many times `wait_s` at the latest.
        rest_s: Time from a change of plan to the search for a better one.
        record_s: Time from the start that is recorded action by action, for a timeline.
    """

    step_s: StepSeconds = 0.0
    detection_s: float = 2.0
    wait_s: float = 15.0
    max_wait: float = 4.0
    rest_s: float = 60.0
    record_s: float = 0.0

    def __post_init__(self) -> None:
        require(callable(self.step_s) or 0 <= self.step_s < inf, f"step_s must be >= 0, got {self.step_s}")
        require(self.max_wait >= 1, f"max_wait must be >= 1, got {self.max_wait}")
        for name in ("detection_s", "wait_s", "rest_s"):
            require(0 <= getattr(self, name) < inf, f"{name} must be >= 0, got {getattr(self, name)}")
        require(self.record_s >= 0, f"record_s must be >= 0, got {self.record_s}")


class FleetSimulation:
    """Runs the clusters of a fleet while machines leave, join and change their speed."""

    def __init__(
        self, world: SimulationWorld, task: Task, plan: FleetPlan, microbatches: float, settings: SimulationSettings
    ) -> None:
        self._world, self._task, self._microbatches = world, task, microbatches
        self._detection_s = settings.detection_s
        self._machines = {machine.name: machine for machine in task.fleet.machines}  # with their present speeds
        self._membership = SimulatedMembership(
            task, plan, wait_s=settings.wait_s, max_wait=settings.max_wait, rest_s=settings.rest_s
        )
        require(self._membership.present <= self._machines.keys(), "the plan has machines that are not in the fleet")
        self._planner = Planner(task, self._machines)
        self._clusters = [ClusterSimulation(world, i, cluster, microbatches) for i, cluster in enumerate(plan.clusters)]
        self._cluster_of = {name: cluster for cluster in self._clusters for name in cluster.last_plan.members}
        self._log: list[SimulatedEvent] = []
        self._queue: list[tuple[float, int, _Event]] = []
        self._order = count()
        self._next_tick_s = inf

    def run(self, faults: FaultTrace, until_s: float) -> Simulation:
        for fault in faults:
            require(fault.machine in self._machines, f"a fault names {fault.machine!r}, which is not in the fleet")
        self._queue = [(fault.time_s, next(self._order), fault) for fault in faults]
        heapify(self._queue)
        for cluster in self._clusters:
            cluster.start(self._task, 0.0)
        self._decide(0.0)
        while self._queue and self._queue[0][0] < until_s:
            now_s, _, event = heappop(self._queue)
            if until_s == inf and self._all_finished(now_s):
                break
            if self._handle(now_s, event):
                self._decide(now_s)
        for cluster in self._clusters:
            cluster.run(until_s)
            cluster.stop("all microbatches are trained" if cluster.finished else "end of the simulation", at_end=True)
        end_s = until_s if until_s < inf else max(cluster.end_s for cluster in self._clusters)
        results = tuple(
            cluster.result(until_s if until_s < inf else cluster.end_s, self._task.microbatch)
            for cluster in self._clusters
        )
        return Simulation(results, tuple(self._log), end_s, self._world.bucket_s)

    def _all_finished(self, now_s: float) -> bool:
        for cluster in self._clusters:
            cluster.run(now_s)
        return all(cluster.finished for cluster in self._clusters)

    # events

    def _handle(self, now_s: float, event: _Event) -> bool:
        """Apply an event; returns whether there may be something to decide."""
        match event:
            case Fault():
                return self._apply_fault(now_s, event)
            case _Start(cluster):
                if cluster.starts_at_s != now_s:
                    return False
                cluster.start(self._task_now(cluster), now_s)
            case _Lost(cluster, plan):
                if cluster.plan is not plan or cluster.runs:
                    return False
                self._end(now_s, cluster)
            case _Drain(cluster, retired_s):
                return self._drain(now_s, cluster, retired_s)
            case _Tick(has_new_speed):
                if has_new_speed:
                    self._membership.change_speed()
                elif now_s >= self._next_tick_s:
                    self._next_tick_s = inf
        return True

    def _apply_fault(self, now_s: float, fault: Fault) -> bool:
        name, cluster = fault.machine, self._cluster_of.get(fault.machine)
        if (fault.kind == "join") == (name in self._membership.present):
            return False  # already present, or absent
        if fault.kind == "slow":
            return self._change_speed(now_s, fault, cluster)
        self._note(now_s, f"{name} {fault.kind}s")
        if fault.kind == "leave":
            self._membership.leave(name)
            if cluster is not None and cluster.plan is not None:
                self._halt(now_s, cluster, f"{name} left")
                self._push(now_s + self._detection_s, _Lost(cluster, cluster.plan))
        else:
            self._membership.join(name, now_s)
            if cluster is not None:  # it came back without its stage before its loss was detected
                self._end(now_s, cluster)
        return True

    def _change_speed(self, now_s: float, fault: Fault, cluster: ClusterSimulation | None) -> bool:
        machine = self._task.fleet[fault.machine]
        machine = self._machines[fault.machine] = replace(machine, speed=machine.speed / fault.factor)
        self._note(now_s, f"{machine.name} takes {fault.factor:g} times as long as planned")
        if cluster is not None:
            cluster.run(now_s)
            cluster.set_machine(machine)
            self._push(now_s + self._detection_s, _Tick(has_new_speed=True))
        return False

    def _drain(self, now_s: float, cluster: ClusterSimulation, retired_s: float) -> bool:
        if not cluster.is_retiring or cluster.plan is None:
            return False
        cluster.run(now_s)
        if cluster.is_drained or now_s >= retired_s + _RETIRE_S:
            self._halt(now_s, cluster, "retired for another plan")
            self._end(now_s, cluster)
            return True
        self._push(now_s + cluster.plan.partition.interval_s, _Drain(cluster, retired_s))
        return False

    # decisions

    def _decide(self, now_s: float) -> None:
        """Carry out the plans that are due, and schedule the next decision."""
        while True:
            is_starting = any(cluster.starts_at_s is not None for cluster in self._clusters)
            decision = self._membership.next_decision(is_starting=is_starting)
            if decision is None:
                return
            if decision.time_s > now_s:
                if decision.time_s < self._next_tick_s:
                    self._next_tick_s = decision.time_s
                    self._push(decision.time_s, _Tick())
                return
            if isinstance(decision, SimulatedPlan):
                self._create_plan(now_s, decision)
            else:
                self._consider_replan(now_s, decision)

    def _create_plan(self, now_s: float, decision: SimulatedPlan) -> None:
        membership = self._membership
        try:
            plan = self._planner.plan(decision.free, decision.failed)
        except PlanError as error:
            membership.apply_plan(decision, (), now_s)
            self._note(now_s, f"no plan for {', '.join(decision.free)}: {error}")
            return
        sources = (*decision.failed, *membership.running)
        move_s = self._planner.move_s(membership.present, sources, plan.clusters)
        membership.apply_plan(decision, plan.clusters, now_s)
        for cluster_plan, seconds in zip(plan.clusters, move_s, strict=True):
            cluster = self._predecessor(cluster_plan) or self._new_cluster(cluster_plan)
            cluster.plan = cluster_plan
            self._cluster_of.update(dict.fromkeys(cluster_plan.members, cluster))
            if not cluster.finished:
                cluster.starts_at_s = now_s + seconds
                self._push(cluster.starts_at_s, _Start(cluster))
        longest_s = max(move_s, default=0.0)
        self._note(now_s, plan.reason + (f"; state arrives after {longest_s:.1f} s" if longest_s else ""))

    def _consider_replan(self, now_s: float, decision: SimulatedReplan) -> None:
        """Retire the clusters that a better plan does without."""
        self._membership.apply_comparison(decision, now_s)
        members = [name for cluster in decision.running for name in cluster.members]
        try:
            plan = self._planner.plan((*members, *decision.free), decision.running)
        except PlanError:
            return
        kept = {(cluster.members, cluster.partition.cuts) for cluster in plan.clusters}
        ends = [cluster for cluster in decision.running if (cluster.members, cluster.partition.cuts) not in kept]
        for cluster in [self._cluster_of[cluster.members[0]] for cluster in ends]:
            if cluster.runs and not cluster.is_retiring:
                cluster.retire(now_s)
                self._push(now_s, _Drain(cluster, now_s))
        if ends:
            self._note(now_s, f"a better plan: {plan.reason}")

    # clusters

    def _halt(self, now_s: float, cluster: ClusterSimulation, reason: str) -> None:
        cluster.run(now_s)
        cluster.starts_at_s = None
        cluster.stop(reason)

    def _end(self, now_s: float, cluster: ClusterSimulation) -> None:
        """End a halted cluster: its plan is dropped, its members are free."""
        assert cluster.plan is not None
        self._membership.end(cluster.plan, now_s)
        for name in cluster.plan.members:
            del self._cluster_of[name]
        cluster.plan = None

    def _predecessor(self, plan: ClusterPlan) -> ClusterSimulation | None:
        """The cluster without a plan whose work the new one continues: the one that had most of its members."""
        ended = {cluster.last_plan: cluster for cluster in self._clusters if cluster.plan is None}
        found = most_shared(plan, ended)
        return ended[found] if found is not None else None

    def _new_cluster(self, plan: ClusterPlan) -> ClusterSimulation:
        cluster = ClusterSimulation(self._world, len(self._clusters), plan, self._microbatches)
        self._clusters.append(cluster)
        return cluster

    def _task_now(self, cluster: ClusterSimulation) -> Task:
        """The task with the present speeds of a cluster's machines."""
        assert cluster.plan is not None
        machines = tuple(self._machines[name] for name in cluster.plan.members)
        return replace(self._task, fleet=replace(self._task.fleet, machines=machines))

    def _push(self, time_s: float, event: _Event) -> None:
        heappush(self._queue, (time_s, next(self._order), event))

    def _note(self, time_s: float, text: str) -> None:
        self._log.append(SimulatedEvent(time_s, text))


def simulate(
    task: Task,
    plan: FleetPlan,
    *,
    duration_s: float | None = None,
    microbatches: int | None = None,
    faults: FaultTrace | None = None,
    seed: int = 0,
    jitter: float = 0.0,
    settings: SimulationSettings | None = None,
) -> Simulation:
    """Simulate a plan for `duration_s`, or until every cluster has trained `microbatches`, in whole optimizer steps.

    Every duration varies by up to `jitter` (0.1: from 0.9 to 1.1 times itself), drawn from the seed.
    """
    require((duration_s is None) != (microbatches is None), "give either duration_s or microbatches")
    require(duration_s is None or 0 < duration_s < inf, f"duration_s must be > 0, got {duration_s}")
    require(microbatches is None or microbatches >= 1, f"microbatches must be >= 1, got {microbatches}")
    require(0 <= jitter < 1, f"jitter must be >= 0 and < 1, got {jitter}")
    require(len(plan.clusters) >= 1, "the plan must have at least one cluster")
    intervals_s = [cluster.partition.interval_s for cluster in plan.clusters]
    require(min(intervals_s) > 0, "interval_s of every cluster must be > 0, got 0")
    settings = settings or SimulationSettings()
    world = SimulationWorld(
        network=NetworkModel(task.chain, _all_cuts(plan.clusters), recompute=task.memory.recompute),
        memory=task.memory,
        step_s=settings.step_s,
        jitter=jitter,
        seed=seed,
        bucket_s=(duration_s or max(intervals_s) * (microbatches or 1)) / _NUM_BUCKETS,
        record_s=settings.record_s,
    )
    simulation = FleetSimulation(world, task, plan, microbatches or inf, settings)
    return simulation.run(faults or FaultTrace(), duration_s or inf)


def _all_cuts(clusters: Sequence[ClusterPlan]) -> set[int]:
    return {cut for cluster in clusters for cut in cluster.partition.cuts}
