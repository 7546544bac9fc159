"""The coordinator of `benchmarks.dashboard`: that of `benchmarks.control` with a dashboard, in a process of its own.

Its history gets a line of metrics for every step that a cluster reports, as in a real run. `feed` adds the lines and
events of a long run, faster than they would arrive.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.control.child import serve
from benchmarks.control.service import ACCUMULATE, MeasuredCoordinator, SyntheticRequester
from ravnest.coordinator.events import (
    ClusterSpec,
    Event,
    NodeConnected,
    NodeEnrolled,
    NodeReady,
    PlanCreated,
    RoundCommitted,
)
from ravnest.core.metrics import StageMetrics
from ravnest.dashboard import stream
from ravnest.dashboard.live import Dashboard
from ravnest.protocol.commands import Report, StepReport
from ravnest.protocol.control import NodeProfile
from ravnest.protocol.peer import PeerAddresses

_STAGES = 8
_STEPS_PER_S = 100.0  # of all clusters in the long run
_EVENTS_PER_S = 0.5
_FEED_S = 0.5  # of the long run between two changes on the page, as in a real one


class _ReportingRequester(SyntheticRequester):
    """Records a line of metrics whenever the last stage of a cluster has made an update."""

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__()
        self._dashboard, self._step, self._start_s = dashboard, 0, time.monotonic()
        self._stages: dict[str, dict[int, StageMetrics]] = {}

    def stage_reported(self, cluster: str, stage: int, report: Report) -> None:
        if not isinstance(report, StepReport):
            return
        stages = self._stages.setdefault(cluster, {})
        stages[stage] = report.metrics
        if stage == len(self._dashboard.history.members.get(cluster, ())) - 1:
            self._step += 1
            self._dashboard.history.add_line(
                _line(self._step, time.monotonic() - self._start_s, cluster, list(stages.values()))
            )


def _line(step: int, seconds: float, cluster: str, stages: Sequence[StageMetrics]) -> dict[str, Any]:
    return {
        "step": step, "cluster": cluster, "loss": 1 + 4 * math.exp(-step / 1e4), "seconds": seconds, "samples": 4,
        "stages": [msgspec.structs.asdict(metrics) for metrics in stages],
    }  # fmt: skip


class WatchedCoordinator(MeasuredCoordinator):
    """A coordinator with a dashboard; changes are pushed to viewers once per `interval_s`."""

    def __init__(self, directory: Path, interval_s: float) -> None:
        super().__init__(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.dashboard = Dashboard(directory, interval_s=interval_s)
        self._requester = _ReportingRequester(self.dashboard)
        self._feeding: asyncio.Task[None] | None = None
        self._fed_s = 0.0
        self._rng = random.Random(0)

    def _server_options(self) -> dict[str, Any]:
        return {"extend": self.dashboard.attach}

    def _record(self, event: Event) -> None:
        super()._record(event)
        if isinstance(event, PlanCreated):
            for spec in event.clusters:
                self._add_plan(spec)
        self.dashboard.record(event)

    def _add_plan(self, spec: ClusterSpec) -> None:
        count = len(spec.members)
        stages = [
            {"node": name, "first_op": 10 * i, "num_ops": 10, "parameter_bytes": 10**8, "memory_bytes": 10**9,
             "memory": {"weights": 10**8}, "seconds": 0.1, "sends_bytes": 10**6, "depth": count - i, "delay": 1}
            for i, name in enumerate(spec.members)
        ]  # fmt: skip
        content = {
            "cuts": spec.cuts, "accumulate": spec.accumulate, "max_microbatch": 1, "samples_per_s": spec.samples_per_s,
            "reason": spec.reason, "stages": stages,
        }  # fmt: skip
        self.dashboard.history.add_plan(spec.id, spec.members, [1 / count] * count, content)

    async def link(self) -> str:
        return self.dashboard.link

    async def mark(self, *, text: str) -> float:
        """Record a message; returns the unix time."""
        self._service.coordinator.note(text)
        return time.time()

    async def pushed(self) -> int:
        """The number of viewers."""
        return self.dashboard.viewers.num_viewers

    # a long run

    async def populate(self, *, count: int) -> None:
        """Record nodes and clusters that no agent stands for."""
        coordinator = self._service.coordinator
        now_s = coordinator.now_s()
        names = [f"node-{i:04}" for i in range(count)]
        for name in names:
            coordinator.record(NodeEnrolled(now_s, name, key="", token=""))
            profile = NodeProfile(memory_bytes=8 << 30, gflops=self._rng.uniform(10, 90))
            coordinator.record(NodeConnected(now_s, name, profile, PeerAddresses(), "", 0))
        clusters = tuple(
            ClusterSpec(
                id=f"c{i:03}", generation=1, members=tuple(names[i * _STAGES : (i + 1) * _STAGES]),
                cuts=tuple(range(10, 10 * _STAGES, 10)), accumulate=ACCUMULATE, depths=tuple(range(_STAGES, 0, -1)),
                samples_per_s=1.0, reason="next to each other",
            )
            for i in range(count // _STAGES)
        )  # fmt: skip
        coordinator.record(PlanCreated(now_s, 1, clusters, (), (), "", 0.1))
        for spec in clusters:
            for name in spec.members:
                coordinator.record(NodeReady(now_s, spec.id, name))
        self._clusters = clusters

    async def feed(self, *, seconds: float, pause_s: float) -> None:
        """Start adding the changes of a run of `seconds`, those of half a second after each pause.

        Each is pushed to viewers, however much processor time that takes: the page shall see as many as in real time.
        """
        stream._MAX_SHARE = 1.0
        self._feeding = asyncio.create_task(self._feed(seconds, pause_s))

    async def fed(self) -> float:
        """Seconds of the long run that have been added."""
        if self._feeding is not None and self._feeding.done():
            self._feeding.result()
        return self._fed_s

    async def _feed(self, seconds: float, pause_s: float) -> None:
        step, coordinator = 0, self._service.coordinator
        while self._fed_s < seconds:
            self._fed_s += _FEED_S
            for _ in range(int(_STEPS_PER_S * _FEED_S)):
                step += 1
                spec = self._clusters[step % len(self._clusters)]
                self.dashboard.history.add_line(_line(step, self._fed_s, spec.id, self._metrics(step, spec)))
            if self._rng.random() < _EVENTS_PER_S * _FEED_S:
                coordinator.record(RoundCommitted(coordinator.now_s(), step, 0, self._rng.random()))
                coordinator.note(f"checkpoint of step {step} written")
            await asyncio.sleep(pause_s)

    def _metrics(self, step: int, spec: ClusterSpec) -> list[StageMetrics]:
        updates = step // len(self._clusters)
        return [
            StageMetrics(
                stage=i, updates=updates, microbatches=updates * ACCUMULATE, busy_s=updates * self._rng.uniform(0.8, 1),
                idle_s=updates * 0.1, steady_busy_s=updates * 0.9, memory_bytes=10**9, peak_memory_bytes=10**9,
                sent_bytes=updates * 10**6, received_bytes=updates * 10**6, staleness={1: updates * ACCUMULATE},
            )
            for i in range(len(spec.members))
        ]  # fmt: skip


async def main() -> None:
    coordinator = WatchedCoordinator(Path(sys.argv[1]), float(sys.argv[2]))
    names = ("open", "facts", "end_data", "close", "link", "mark", "pushed", "populate", "feed", "fed")
    await serve({name: getattr(coordinator, name) for name in names})


if __name__ == "__main__":
    asyncio.run(main())
