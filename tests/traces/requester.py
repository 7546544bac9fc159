"""Somebody who wants a model of a dozen ops trained: plans by chance, and counts what is trained."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from ravnest.coordinator.events import Cluster, Idle
from ravnest.coordinator.requester import Piece, Planned, RingShape, StageFiles
from ravnest.core.control import NodeProfile
from ravnest.core.orders import Reports
from ravnest.core.schedule import rules
from ravnest.plan.fleet import Machine
from ravnest.plan.problem import PlanError

_OPS = 12


class Wanted:
    """A `Requester`: `steps` batches, clusters of at least `min_stages`."""

    def __init__(self, rng: random.Random, *, steps: int, min_stages: int) -> None:
        self._rng, self.steps, self._min_stages = rng, steps, min_stages
        self._accumulate = rng.choice((1, 2, 4))
        self._members: dict[str, tuple[str, ...]] = {}
        self.trained: set[int] = set()

    def plan(self, machines: Sequence[Machine], generation: int, broken: Sequence[str] = ()) -> Planned:
        names = [machine.name for machine in machines]
        self._rng.shuffle(names)
        if len(names) < self._min_stages:
            raise PlanError("there are too few nodes")
        spares = names[: self._rng.randint(0, min(1, len(names) - self._min_stages))]
        rest, clusters = names[len(spares) :], list[Cluster]()
        while len(rest) >= self._min_stages:
            size = self._rng.randint(self._min_stages, min(len(rest), 4))
            clusters.append(self._cluster(f"c{generation}x{len(clusters)}", generation, tuple(rest[:size]), broken))
            rest = rest[size:]
        idle = tuple(Idle(name, "it is a spare") for name in (*spares, *rest))
        return Planned(tuple(clusters), idle, (), "chance")

    def _cluster(self, name: str, generation: int, members: tuple[str, ...], broken: Sequence[str]) -> Cluster:
        shared = {c: len(set(self._members.get(c, ())) & set(members)) for c in broken}
        mends = max(shared, key=shared.__getitem__, default="")
        self._members[name] = members
        cuts = tuple(sorted(self._rng.sample(range(1, _OPS), len(members) - 1)))
        return Cluster(
            id=name, generation=generation, members=members, cuts=cuts, accumulate=self._accumulate,
            depths=tuple(range(len(members) + self._rng.randint(0, 2), 0, -1))[: len(members)], samples_per_s=10.0,
            reason="chance", mends=mends if shared.get(mends) else "",
        )  # fmt: skip

    def better(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Now and then something is."""
        ends = tuple(running[:1]) if self._rng.random() < 0.3 else ()
        return ends, "chance"

    def stages(
        self, cluster: Cluster, profiles: Sequence[NodeProfile], lacking: Sequence[int] = ()
    ) -> list[StageFiles]:
        return [
            StageFiles(file=f"{cluster.id} {i}".encode(), brief=msgspec.msgpack.encode(rule))
            for i, rule in enumerate(rules(cluster.depths, cluster.accumulate))
        ]

    def rings(self, clusters: Sequence[Cluster]) -> list[RingShape]:
        bounds = sorted({0, _OPS, *(cut for cluster in clusters for cut in cluster.cuts)})
        return [
            RingShape(tuple(c.members[bisect_right(c.cuts, low)] for c in clusters), (f"w{low}",))
            for low, _ in pairwise(bounds)
        ]

    def available(self) -> int:
        return self.steps

    def pieces(self, batch: int, count: int) -> list[Piece]:
        return [Piece(2, 1 / count)] * count

    def fed(self, cluster: str, window: int, batch: int, pieces: Sequence[Piece]) -> None:
        assert batch < self.steps

    def settled(self, batch: int) -> None:
        self.trained.add(batch)

    def reported(self, cluster: str, stage: int, report: Reports) -> None:
        """Nobody shows it."""

    def ended(self, cluster: str, reason: str, *, is_lost: bool) -> None:
        """Nobody shows it."""

    def learnt(self) -> int:
        return 0

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        return None

    def weights_path(self, cluster: str, stage: int) -> Path:
        raise AssertionError("no weights are sent here")
