"""Feeds the dashboard of a run: plans and events from the coordinator's loop, metrics from the thread of the run."""

from __future__ import annotations

import contextlib
from typing import Any

from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.events import Event, PlanCreated
from ravnest.dashboard.contributions import NodeContribution
from ravnest.dashboard.history import read_lines
from ravnest.dashboard.live import Dashboard
from ravnest.protocol.control import NodeWork
from ravnest.run.cluster_builder import ClusterBuilder
from ravnest.run.coordinator_thread import CoordinatorThread
from ravnest.run.metrics import ProgressView
from ravnest.run.traced_job import TracedJob

__all__ = ["DashboardFeed"]


class DashboardFeed:
    """The dashboard of one run."""

    def __init__(self, job: TracedJob, builder: ClusterBuilder) -> None:
        self._folder, self._builder = job.folder, builder
        self.dashboard = Dashboard(
            job.folder, port=job.config.dashboard_port, is_resumed=job.config.resume is not None
        )  # fmt: skip

    _thread: CoordinatorThread

    def handle_event(self, event: Event) -> None:
        """Record an event. Called in the coordinator's loop."""
        if isinstance(event, PlanCreated):
            for spec in event.clusters:
                shares = self._builder.work_shares(spec.cuts)
                content = self._builder.plans[spec.id].content()
                self.dashboard.history.add_plan(spec.id, spec.members, shares, content)
        self.dashboard.record(event)

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
