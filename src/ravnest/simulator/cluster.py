"""Simulates one cluster from start to end: periods under one plan each, and the microbatches lost between them.

Microbatches that were fed and not yet applied in an optimizer step when the cluster fails are lost. The next period
feeds as many again before it feeds others.

Durations of actions come from the chain (`NetworkModel`), those of messages from lines and links (`cluster_links`). A
machine's upload is one channel and its download another, shared by all its links. A link that is slower than both ends'
lines, or uses none (the network of a site), or is not duplex, is a channel of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import NamedTuple, TypeAlias

from ravnest.core.schedule import Kind, PipelineSchedule, stage_schedules
from ravnest.planner.chain import Chain, CutPoints
from ravnest.planner.fleet import ClusterPlan, Machine, Task
from ravnest.planner.memory import MemoryModel, StageShare, stage_memory
from ravnest.planner.problem import LinkSpec
from ravnest.simulator.pipeline import Hop, PipelineSimulation, Route
from ravnest.simulator.results import LinkUse, Period, SimulatedCluster, StageUse, Totals

__all__ = ["ClusterSimulation", "SimulationWorld", "StepSeconds", "NetworkModel"]

StepSeconds: TypeAlias = float | Callable[[Machine, StageShare], float]  # of an optimizer step


class ClusterLinks(NamedTuple):
    """Routes of a `PipelineSimulation`, the bytes of a message on each, and the names of the channels they pass."""

    routes: tuple[Route, ...]
    num_bytes: tuple[int, ...]
    channels: tuple[str, ...]


class NetworkModel:
    """A chain with prefix sums, for quick answers about ranges of ops."""

    def __init__(self, chain: Chain, cuts: Iterable[int] = (), *, recompute: bool = False) -> None:
        """`cuts` are those expected in plans; a new one costs another pass over the chain."""
        self.chain, self._recompute = chain, recompute
        self._forward_s = list(accumulate(chain.forward_s, initial=0.0))
        self._backward_s = list(accumulate(chain.backward_s, initial=0.0))
        self._cuts = set(cuts)
        self._index_cuts()

    def _index_cuts(self) -> None:
        self._cut_points = CutPoints(self.chain, sorted(self._cuts))
        self._index = {op: i for i, op in enumerate(self._cut_points.bounds)}

    def share(self, start: int, stop: int) -> StageShare:
        """The bytes of the stage from op `start` up to `stop`."""
        if start not in self._index or stop not in self._index:
            self._cuts |= {start, stop} - {0, self.chain.num_ops}
            self._index_cuts()
        return self._cut_points.share(self._index[start], self._index[stop])

    def action_seconds(self, start: int, stop: int, machine: Machine, step_s: StepSeconds) -> Mapping[Kind, float]:
        """Seconds of each action of that stage."""
        forward_s = (self._forward_s[stop] - self._forward_s[start]) / machine.speed
        backward_s = (self._backward_s[stop] - self._backward_s[start]) / machine.speed
        return {
            "forward": forward_s,
            "backward": backward_s + (forward_s if self._recompute else 0.0),
            "step": step_s if isinstance(step_s, int | float) else step_s(machine, self.share(start, stop)),
        }

    def op_ranges(self, plan: ClusterPlan) -> list[tuple[int, int]]:
        return list(pairwise((0, *plan.partition.cuts, self.chain.num_ops)))


def cluster_links(task: Task, plan: ClusterPlan) -> ClusterLinks:
    """The routes of a cluster's messages: forward from stage j, and backward to it."""
    machines = [task.fleet[name] for name in plan.members]
    channels = _Channels()
    routes, sizes = list[Route](), list[int]()
    for (a, b), cut in zip(pairwise(machines), plan.partition.cuts, strict=True):
        link = task.fleet.link(a, b)
        there, back = task.chain.forward_bytes[cut], task.chain.backward_bytes[cut]
        routes.append(channels.route(a, b, link, link.forward_bytes_per_s, there))
        routes.append(channels.route(b, a, link, link.backward_bytes_per_s, back))
        sizes += [there, back]
    return ClusterLinks(tuple(routes), tuple(sizes), tuple(channels.numbers))


class _Channels:
    """Channels by name, numbered as they appear."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def route(self, a: Machine, b: Machine, link: LinkSpec, bytes_per_s: float, num_bytes: int) -> Route:
        up, down = (a.up_bytes_per_s, b.down_bytes_per_s) if link.uses_line else (inf, inf)
        hops = [self._hop(f"{a.name} up", num_bytes / up)]
        if bytes_per_s < min(up, down) or not link.duplex:
            name = f"{a.name} > {b.name}" if link.duplex else " - ".join(sorted((a.name, b.name)))
            hops.append(self._hop(name, num_bytes / bytes_per_s))
        hops.append(self._hop(f"{b.name} down", num_bytes / down))
        return Route(tuple(hop for hop in hops if hop.seconds), link.latency_s)

    def _hop(self, name: str, seconds: float) -> Hop:
        return Hop(self.numbers.setdefault(name, len(self.numbers)) if seconds else -1, seconds)


# A cluster over time.


class SimulationWorld(NamedTuple):
    """Settings that all clusters of a simulation share."""

    network: NetworkModel
    memory: MemoryModel
    step_s: StepSeconds
    jitter: float
    seed: int
    bucket_s: float
    record_s: float


class ClusterSimulation:
    """Runs one cluster: it has a pipeline while it trains, and a plan until it ends or another replaces it."""

    def __init__(self, world: SimulationWorld, number: int, plan: ClusterPlan, microbatches: float) -> None:
        """It finishes after `microbatches`, in whole optimizer steps."""
        self.plan: ClusterPlan | None = plan
        self.last_plan = plan  # of the last period
        self.starts_at_s: float | None = None  # while the state of its stages is on the way
        self.is_retiring = False
        self._world, self._microbatches = world, microbatches
        self._rng = random.Random(f"{world.seed}/{number}")
        self._pipeline: PipelineSimulation | None = None
        self._links = ClusterLinks((), (), ())
        self._shares: list[StageShare] = []
        self._periods: list[Period] = []
        self._totals = Totals()

    @property
    def runs(self) -> bool:
        return self._pipeline is not None

    @property
    def finished(self) -> bool:
        """Whether all microbatches are trained."""
        pipeline = self._pipeline
        return self._totals.trained + (pipeline.trained if pipeline else 0) >= self._microbatches

    @property
    def is_drained(self) -> bool:
        """Whether a retiring cluster has trained all that it was fed."""
        return self._pipeline is None or self._pipeline.ended

    def start(self, task: Task, now_s: float) -> None:
        """Begin a period under the present plan."""
        assert self.plan is not None
        assert self._pipeline is None
        world, plan = self._world, self.plan
        ranges = world.network.op_ranges(plan)
        machines = [task.fleet[name] for name in plan.members]
        self.last_plan, self.starts_at_s = plan, None
        self._shares = [world.network.share(start, stop) for start, stop in ranges]
        self._links = cluster_links(task, plan)
        self._pipeline = PipelineSimulation(
            self._schedules(task, plan),
            [
                world.network.action_seconds(start, stop, machine, world.step_s)
                for (start, stop), machine in zip(ranges, machines, strict=True)
            ],
            self._links.routes,
            start_s=now_s,
            bucket_s=world.bucket_s,
            record_until_s=world.record_s,
            vary=self._vary(world.jitter),
        )

    def run(self, until_s: float) -> None:
        if self._pipeline is not None:
            self._pipeline.run(until_s)
            assert not self._pipeline.ended or self.finished or self.is_retiring, "deadlock before all is trained"

    def set_machine(self, machine: Machine) -> None:
        """Let a member compute at this machine's speed from its next action on."""
        if self._pipeline is not None and self.plan is not None:
            stage, network = self.plan.members.index(machine.name), self._world.network
            start, stop = network.op_ranges(self.plan)[stage]
            self._pipeline.set_seconds(stage, network.action_seconds(start, stop, machine, self._world.step_s))

    def retire(self, now_s: float) -> None:
        """Feed nothing more beyond the optimizer step that has begun."""
        self.run(now_s)
        self.is_retiring = True
        if self._pipeline is not None:
            self._pipeline.drain()

    def stop(self, reason: str, *, at_end: bool = False) -> None:
        """End the period; microbatches in flight are lost, unless the simulation ends too."""
        pipeline = self._pipeline
        if pipeline is None:
            return
        in_flight = pipeline.fed - pipeline.trained
        totals = Totals(
            fed=pipeline.fed,
            trained=pipeline.trained,
            lost=0 if at_end else in_flight,
            repeated=min(self._totals.unrepeated, pipeline.fed),
            in_flight=in_flight if at_end else 0,
        )
        self._totals = Totals.of((self._totals, totals))
        self._periods.append(self._period(pipeline, totals, reason))
        self._pipeline, self.is_retiring = None, False

    def result(self, duration_s: float, microbatch: int) -> SimulatedCluster:
        return SimulatedCluster(tuple(self._periods), self._totals, duration_s, microbatch)

    @property
    def end_s(self) -> float:
        return self._periods[-1].end_s if self._periods else 0.0

    def _schedules(self, task: Task, plan: ClusterPlan) -> list[PipelineSchedule]:
        depths = plan.partition.depths
        accumulate = task.accumulate or max(depths)
        chosen = stage_schedules(
            depths, accumulate, synchronous=self._world.memory.synchronous, max_staleness=task.max_staleness
        )
        schedules = [PipelineSchedule(rule, is_last_stage=i == len(chosen) - 1) for i, rule in enumerate(chosen)]
        if self._microbatches < inf:
            for schedule in schedules:
                schedule.end = ceil((self._microbatches - self._totals.trained) / accumulate)
        return schedules

    def _vary(self, jitter: float) -> Callable[[], float] | None:
        draw = self._rng.random
        return (lambda: 1 - jitter + 2 * jitter * draw()) if jitter else None

    def _period(self, pipeline: PipelineSimulation, totals: Totals, reason: str) -> Period:
        plan, now_s = self.last_plan, pipeline.now_s
        steady_updates, steady_s = pipeline.steady
        return Period(
            start_s=pipeline.start_s,
            end_s=now_s,
            plan=plan,
            totals=totals,
            steady_microbatches=steady_updates * pipeline.schedules[0].rule.accumulate,
            steady_s=steady_s,
            stages=tuple(self._stage_use(pipeline, stage, name) for stage, name in enumerate(plan.members)),
            links=tuple(self._link_use(pipeline, route, plan.members) for route in range(len(pipeline.routes))),
            end_reason=reason,
            channels=self._links.channels,
            actions=tuple(span._replace(end_s=min(span.end_s, now_s)) for span in pipeline.actions),
            messages=tuple(
                span._replace(end_s=min(span.end_s, now_s)) for span in pipeline.messages if span.start_s < now_s
            ),
        )

    def _stage_use(self, pipeline: PipelineSimulation, stage: int, machine: str) -> StageUse:
        busy_s, most, steady_s = (
            pipeline.worked_s(pipeline.now_s)[stage],
            pipeline.max_in_flight[stage],
            pipeline.steady[1],
        )
        return StageUse(
            machine=machine,
            busy_s=busy_s,
            idle_s=pipeline.now_s - pipeline.start_s - busy_s,
            bubble=1 - pipeline.steady_busy_s(stage) / steady_s if steady_s else None,
            staleness=pipeline.schedules[stage].staleness,
            max_in_flight=most,
            memory_bytes=tuple(
                stage_memory(self._shares[stage], max(1, k), self._world.memory).total for k in range(most + 1)
            ),
        )

    def _link_use(self, pipeline: PipelineSimulation, route: int, members: tuple[str, ...]) -> LinkUse:
        ends = members[route // 2], members[route // 2 + 1]
        sender, receiver = reversed(ends) if route % 2 else ends
        each, sent = self._links.num_bytes[route], pipeline.sent[route]
        seconds = pipeline.now_s - pipeline.start_s
        busy_s = sum(sent) * max((hop.seconds for hop in pipeline.routes[route].hops), default=0.0)
        return LinkUse(
            sender=sender,
            receiver=receiver,
            num_bytes=each * sum(sent),
            utilisation=busy_s / seconds if seconds else 0.0,
            bytes_over_time=tuple(each * number for number in sent),
        )
