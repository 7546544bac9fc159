"""Builds clusters from plans: the files of their stages, the rings between them, and what to expect of each.

The traced program stays in the requester's process; only stages leave it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import msgspec

from ravnest.coordinator.events import ClusterSpec, IdleNode
from ravnest.coordinator.planning import plan_in_subprocess
from ravnest.coordinator.requester import PlannedClusters, RingShape, StageFiles
from ravnest.core.schedule import StageSchedule, stage_schedules
from ravnest.graph import Program, Stage, dump, measure_costs, split
from ravnest.graph.program import DTYPES, StateSpec, refs
from ravnest.pipeline.config import StageConfig, TrainerConfig, roles
from ravnest.pipeline.state import kind_and_name, owned, select
from ravnest.planner import Chain
from ravnest.planner.fleet import ClusterPlan, Fleet, FleetPlan, Machine, Task
from ravnest.planner.rings import find_segments, order_ring
from ravnest.protocol.control import NodeProfile
from ravnest.run.checkpoint.format import Checkpoint, write_first_weights
from ravnest.run.fleet_plan import TimedJob
from ravnest.run.plan import PipelinePlan, StagePlan

__all__ = ["ClusterBuilder", "FleetClusterBuilder", "cluster_names"]

_SLACK = 3  # microbatches in flight beyond what the plan needs: on real lines one waits behind another
_HEADER_BYTES = 1 << 20  # of a weights file, beside its tensors


class ClusterBuilder:
    """Makes the files of planned clusters. Called in one thread at a time; `plan` and `better` are the subclass's."""

    def __init__(
        self,
        program: Program,
        chain: Chain,
        trainer: TrainerConfig,
        folder: Path,
        *,
        accumulate: int,
        microbatch: int,
    ) -> None:
        self._program, self._chain, self._trainer, self._folder = program, chain, trainer, folder
        self._accumulate, self.microbatch = accumulate, microbatch
        self.plans: dict[str, PipelinePlan] = {}  # by cluster
        self.checkpoint: Checkpoint | None = None  # the state of stages of which no node has a replica
        self._machines: dict[str, Machine] = {}

    def plan(self, machines: Sequence[Machine], generation: int, broken: Sequence[str] = ()) -> PlannedClusters:
        """Return clusters of these machines; of `broken` clusters that some of them were in, repairs are preferred."""
        raise AssertionError("a subclass plans")

    def better(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Return the running clusters that stand in the way of a much better plan, and the reason."""
        raise AssertionError("a subclass plans")

    def rings(self, clusters: Sequence[ClusterSpec]) -> list[RingShape]:
        """A ring for every segment that has something to average, of its owners in all clusters."""
        shapes: list[RingShape] = []
        segments = find_segments(self._chain, [cluster.cuts for cluster in clusters])
        starts = [segment.start for segment in segments]
        targets: list[list[str]] = [[] for _ in segments]
        for first, state in self._averaged():
            targets[bisect_right(starts, first) - 1].append(state.target)
        for segment, held in zip(segments, targets, strict=True):
            if held:
                owners = [cluster.members[stage] for cluster, stage in zip(clusters, segment.owners, strict=True)]
                ordered = order_ring([self._machines[name] for name in owners])
                shapes.append(RingShape(tuple(machine.name for machine in ordered), tuple(held)))
        return shapes

    def _averaged(self) -> Iterator[tuple[int, StateSpec]]:
        """What training changes, each with the op that reads it first: its owner is the stage of that op."""
        first: dict[str, int] = {}
        for i, op in enumerate(self._program.ops):
            for name in refs(op):
                first.setdefault(name, i)
        for state in self._program.state:
            if state.name in first and (state.trainable or state.mutated):
                yield first[state.name], state

    def stages(
        self, cluster: ClusterSpec, profiles: Sequence[NodeProfile], lacking: Sequence[int] = ()
    ) -> list[StageFiles]:
        """The files of a cluster's stages, root first."""
        plan = self.plans[cluster.id]
        given = roles(plan.stages, [rule.delay for rule in plan.rules])
        return [
            StageFiles(
                file=dump(stage),
                brief=msgspec.msgpack.encode(
                    StageConfig(
                        settings=self._trainer, rule=rule, role=role, max_batch=self.microbatch,
                        threads=profile.threads,
                    )
                ),
                weights=self._first_weights(cluster, stage) if stage.index in lacking else None,
                states=self._states(cluster, stage) if stage.index in lacking else (),
                max_bytes=_owned_bytes(stage) + _HEADER_BYTES,
            )
            for stage, rule, role, profile in zip(plan.stages, plan.rules, given, profiles, strict=True)
        ]  # fmt: skip

    def _states(self, cluster: ClusterSpec, stage: Stage) -> tuple[Path, ...]:
        """What the checkpoint has for a stage, out of files of stages that may have been cut elsewhere."""
        found: list[Path] = []
        checkpoint = self.checkpoint
        names = set(owned(stage))
        for number, file in enumerate(checkpoint.manifest.files if checkpoint is not None else ()):
            if checkpoint is not None and names & {kind_and_name(entry)[1] for entry in file.tensors}:
                path = self._folder / f".state-{cluster.id}-{stage.index}-{number}.safetensors"
                select(checkpoint.folder / file.name, path, names)
                found.append(path)
        return tuple(found)

    def _first_weights(self, cluster: ClusterSpec, stage: Stage) -> Path | None:
        path = self._folder / f".first-{cluster.id}-{stage.index}.safetensors"
        return path if write_first_weights(self._program, stage, path) else None


class FleetClusterBuilder(ClusterBuilder):
    """Plans clusters for the members of a fleet, whose speeds are in GFLOP/s."""

    def __init__(
        self,
        program: Program,
        timed: TimedJob,
        trainer: TrainerConfig,
        folder: Path,
        *,
        synchronous: bool,
        min_stages: int,
        num_spares: int = 0,
    ) -> None:
        super().__init__(
            program, timed.chain, trainer, folder, accumulate=timed.accumulate, microbatch=timed.microbatch
        )
        self._timed = timed
        self._synchronous, self._min_stages, self._num_spares = synchronous, min_stages, num_spares
        self._rows: dict[str, ClusterPlan] = {}

    def plan(self, machines: Sequence[Machine], generation: int, broken: Sequence[str] = ()) -> PlannedClusters:
        """The best clusters of these machines, whose speeds are in GFLOP/s; broken ones are mended if that is best."""
        found = plan_in_subprocess(self._task(machines), self._running(broken))
        names = cluster_names(generation, len(found.clusters))
        clusters = tuple(
            self._cluster(name, generation, plan, broken) for name, plan in zip(names, found.clusters, strict=True)
        )
        idle = [tuple(IdleNode(one.name, one.reason) for one in group) for group in (found.spares, found.left_out)]
        return PlannedClusters(clusters, idle[0], idle[1], found.reason)

    def better(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Which running clusters stand in the way of a plan that is worth enough more, and which plan that is."""
        found = plan_in_subprocess(self._task(machines), self._running(running))
        kept = {(plan.members, plan.partition.cuts) for plan in found.clusters}
        rows = {name: self._rows[name] for name in running if name in self._rows}
        ends = tuple(name for name, row in rows.items() if (row.members, row.partition.cuts) not in kept)
        return ends, found.reason

    def _task(self, machines: Sequence[Machine]) -> Task:
        timed = self._timed
        self._machines |= {machine.name: machine for machine in machines}
        fleet = Fleet(machines=tuple(replace(m, speed=m.speed / timed.gflops) for m in machines))
        task = timed.task(fleet, whole=self._min_stages == 1)
        return replace(task, min_stages=self._min_stages, slack=_SLACK, num_spares=self._num_spares)

    def _running(self, names: Sequence[str]) -> FleetPlan | None:
        """Clusters as the planner knows them; None if there are none."""
        rows = tuple(self._rows[name] for name in names if name in self._rows)
        return FleetPlan(rows, (), (), sum(row.samples_per_s for row in rows), "") if rows else None

    def _mended(self, plan: ClusterPlan, broken: Sequence[str]) -> str:
        """The cluster that most of these machines were in."""
        shared = {name: len(set(self._rows[name].members) & set(plan.members)) for name in broken if name in self._rows}
        best = max(shared, key=shared.__getitem__, default="")
        return best if best and shared[best] else ""

    def _cluster(self, name: str, generation: int, plan: ClusterPlan, broken: Sequence[str]) -> ClusterSpec:
        depths = tuple(plan.partition.depths)
        chosen = stage_schedules(
            depths, self._timed.accumulate, synchronous=self._synchronous, max_staleness=self._timed.max_staleness
        )
        self.plans[name] = self._expected(plan, tuple(chosen))
        self._rows[name] = plan
        return ClusterSpec(
            id=name, generation=generation, members=plan.members, cuts=tuple(plan.partition.cuts),
            accumulate=self._timed.accumulate, depths=depths, samples_per_s=plan.samples_per_s, reason=plan.reason,
            repairs=self._mended(plan, broken), stage_seconds=tuple(plan.partition.stage_seconds),
        )  # fmt: skip

    def _expected(self, plan: ClusterPlan, chosen: tuple[StageSchedule, ...]) -> PipelinePlan:
        found, timed = plan.partition, self._timed
        costs = measure_costs(self._program, timed.microbatch)
        bounds = [0, *found.cuts, len(self._program.ops)]
        stages = tuple(
            StagePlan(
                node=plan.members[i], first_op=first, num_ops=end - first,
                parameter_bytes=costs.parameter_bytes(first, end), memory_bytes=found.memory[i].total,
                seconds=found.stage_seconds[i], sends_bytes=timed.chain.forward_bytes[end] if end < bounds[-1] else 0,
                depth=rule.depth, delay=rule.delay,
            )
            for i, ((first, end), rule) in enumerate(zip(pairwise(bounds), chosen, strict=True))
        )  # fmt: skip
        return PipelinePlan(
            tuple(split(self._program, found.cuts)), stages, chosen, tuple(found.cuts), timed.accumulate,
            timed.microbatch, plan.samples_per_s, plan.reason,
        )  # fmt: skip


def _owned_bytes(stage: Stage) -> int:
    return sum(prod(s.shape) * DTYPES[s.dtype].itemsize for s in stage.state)


def cluster_names(generation: int, count: int) -> list[str]:
    """Return names for the clusters of one plan: c7, or c7a, c7b, ..."""
    return [f"c{generation}{_letter(i)}" if count > 1 else f"c{generation}" for i in range(count)]


def _letter(i: int) -> str:
    """0 -> a, 25 -> z, 26 -> ba, ..."""
    return (_letter(i // 26) if i >= 26 else "") + "abcdefghijklmnopqrstuvwxyz"[i % 26]
