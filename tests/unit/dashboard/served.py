"""A coordinator with a dashboard and recorded events instead of nodes, and a client of its pages."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ravnest.coordinator import events as on
from ravnest.coordinator.events import ClusterSpec
from ravnest.coordinator.service import CoordinatorConfig, CoordinatorServer
from ravnest.dashboard.live import Dashboard
from ravnest.protocol.control import NodeProfile
from ravnest.protocol.peer import PeerAddresses
from tests.unit.coordinator.attacks import FakeRequester

PROFILE = NodeProfile(memory_bytes=4 * 10**9, gflops=10.0)


@dataclass
class Served:
    service: CoordinatorServer
    dashboard: Dashboard
    client: aiohttp.ClientSession

    @property
    def origin(self) -> str:
        return self.dashboard.link.partition("/#")[0]

    @property
    def token(self) -> str:
        return self.dashboard.link.partition("#token=")[2]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    async def viewer_headers(self) -> dict[str, str]:
        link = (await self.get("/v1/access"))[1]["viewer_link"]
        return {"Authorization": f"Bearer {link.partition('#token=')[2]}"}

    def connect(self, *names: str) -> None:
        """Record that nodes have connected."""
        for name in names:
            self.record(on.NodeConnected(self.now_s, name, PROFILE, PeerAddresses(()), "192.0.2.9", 0))

    def plan(self, cluster: str, *members: str) -> None:
        """Record the plan of a cluster, and that it trains."""
        spec = ClusterSpec(
            id=cluster, generation=1, members=members, cuts=tuple(range(1, len(members))), accumulate=2,
            depths=(1,) * len(members), samples_per_s=10.0, reason="next to each other",
        )  # fmt: skip
        self.dashboard.history.add_plan(cluster, members, [1.0] * len(members), {"stages": []})
        self.record(on.PlanCreated(self.now_s, 1, (spec,), (), (), "", 0.1))
        for name in members:
            self.record(on.NodeReady(self.now_s, cluster, name))

    def record(self, event: on.Event) -> None:
        self.service.coordinator.record(event)

    @property
    def now_s(self) -> float:
        return self.service.coordinator.now_s()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        headers = options.pop("headers", self.headers)
        async with self.client.get(self.origin + path, headers=headers, **options) as answer:
            body = await answer.read()
            return answer.status, json.loads(body) if answer.content_type == "application/json" else body.decode()


@contextlib.asynccontextmanager
async def served(
    directory: Path, *, dashboard_port: int | None = None, interval_s: float = 0.05, **changes: Any
) -> AsyncIterator[Served]:
    """Open a coordinator for local nodes, or with `changes` of its configuration, and its dashboard."""
    run = directory / "run"
    run.mkdir(exist_ok=True)
    dashboard = Dashboard(run, port=dashboard_port, interval_s=interval_s)
    with tempfile.TemporaryDirectory(prefix="ravnest-") as sockets:
        given = {"port": None, "sockets": Path(sockets), **changes}
        service = CoordinatorServer(
            CoordinatorConfig(directory=directory / "coordinator", **given), FakeRequester(directory), run="test",
            on_event=dashboard.record, extend=dashboard.attach,
        )  # fmt: skip
        await service.open()
        async with aiohttp.ClientSession() as client:
            try:
                yield Served(service, dashboard, client)
            finally:
                await service.close("the test is over", is_over=False)  # no wait for nodes that are away


class Messages:
    """The messages of a stream, decoded."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def next(self) -> Any:
        while True:
            line = await self._answer.content.readuntil(b"\n")
            if line.startswith(b"data: "):
                return json.loads(line[6:])
