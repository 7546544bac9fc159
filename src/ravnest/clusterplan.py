"""From a fleet's plan to clusters that can begin: their stages as files, and what to expect of them.

The requester's own thread of work: it holds the traced program, which never leaves this machine whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import msgspec

from .checkpoints import Checkpoint
from .coordinator.events import Cluster, Idle
from .coordinator.planning import form_apart
from .coordinator.requester import Planned, RingShape, StageFiles
from .core.control import NodeProfile
from .core.schedule import Rule, rules
from .fleetplan import TimedJob
from .graph import Program, Stage, dump, measure_costs, split
from .graph.program import DTYPES, State, refs
from .localplan import LocalPlan, StagePlan
from .modelfile import write_first_weights
from .node.orders import Assign
from .plan.fleet import ClusterPlan, Fleet, FleetPlan, Machine, Task
from .plan.ring_order import order_ring
from .plan.segments import find_segments
from .runtime.roles import roles
from .runtime.settings import Settings
from .runtime.state import kind_and_name, owned
from .runtime.statefile import select

__all__ = ["ClusterMaker"]

_SLACK = 3  # microbatches in flight beyond what the plan needs: on real lines one waits behind another
_HEADER_BYTES = 1 << 20  # of a weights file, beside its tensors


class ClusterMaker:
    """Plans clusters for machines, and makes their stages. Called in one thread at a time."""

    def __init__(
        self,
        program: Program,
        timed: TimedJob,
        settings: Settings,
        folder: Path,
        *,
        synchronous: bool,
        min_stages: int,
        num_spares: int = 0,
    ) -> None:
        self._program, self._timed, self._settings, self._folder = program, timed, settings, folder
        self._synchronous, self._min_stages, self._num_spares = synchronous, min_stages, num_spares
        self.plans: dict[str, LocalPlan] = {}  # by cluster
        self.checkpoint: Checkpoint | None = None  # what stages begin from that nobody has a copy of
        self._rows: dict[str, ClusterPlan] = {}
        self._machines: dict[str, Machine] = {}

    def plan(self, machines: Sequence[Machine], generation: int, broken: Sequence[str] = ()) -> Planned:
        """The best clusters of these machines, whose speeds are in GFLOP/s; broken ones are mended if that is best."""
        found = form_apart(self._task(machines), self._running(broken))
        clusters = tuple(
            self._cluster(
                f"c{generation}{_letter(i)}" if len(found.clusters) > 1 else f"c{generation}", generation, plan, broken
            )
            for i, plan in enumerate(found.clusters)
        )
        idle = [tuple(Idle(one.name, one.reason) for one in group) for group in (found.spares, found.left_out)]
        return Planned(clusters, idle[0], idle[1], found.reason)

    def better(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Which running clusters stand in the way of a plan that is worth enough more, and which plan that is."""
        found = form_apart(self._task(machines), self._running(running))
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

    def _cluster(self, name: str, generation: int, plan: ClusterPlan, broken: Sequence[str]) -> Cluster:
        depths = tuple(plan.partition.depths)
        chosen = rules(
            depths, self._timed.accumulate, synchronous=self._synchronous, max_staleness=self._timed.max_staleness
        )
        self.plans[name] = self._expected(plan, tuple(chosen))
        self._rows[name] = plan
        return Cluster(
            id=name, generation=generation, members=plan.members, cuts=tuple(plan.partition.cuts),
            accumulate=self._timed.accumulate, depths=depths, samples_per_s=plan.samples_per_s, reason=plan.reason,
            mends=self._mended(plan, broken), seconds=tuple(plan.partition.stage_seconds),
        )  # fmt: skip

    def _expected(self, plan: ClusterPlan, chosen: tuple[Rule, ...]) -> LocalPlan:
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
        return LocalPlan(
            tuple(split(self._program, found.cuts)), stages, chosen, tuple(found.cuts), timed.accumulate,
            timed.microbatch, plan.samples_per_s, plan.reason,
        )  # fmt: skip

    def rings(self, clusters: Sequence[Cluster]) -> list[RingShape]:
        """A ring for every segment that has something to average, of its owners in all clusters."""
        shapes: list[RingShape] = []
        segments = find_segments(self._timed.chain, [cluster.cuts for cluster in clusters])
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

    def _averaged(self) -> Iterator[tuple[int, State]]:
        """What training changes, each with the op that reads it first: its owner is the stage of that op."""
        first: dict[str, int] = {}
        for i, op in enumerate(self._program.ops):
            for name in refs(op):
                first.setdefault(name, i)
        for state in self._program.state:
            if state.name in first and (state.trainable or state.mutated):
                yield first[state.name], state

    def stages(
        self, cluster: Cluster, profiles: Sequence[NodeProfile], lacking: Sequence[int] = ()
    ) -> list[StageFiles]:
        """The files of a cluster's stages, root first."""
        plan = self.plans[cluster.id]
        given = roles(plan.stages, [rule.delay for rule in plan.rules])
        return [
            StageFiles(
                file=dump(stage),
                brief=msgspec.msgpack.encode(
                    Assign(
                        settings=self._settings, rule=rule, role=role, max_batch=self._timed.microbatch,
                        threads=profile.threads,
                    )
                ),
                weights=self._first_weights(cluster, stage) if stage.index in lacking else None,
                states=self._states(cluster, stage) if stage.index in lacking else (),
                max_bytes=_owned_bytes(stage) + _HEADER_BYTES,
            )
            for stage, rule, role, profile in zip(plan.stages, plan.rules, given, profiles, strict=True)
        ]  # fmt: skip

    def _states(self, cluster: Cluster, stage: Stage) -> tuple[Path, ...]:
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

    def _first_weights(self, cluster: Cluster, stage: Stage) -> Path | None:
        path = self._folder / f".first-{cluster.id}-{stage.index}.safetensors"
        return path if write_first_weights(self._program, stage, path) else None


def _owned_bytes(stage: Stage) -> int:
    return sum(prod(s.shape) * DTYPES[s.dtype].itemsize for s in stage.state)


def _letter(i: int) -> str:
    """0 -> a, 25 -> z, 26 -> ba, ..."""
    return (_letter(i // 26) if i >= 26 else "") + "abcdefghijklmnopqrstuvwxyz"[i % 26]
