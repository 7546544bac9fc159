"""The dashboard of a running run, next to its coordinator.

Events arrive in the coordinator's loop, metrics from the thread of the run; both are recorded in the loop. The pages
are served at the coordinator's port, below `/dashboard/`, and over plain HTTP to this host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ravnest.coordinator.events import Event, LeaseGranted, LeaseReturned, LeaseSettled, NodeReady
from ravnest.coordinator.http.server import role_of
from ravnest.coordinator.service import CoordinatorServer
from ravnest.dashboard.contributions import NodeContribution
from ravnest.dashboard.document import LiveDocument, contribution_values, document_values, encoded
from ravnest.dashboard.history import RunHistory, load_saved
from ravnest.dashboard.listener import LocalListener
from ravnest.dashboard.prometheus import metrics_text
from ravnest.dashboard.site import HEADERS, Access, Role, bearer, make_site, write_secret
from ravnest.dashboard.stream import Stream

__all__ = ["ACCESS_FILE", "Dashboard"]

ACCESS_FILE = "dashboard-access.json"
METRICS_TOKEN_FILE = "metrics-token"

_GIVEN_S = 3.0  # between two updates of the contributions
_SAVE_S = 20.0
_GIVEN = "given"


class Dashboard:
    """Records a run and serves its pages. Created before the coordinator; used in its loop alone.

    `port` is that of the listener of this host: None for any, 0 for no listener. Changes are pushed once per interval.
    """

    def __init__(
        self, folder: Path, *, port: int | None = None, is_resumed: bool = False, interval_s: float = 0.5
    ) -> None:
        self._folder, self._port = folder, port
        self.history = RunHistory(load_saved(folder) if is_resumed else None)
        self._document = LiveDocument(self.history)
        self.viewers = Stream(self._document, self._values, self._news, interval_s=interval_s)
        self._service: CoordinatorServer | None = None
        self._listener: LocalListener | None = None
        self._settled = 0
        self._given_s = -1e9
        self._saving: asyncio.Task[None] | None = None
        self._last_event = -1  # that viewers have
        self.problem = ""  # why there is no listener

    @property
    def link(self) -> str:
        """The requester's link; empty without a listener."""
        return self._listener.access.link() if self._listener is not None else ""

    def record(self, event: Event) -> None:
        """Record an event, after it was applied to the coordinator's state."""
        if isinstance(event, LeaseGranted | LeaseReturned):
            return
        if isinstance(event, LeaseSettled):
            self._record_settled(event)
            return
        self.history.add_event(event)
        self.viewers.wake()
        state = self._service.coordinator.state if self._service is not None else None
        if isinstance(event, NodeReady) and state is not None and state.is_training(event.cluster):
            self.history.contributions.begin(event.cluster, event.at_s)

    def _record_settled(self, event: LeaseSettled) -> None:
        """Count a batch, unless another cluster had trained it before."""
        if self._service is None:
            return
        settled = self._service.coordinator.state.leases.counts.settled
        if settled > self._settled:
            self.history.contributions.settle(event.cluster, event.samples)
        self._settled = settled

    def contribution_of(self, name: str) -> NodeContribution | None:
        """Return what a node has contributed so far."""
        if self._service is None:
            return None
        return self.history.contributions.totals(self._service.coordinator.now_s()).get(name)

    def attach(self, app: web.Application, service: CoordinatorServer) -> None:
        """Add the pages to the coordinator's app, and open the listener together with it."""
        self._service = service
        self._settled = service.coordinator.state.leases.counts.settled
        app.add_subapp("/dashboard/", make_site(self, self._admit))
        app.on_startup.append(self._open)
        app.on_shutdown.append(self._close)

    def _admit(self, request: web.Request) -> Role | None:
        assert self._service is not None
        own = self._listener.access.role_of(bearer(request)) if self._listener is not None else None
        return own or role_of(request, self._service.coordinator)

    async def _open(self, app: web.Application) -> None:
        assert self._service is not None
        self._saving = asyncio.create_task(self._keep_saving())
        if self._port == 0:
            return
        path = self._service.config.directory / ACCESS_FILE
        listener = LocalListener(self, Access.open(path))
        try:
            await listener.open(self._port)
            listener.access.save(path)
            write_secret(path.with_name(METRICS_TOKEN_FILE), listener.access.viewer.encode())
        except OSError as error:
            self.problem = f"no dashboard: cannot listen at 127.0.0.1:{self._port or 0}: {error.strerror or error}"
            return
        self._listener = listener

    async def _close(self, app: web.Application) -> None:
        await self.close()
        if self._saving is not None:
            self._saving.cancel()
        self._save()
        if self._listener is not None:
            await self._listener.close()

    async def _keep_saving(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_S)
            self._save()

    def _save(self) -> None:
        assert self._service is not None
        self._given_s = -1e9
        values, _ = self._values()
        document = {key: encoded(value) for key, value in values.items() if not key.startswith("event/")}
        self.history.save(self._folder, document, self._service.coordinator.now_s())

    def _values(self) -> tuple[Mapping[str, Any], str]:
        """Return all values; contributions of a few seconds ago are good enough."""
        assert self._service is not None
        status = self._service.status()
        values = dict(document_values(status, self.history))
        if time.monotonic() - self._given_s >= _GIVEN_S:
            self._given_s = time.monotonic()
            return {**values, **dict(contribution_values(status, self.history))}, ""
        return values, _GIVEN

    def _news(self) -> Mapping[str, Any]:
        """Return the events since the last call."""
        new = {}
        for row in reversed(self.history.events):
            if row.number <= self._last_event:
                break
            new[f"event/{row.number}"] = row
        self._last_event = self.history.events[-1].number if self.history.events else -1
        return new

    # data of the pages

    async def stream(self, request: web.Request) -> web.StreamResponse:
        return await self.viewers.serve(request, HEADERS)

    async def node(self, name: str) -> bytes:
        return msgspec.json.encode(self.history.node(name))

    async def access(self) -> bytes:
        assert self._service is not None
        status = self._service.status()
        has_addresses = self._service.config.port is not None  # unlike nodes of this process
        return msgspec.json.encode({
            "viewer_link": self._listener.access.link("viewer") if self._listener is not None else "",
            "addresses": {node.name: node.address for node in status.nodes if node.address and has_addresses},
            "rejections": status.rejections, "num_rejected": status.num_rejected,
        })  # fmt: skip

    async def metrics(self) -> bytes:
        assert self._service is not None
        return metrics_text(self._service.status(), self.history)

    async def close(self) -> None:
        self.viewers.close()
