"""A cluster from the beginning of a simulation to its end: spells under one plan or another, and what was lost between.

What a failure finds fed and not yet applied in an update is lost. The next spell feeds as many again, before others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil, inf
from typing import NamedTuple

from ..core.schedule import Schedule, rules
from .fleet import ClusterPlan, Machine, Task
from .memory import MemoryModel, Share, stage_memory
from .outcome import ClusterRun, LinkUse, Spell, StageUse, Totals
from .pipe import Pipe
from .terrain import StepSeconds, Terrain, Wiring, wire

__all__ = ["Life", "World"]


class World(NamedTuple):
    """What all clusters of a simulation have in common."""

    terrain: Terrain
    memory: MemoryModel
    step_s: StepSeconds
    jitter: float
    seed: int
    bucket_s: float
    record_s: float


class Life:
    """Runs one cluster. It has a pipe while it trains; without one it stands still, and without a plan it is parked."""

    def __init__(self, world: World, number: int, plan: ClusterPlan, microbatches: float) -> None:
        """It has no more to do after `microbatches`, in whole updates."""
        self.plan: ClusterPlan | None = plan
        self.last_plan = plan
        self.starts_at_s: float | None = None  # when it is to start again
        self._world, self._microbatches = world, microbatches
        self._rng = random.Random(f"{world.seed}/{number}")
        self._pipe: Pipe | None = None
        self._wiring = Wiring((), (), ())
        self._shares: list[Share] = []
        self._spells: list[Spell] = []
        self._totals = Totals()

    @property
    def runs(self) -> bool:
        return self._pipe is not None

    @property
    def finished(self) -> bool:
        """All that was asked for is trained."""
        pipe = self._pipe
        return self._totals.trained + (pipe.trained if pipe else 0) >= self._microbatches

    def start(self, task: Task, now_s: float) -> None:
        """Begin a spell under the plan it has."""
        assert self.plan is not None
        assert self._pipe is None
        world, plan = self._world, self.plan
        stretches = world.terrain.stretches(plan)
        machines = [task.fleet[name] for name in plan.members]
        self.last_plan, self.starts_at_s = plan, None
        self._shares = [world.terrain.share(start, stop) for start, stop in stretches]
        self._wiring = wire(task, plan)
        self._pipe = Pipe(
            self._schedules(task, plan),
            [
                world.terrain.seconds(start, stop, machine, world.step_s)
                for (start, stop), machine in zip(stretches, machines, strict=True)
            ],
            self._wiring.routes,
            start_s=now_s,
            bucket_s=world.bucket_s,
            record_until_s=world.record_s,
            vary=self._vary(world.jitter),
        )

    def run(self, until_s: float) -> None:
        if self._pipe is not None:
            self._pipe.run(until_s)
            assert not self._pipe.ended or self.finished, "a deadlock: nothing happens, and not all is trained"

    def slow(self, machine: Machine) -> None:
        """A member now works as fast as this machine."""
        if self._pipe is not None and self.plan is not None:
            stage = self.plan.members.index(machine.name)
            start, stop = self._world.terrain.stretches(self.plan)[stage]
            self._pipe.set_seconds(stage, self._world.terrain.seconds(start, stop, machine, self._world.step_s))

    def stop(self, ended: str, *, at_end: bool = False) -> None:
        """End the spell; what is under way is lost, unless the simulation ends here too."""
        pipe = self._pipe
        if pipe is None:
            return
        under_way = pipe.fed - pipe.trained
        repeated = min(self._totals.waiting, pipe.fed)
        totals = Totals(
            fed=pipe.fed,
            trained=pipe.trained,
            lost=0 if at_end else under_way,
            repeated=repeated,
            in_flight=under_way if at_end else 0,
        )
        self._totals = Totals.of((self._totals, totals))
        self._spells.append(self._spell(pipe, totals, ended))
        self._pipe = None

    def result(self, duration_s: float, microbatch: int) -> ClusterRun:
        return ClusterRun(tuple(self._spells), self._totals, duration_s, microbatch)

    @property
    def end_s(self) -> float:
        return self._spells[-1].end_s if self._spells else 0.0

    def _schedules(self, task: Task, plan: ClusterPlan) -> list[Schedule]:
        depths = plan.partition.depths
        accumulate = task.accumulate or max(depths)
        chosen = rules(depths, accumulate, synchronous=self._world.memory.synchronous, max_staleness=task.max_staleness)
        schedules = [Schedule(rule, is_leaf=i == len(chosen) - 1) for i, rule in enumerate(chosen)]
        if self._microbatches < inf:
            for schedule in schedules:
                schedule.end = ceil((self._microbatches - self._totals.trained) / accumulate)
        return schedules

    def _vary(self, jitter: float) -> Callable[[], float] | None:
        draw = self._rng.random
        return (lambda: 1 - jitter + 2 * jitter * draw()) if jitter else None

    def _spell(self, pipe: Pipe, totals: Totals, ended: str) -> Spell:
        plan = self.last_plan
        steady_updates, steady_s = pipe.steady
        return Spell(
            start_s=pipe.start_s,
            end_s=pipe.now_s,
            plan=plan,
            totals=totals,
            steady_microbatches=steady_updates * pipe.schedules[0].rule.accumulate,
            steady_s=steady_s,
            stages=tuple(self._stage_use(pipe, stage, plan.members[stage]) for stage in range(len(plan.members))),
            links=tuple(self._link_use(pipe, route, plan.members) for route in range(len(pipe.routes))),
            ended=ended,
            channels=self._wiring.channels,
            actions=tuple(span._replace(end_s=min(span.end_s, pipe.now_s)) for span in pipe.actions),
            messages=tuple(
                span._replace(end_s=min(span.end_s, pipe.now_s)) for span in pipe.messages if span.start_s < pipe.now_s
            ),
        )

    def _stage_use(self, pipe: Pipe, stage: int, machine: str) -> StageUse:
        busy_s, most, steady_s = pipe.worked_s(pipe.now_s)[stage], pipe.most_in_flight[stage], pipe.steady[1]
        return StageUse(
            machine=machine,
            busy_s=busy_s,
            idle_s=pipe.now_s - pipe.start_s - busy_s,
            bubble=1 - pipe.steady_busy_s(stage) / steady_s if steady_s else None,
            staleness=pipe.schedules[stage].staleness,
            most_in_flight=most,
            memory_bytes=tuple(
                stage_memory(self._shares[stage], max(1, k), self._world.memory).total for k in range(most + 1)
            ),
        )

    def _link_use(self, pipe: Pipe, route: int, members: tuple[str, ...]) -> LinkUse:
        ends = members[route // 2], members[route // 2 + 1]
        sender, receiver = reversed(ends) if route % 2 else ends
        each, sent = self._wiring.num_bytes[route], pipe.sent[route]
        seconds = pipe.now_s - pipe.start_s
        busy_s = sum(sent) * max((hop.seconds for hop in pipe.routes[route].hops), default=0.0)
        return LinkUse(
            sender=sender,
            receiver=receiver,
            num_bytes=each * sum(sent),
            utilisation=busy_s / seconds if seconds else 0.0,
            bytes_over_time=tuple(each * number for number in sent),
        )
