"""A plan on a virtual clock: what it would give, with the runtime's own schedule at every stage.

    simulation = simulate(task, plan, duration_s=600, faults=draw_faults(task.fleet, 600))
    simulation.samples_per_s, simulation.bubble, simulation.totals.lost, simulation.happenings

The same seed gives the same simulation.
"""

from __future__ import annotations

from math import inf

from ..core.config import config, require
from .faults import FaultTrace
from .fleet import FleetPlan, Task
from .fleet_run import FleetRun
from .life import World
from .outcome import Simulation
from .recovery import Recovery, recover
from .terrain import StepSeconds, Terrain

__all__ = ["SimulationSettings", "simulate"]

_BUCKETS = 60  # of the time, for bytes over links


@config
class SimulationSettings:
    """`step_s` is the seconds of an update: a figure, or a function of the machine and its share of the model.

    A failure is noticed `detection_s` after it happened, and `recovery` decides what then. The first `record_s`
    seconds are kept action by action, for a timeline.
    """

    step_s: StepSeconds = 0.0
    detection_s: float = 2.0
    recovery: Recovery = recover
    record_s: float = 0.0

    def __post_init__(self) -> None:
        require(callable(self.step_s) or 0 <= self.step_s < inf, f"step_s must be 0 or more, not {self.step_s}")
        require(0 <= self.detection_s < inf, f"detection_s must be 0 or more, not {self.detection_s}")
        require(self.record_s >= 0, f"record_s must be 0 or more, not {self.record_s}")


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
    """Run a plan for `duration_s`, or until every cluster has trained `microbatches`, in whole updates.

    Every duration varies by up to `jitter` (0.1: from 0.9 to 1.1 times itself), drawn from the seed.
    """
    require((duration_s is None) != (microbatches is None), "give either duration_s or microbatches")
    require(duration_s is None or 0 < duration_s < inf, f"duration_s must be above 0, not {duration_s}")
    require(microbatches is None or microbatches >= 1, f"microbatches must be at least 1, not {microbatches}")
    require(0 <= jitter < 1, f"jitter must be from 0 to 1, not {jitter}")
    require(len(plan.clusters) >= 1, "a plan without clusters trains nothing")
    slowest_s = max(cluster.partition.interval_s for cluster in plan.clusters)
    require(min(c.partition.interval_s for c in plan.clusters) > 0, "there is nothing to simulate: nothing takes time")
    settings = settings or SimulationSettings()
    world = World(
        terrain=Terrain(
            task.chain, {cut for c in plan.clusters for cut in c.partition.cuts}, recompute=task.memory.recompute
        ),
        memory=task.memory,
        step_s=settings.step_s,
        jitter=jitter,
        seed=seed,
        bucket_s=(duration_s or slowest_s * (microbatches or 1)) / _BUCKETS,
        record_s=settings.record_s,
    )
    run = FleetRun(world, task, plan, microbatches or inf, settings.recovery, settings.detection_s)
    return run.run(faults or FaultTrace(), duration_s or inf)
