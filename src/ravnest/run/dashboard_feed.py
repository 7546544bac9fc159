"""Feeds the dashboard of a run: plans and events from the coordinator's loop, metrics from the thread of the run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.events import ClusterEnded, Event, PlanCreated
from ravnest.dashboard.contributions import NodeContribution
from ravnest.dashboard.history import read_lines
from ravnest.dashboard.live import Dashboard
from ravnest.errors import RavnestError
from ravnest.protocol.control import NodeWork
from ravnest.run.cluster_builder import ClusterBuilder
from ravnest.run.coordinator_thread import CoordinatorThread
from ravnest.run.metrics import ProgressView
from ravnest.run.plan_preview import simulate_plan
from ravnest.run.traced_job import TracedJob

__all__ = ["DashboardFeed"]

_MAX_SIMULATED = 8  # clusters


class DashboardFeed:
    """The dashboard of one run."""

    def __init__(self, job: TracedJob, builder: ClusterBuilder) -> None:
        self._folder, self._builder = job.folder, builder
        self.dashboard = Dashboard(
            job.folder, port=job.config.dashboard_port, is_resumed=job.config.resume is not None
        )  # fmt: skip
        self._clusters: dict[str, None] = {}  # that live, in the order of their plans
        self._studying = threading.Lock()  # held while a plan is studied

    _thread: CoordinatorThread

    def handle_event(self, event: Event) -> None:
        """Record an event. Called in the coordinator's loop."""
        if isinstance(event, PlanCreated):
            for spec in event.clusters:
                shares = self._builder.work_shares(spec.cuts)
                content = self._builder.plans[spec.id].content()
                self.dashboard.history.add_plan(spec.id, spec.members, shares, content)
                self._clusters[spec.id] = None
        elif isinstance(event, ClusterEnded):
            self._clusters.pop(event.cluster, None)
        self.dashboard.record(event)
        if isinstance(event, PlanCreated) and event.clusters:
            new = [spec.id for spec in event.clusters[:_MAX_SIMULATED]]
            work = (new, list(self._clusters), asyncio.get_running_loop())
            threading.Thread(target=self._study, args=work, name="study plan", daemon=True).start()

    def _study(self, new: list[str], live: list[str], loop: asyncio.AbstractEventLoop) -> None:
        """Simulate new clusters, and search the upgrade that would help most; in a thread of its own."""
        history = self.dashboard.history

        def record(work: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(work)

        def add_upgrade(found: dict[str, Any]) -> None:
            if set(live) == set(self._clusters):
                history.upgrade = found

        with self._studying:
            for name in new:
                simulation = simulate_plan(self._builder.plans[name], self._builder.link_seconds(name))
                if simulation is not None:
                    record(lambda name=name, simulation=simulation: history.add_simulation(name, simulation))  # type: ignore[misc]
            with contextlib.suppress(RavnestError):  # advice is not worth more
                upgrade = self._builder.find_upgrade(live)
                if upgrade is not None:
                    record(lambda: add_upgrade(msgspec.to_builtins(upgrade)))

    def contribution_of(self, name: str) -> NodeWork | None:
        """Return what a node has contributed to the run. Called in the coordinator's loop."""
        found = self.dashboard.contribution_of(name)
        if found is None:
            return None
        return NodeWork(
            batches=found.batches, samples=found.samples, seconds=found.seconds, sent_bytes=found.sent_bytes,
            received_bytes=found.received_bytes,
        )  # fmt: skip

    def begin(self, thread: CoordinatorThread, view: ProgressView) -> None:
        """Show the link; the curves of a resumed run begin with the lines that its `metrics.jsonl` keeps."""
        self._thread = thread
        for line in read_lines(self._folder / "metrics.jsonl"):
            self.add_line(line)
        if self.dashboard.link:
            view.dashboard(self.dashboard.link)
        elif self.dashboard.problem:
            view.message(self.dashboard.problem)

    def contributions(self, coordinator: Coordinator) -> dict[str, NodeContribution]:
        """Return what each node has contributed to the whole run. Called in the coordinator's loop."""
        return self.dashboard.history.contributions.totals(coordinator.now_s())

    def add_line(self, line: dict[str, Any]) -> None:
        """Record a line of metrics, in the coordinator's loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._thread.soon(lambda _: self.dashboard.history.add_line(line))
