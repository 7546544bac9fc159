"""A requester for a model of a dozen ops: plans are random, and trained batches are counted."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from ravnest.coordinator.events import ClusterSpec, IdleNode
from ravnest.coordinator.requester import Microbatch, PlannedClusters, RingShape, StageFiles
from ravnest.core.schedule import stage_schedules
from ravnest.planner.fleet import Machine
from ravnest.planner.problem import PlanError
from ravnest.protocol.commands import Report
from ravnest.protocol.control import NodeProfile

_OPS = 12


class SimulatedRequester:
    """A `Requester`: `steps` batches, clusters of at least `min_stages`."""

    def __init__(self, rng: random.Random, *, steps: int, min_stages: int) -> None:
        self._rng, self.steps, self._min_stages = rng, steps, min_stages
        self._accumulate = rng.choice((1, 2, 4))
        self._members: dict[str, tuple[str, ...]] = {}
        self.trained: set[int] = set()

    def plan(
        self, machines: Sequence[Machine], generation: int, failed_clusters: Sequence[str] = ()
    ) -> PlannedClusters:
        names = [machine.name for machine in machines]
        self._rng.shuffle(names)
        if len(names) < self._min_stages:
            raise PlanError("too few nodes")
        spares = names[: self._rng.randint(0, min(1, len(names) - self._min_stages))]
        rest, clusters = names[len(spares) :], list[ClusterSpec]()
        while len(rest) >= self._min_stages:
            size = self._rng.randint(self._min_stages, min(len(rest), 4))
            clusters.append(
                self._cluster(f"c{generation}x{len(clusters)}", generation, tuple(rest[:size]), failed_clusters)
            )
            rest = rest[size:]
        idle = tuple(IdleNode(name, "it is a spare") for name in (*spares, *rest))
        return PlannedClusters(tuple(clusters), idle, (), "chance")

    def _cluster(self, name: str, generation: int, members: tuple[str, ...], failed: Sequence[str]) -> ClusterSpec:
        shared = {c: len(set(self._members.get(c, ())) & set(members)) for c in failed}
        repairs = max(shared, key=shared.__getitem__, default="")
        self._members[name] = members
        cuts = tuple(sorted(self._rng.sample(range(1, _OPS), len(members) - 1)))
        return ClusterSpec(
            id=name, generation=generation, members=members, cuts=cuts, accumulate=self._accumulate,
            depths=tuple(range(len(members) + self._rng.randint(0, 2), 0, -1))[: len(members)], samples_per_s=10.0,
            reason="chance", repairs=repairs if shared.get(repairs) else "",
        )  # fmt: skip

    def find_better_plan(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Sometimes there is one."""
        ends = tuple(running[:1]) if self._rng.random() < 0.3 else ()
        return ends, "chance"

    def stages(
        self,
        cluster: ClusterSpec,
        profiles: Sequence[NodeProfile],
        missing_stages: Sequence[int] = (),
        missing_frozen: Sequence[int] = (),
    ) -> list[StageFiles]:
        return [
            StageFiles(file=f"{cluster.id} {i}".encode(), config=msgspec.msgpack.encode(rule))
            for i, rule in enumerate(stage_schedules(cluster.depths, cluster.accumulate))
        ]

    def rings(self, clusters: Sequence[ClusterSpec]) -> list[RingShape]:
        bounds = sorted({0, _OPS, *(cut for cluster in clusters for cut in cluster.cuts)})
        return [
            RingShape(tuple(c.members[bisect_right(c.cuts, low)] for c in clusters), (f"w{low}",))
            for low, _ in pairwise(bounds)
        ]

    def available(self) -> int:
        return self.steps

    def microbatches(self, batch: int, count: int) -> list[Microbatch]:
        return [Microbatch(2, 1 / count)] * count

    def prompt(self, tokens: Sequence[int]) -> tuple[Microbatch, int]:
        return Microbatch(1, 0.0), len(tokens) - 1

    def batch_started(self, cluster: str, step: int, batch: int, microbatches: Sequence[Microbatch]) -> None:
        assert batch < self.steps

    def batch_settled(self, batch: int) -> None:
        self.trained.add(batch)

    def stage_reported(self, cluster: str, stage: int, report: Report) -> None:
        """Not used."""

    def cluster_ended(self, cluster: str, reason: str, *, is_lost: bool) -> None:
        """Not used."""

    def checkpoint_updates(self) -> int:
        return 0

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        return None

    def weights_path(self, cluster: str, stage: int) -> Path:
        raise AssertionError("no weights are sent here")
