"""Builds clusters from plans: the files of their stages, the rings between them, and their expected speed.

The traced program stays in the requester's process; only stages leave it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from math import prod
from pathlib import Path

import msgspec

from ravnest.coordinator.events import ClusterSpec, IdleNode
from ravnest.coordinator.planning import plan_in_subprocess, upgrade_in_subprocess
from ravnest.coordinator.requester import PlannedClusters, RingShape, StageFiles
from ravnest.core.schedule import StageSchedule, stage_schedules
from ravnest.graph import Program, Stage, dump, measure_costs, split
from ravnest.graph.program import DTYPES, StateSpec, refs
from ravnest.pipeline.config import StageConfig, TrainerConfig, roles
from ravnest.pipeline.state import kind_and_name, owned, select
from ravnest.planner import Chain
from ravnest.planner.fleet import ClusterPlan, Fleet, FleetPlan, Machine, Task
from ravnest.planner.partition.depth import LinkSeconds
from ravnest.planner.rings import find_segments, order_ring
from ravnest.planner.upgrade import Upgrade
from ravnest.protocol.control import NodeProfile
from ravnest.run.checkpoint.format import Checkpoint
from ravnest.run.checkpoint.start import StartWeights
from ravnest.run.fleet_plan import TimedJob
from ravnest.run.plan import PipelinePlan, StagePlan

__all__ = ["ClusterBuilder", "FleetClusterBuilder", "cluster_names"]

_SLACK = 3  # microbatches in flight beyond those of the plan: on real lines they queue
_HEADER_BYTES = 1 << 20  # of a weights file, in addition to its tensors


class ClusterBuilder:
    """Writes the files of planned clusters; subclasses plan them. Called in one thread at a time."""

    def __init__(
        self,
        program: Program,
        chain: Chain,
        trainer: TrainerConfig,
        folder: Path,
        start: StartWeights,
        *,
        accumulate: int,
        microbatch: int,
    ) -> None:
        self._program, self._chain, self._trainer, self._folder = program, chain, trainer, folder
        self._start = start
        self._accumulate, self.microbatch = accumulate, microbatch
        self.plans: dict[str, PipelinePlan] = {}  # by cluster
        self.checkpoint: Checkpoint | None = None  # the state of stages of which no node has a replica
        self._machines: dict[str, Machine] = {}

    def plan(
        self, machines: Sequence[Machine], generation: int, failed_clusters: Sequence[str] = ()
    ) -> PlannedClusters:
        """Return clusters of these machines; repairs of `failed_clusters` that had some of them are preferred."""
        raise AssertionError("a subclass plans")

    def find_better_plan(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Return the running clusters that a much better plan would replace, and the reason."""
        raise AssertionError("a subclass plans")

    def find_upgrade(self, clusters: Sequence[str]) -> Upgrade | None:
        """Return the change of one machine that would help these clusters most, if the planner made them."""
        return None

    def link_seconds(self, cluster: str) -> tuple[LinkSeconds, ...]:
        """Return the expected seconds of a microbatch on each link of a cluster; empty if they take no time."""
        return ()

    def rings(self, clusters: Sequence[ClusterSpec]) -> list[RingShape]:
        """Return a ring for every segment with tensors to average: the owners of the segment in all clusters."""
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

    def work_shares(self, cuts: Sequence[int]) -> list[float]:
        """Return the shares of the stages between these cuts in the compute of the model."""
        chain, bounds = self._chain, [0, *cuts, self._chain.num_ops]
        seconds = [sum(chain.forward_s[a:b]) + sum(chain.backward_s[a:b]) for a, b in pairwise(bounds)]
        return [part / max(sum(seconds), 1e-12) for part in seconds]

    def _averaged(self) -> Iterator[tuple[int, StateSpec]]:
        """Yield the tensors that training changes, each after the first op that reads it; its stage owns the tensor."""
        first: dict[str, int] = {}
        for i, op in enumerate(self._program.ops):
            for name in refs(op):
                first.setdefault(name, i)
        for state in self._program.state:
            if state.name in first and (state.trainable or state.mutated):
                yield first[state.name], state

    def stages(
        self,
        cluster: ClusterSpec,
        profiles: Sequence[NodeProfile],
        missing_stages: Sequence[int] = (),
        missing_frozen: Sequence[int] = (),
    ) -> list[StageFiles]:
        """Return the files of a cluster's stages, in their order.

        Weights and states only of `missing_stages`, frozen weights also of `missing_frozen`.
        """
        plan = self.plans[cluster.id]
        stage_roles = roles(plan.stages, [rule.delay for rule in plan.rules])
        return [
            StageFiles(
                file=dump(stage),
                config=msgspec.msgpack.encode(
                    StageConfig(
                        settings=self._trainer, rule=rule, role=role, max_batch=self.microbatch,
                        threads=profile.threads,
                    )
                ),
                weights=self._first_weights(cluster, stage, is_missing=stage.index in missing_stages)
                if stage.index in (*missing_stages, *missing_frozen)
                else None,
                states=self._states(cluster, stage) if stage.index in missing_stages else (),
                max_bytes=_owned_bytes(stage) + _HEADER_BYTES,
            )
            for stage, rule, role, profile in zip(plan.stages, plan.rules, stage_roles, profiles, strict=True)
        ]  # fmt: skip

    def _states(self, cluster: ClusterSpec, stage: Stage) -> tuple[Path, ...]:
        """Write the tensors of a stage from the checkpoint, whose stages may have had other cuts; return the files."""
        paths: list[Path] = []
        checkpoint = self.checkpoint
        names = set(owned(stage))
        for number, file in enumerate(checkpoint.manifest.files if checkpoint is not None else ()):
            if checkpoint is not None and names & {kind_and_name(entry)[1] for entry in file.tensors}:
                path = self._folder / f".state-{cluster.id}-{stage.index}-{number}.safetensors"
                select(checkpoint.folder / file.name, path, names)
                paths.append(path)
        return tuple(paths)

    def _first_weights(self, cluster: ClusterSpec, stage: Stage, *, is_missing: bool) -> Path | None:
        """Write the tensors that a stage cannot have from elsewhere: all, or the frozen ones if it has a state."""
        path = self._folder / f".first-{cluster.id}-{stage.index}.safetensors"
        frozen_only = not is_missing or self.checkpoint is not None
        return path if self._start.write_stage(stage, path, frozen_only=frozen_only) else None


class FleetClusterBuilder(ClusterBuilder):
    """Plans clusters for the members of a fleet, whose speeds are in GFLOP/s."""

    def __init__(
        self,
        program: Program,
        timed: TimedJob,
        trainer: TrainerConfig,
        folder: Path,
        start: StartWeights,
        *,
        synchronous: bool,
        min_stages: int,
        num_spares: int = 0,
        reference_gflops: float | None = None,
    ) -> None:
        """`reference_gflops` is the speed of this machine, measured as those of the members; None: on the program.

        Small operations take time without many FLOPs, on every machine: a member that is as fast as this machine on
        the reference mix takes as long as this machine for the program.
        """
        super().__init__(
            program, timed.chain, trainer, folder, start, accumulate=timed.accumulate, microbatch=timed.microbatch
        )
        self._timed = timed
        self._reference_gflops = reference_gflops or timed.gflops
        self._synchronous, self._min_stages, self._num_spares = synchronous, min_stages, num_spares
        self._rows: dict[str, ClusterPlan] = {}

    @property
    def gflops(self) -> float:
        """The speed of this machine with one thread, to which the speeds of members are compared."""
        return self._reference_gflops

    def plan(
        self, machines: Sequence[Machine], generation: int, failed_clusters: Sequence[str] = ()
    ) -> PlannedClusters:
        """Return the best clusters of these machines; failed clusters are repaired if that is best."""
        result = plan_in_subprocess(self._task(machines), self._running(failed_clusters))
        names = cluster_names(generation, len(result.clusters))
        clusters = tuple(
            self._cluster(name, generation, plan, failed_clusters)
            for name, plan in zip(names, result.clusters, strict=True)
        )
        spares, left_out = (
            tuple(IdleNode(machine.name, machine.reason) for machine in group)
            for group in (result.spares, result.left_out)
        )
        return PlannedClusters(clusters, spares, left_out, result.reason)

    def find_better_plan(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Return the running clusters that a sufficiently better plan would replace, and the reason of that plan."""
        result = plan_in_subprocess(self._task(machines), self._running(running))
        kept = {(plan.members, plan.partition.cuts) for plan in result.clusters}
        rows = {name: self._rows[name] for name in running if name in self._rows}
        replaced = tuple(name for name, row in rows.items() if (row.members, row.partition.cuts) not in kept)
        return replaced, result.reason

    def find_upgrade(self, clusters: Sequence[str]) -> Upgrade | None:
        """Return the change of one machine that would help these clusters most."""
        plan, machines = self._running(clusters), self._machines
        if plan is None:
            return None
        return upgrade_in_subprocess(
            self._task_of([machines[name] for row in plan.clusters for name in row.members]), plan
        )

    def link_seconds(self, cluster: str) -> tuple[LinkSeconds, ...]:
        """Return the expected seconds of a microbatch on each link of a cluster."""
        row = self._rows.get(cluster)
        return () if row is None else row.partition.link_seconds

    def _task(self, machines: Sequence[Machine]) -> Task:
        self._machines = self._machines | {machine.name: machine for machine in machines}
        return self._task_of(machines)

    def _task_of(self, machines: Sequence[Machine]) -> Task:
        timed = self._timed
        fleet = Fleet(machines=tuple(replace(m, speed=m.speed / self.gflops) for m in machines))
        task = timed.task(fleet, whole=self._min_stages == 1)
        return replace(task, min_stages=self._min_stages, slack=_SLACK, num_spares=self._num_spares)

    def _running(self, names: Sequence[str]) -> FleetPlan | None:
        """Return clusters in the form of the planner; None if the planner made none of them."""
        rows = tuple(self._rows[name] for name in names if name in self._rows)
        return FleetPlan(rows, (), (), sum(row.samples_per_s for row in rows), "") if rows else None

    def _repaired_cluster(self, plan: ClusterPlan, failed_clusters: Sequence[str]) -> str:
        """Return the failed cluster that had most of these machines; empty if no cluster had any."""
        shared = {
            name: len(set(self._rows[name].members) & set(plan.members))
            for name in failed_clusters
            if name in self._rows
        }
        best = max(shared, key=shared.__getitem__, default="")
        return best if best and shared[best] else ""

    def _cluster(self, name: str, generation: int, plan: ClusterPlan, failed_clusters: Sequence[str]) -> ClusterSpec:
        depths = tuple(plan.partition.depths)
        schedules = stage_schedules(
            depths, self._timed.accumulate, synchronous=self._synchronous, max_staleness=self._timed.max_staleness
        )
        self.plans[name] = self._expected(plan, tuple(schedules))
        self._rows[name] = plan
        return ClusterSpec(
            id=name, generation=generation, members=plan.members, cuts=tuple(plan.partition.cuts),
            accumulate=self._timed.accumulate, depths=depths, samples_per_s=plan.samples_per_s, reason=plan.reason,
            repairs=self._repaired_cluster(plan, failed_clusters), stage_seconds=tuple(plan.partition.stage_seconds),
        )  # fmt: skip

    def _expected(self, plan: ClusterPlan, schedules: tuple[StageSchedule, ...]) -> PipelinePlan:
        partition, timed = plan.partition, self._timed
        costs = measure_costs(self._program, timed.microbatch)
        bounds = [0, *partition.cuts, len(self._program.ops)]
        stages = tuple(
            StagePlan(
                node=plan.members[i], first_op=first, num_ops=end - first,
                parameter_bytes=costs.parameter_bytes(first, end), memory_bytes=partition.memory[i].total,
                memory=asdict(partition.memory[i]),
                seconds=partition.stage_seconds[i],
                sends_bytes=timed.chain.forward_bytes[end] if end < bounds[-1] else 0,
                depth=rule.depth, delay=rule.delay,
            )
            for i, ((first, end), rule) in enumerate(zip(pairwise(bounds), schedules, strict=True))
        )  # fmt: skip
        return PipelinePlan(
            tuple(split(self._program, partition.cuts)), stages, schedules, tuple(partition.cuts), timed.accumulate,
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
