"""A coordinator to attack, with honest nodes that train, and connections of attackers.

All run in one asyncio loop, over real sockets. `FakeRequester` plans clusters of `size` nodes by name, and provides as
many batches as a test sets, so that settled ones can be counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ravnest.coordinator.clusters import ActiveCluster
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.events import ClusterSpec, IdleNode
from ravnest.coordinator.http.alpn_server import AlpnServerConfig
from ravnest.coordinator.http.limits import HttpTimeouts
from ravnest.coordinator.policy.membership import MembershipPolicy
from ravnest.coordinator.requester import Microbatch, PlannedClusters, RingShape, StageFiles
from ravnest.coordinator.service import CoordinatorConfig, CoordinatorServer
from ravnest.errors import PlanError
from ravnest.planner.fleet import Machine
from ravnest.protocol.commands import Report
from ravnest.protocol.control import NodeProfile
from ravnest.transport.address import Address
from ravnest.transport.identity import Identity, make_authority, make_key, make_request, save_identity
from tests.unit.coordinator.clients import TIMEOUT_S, FakeNode, enrolled

QUICK_POLICY = MembershipPolicy(settle_s=0.05, heartbeat_s=1.0, forming_timeout_s=5.0, quarantine_s=60.0)
TIMEOUTS = HttpTimeouts(goodbye_s=0.4, reconnect_s=0.05, rejection_log_s=0.05)
SHORT_TIMEOUTS = HttpTimeouts(
    request_s=1.0, hello_s=1.0, body_s=1.0, send_s=1.0, goodbye_s=0.4, reconnect_s=0.05, rejection_log_s=0.05
)  # to see it end
SHORT_ALPN = AlpnServerConfig(handshake_s=1.0, first_byte_s=1.0)


class FakeRequester:
    """A requester without a model: stage files are noise, batches a few bytes."""

    def __init__(self, directory: Path, size: int = 2) -> None:
        self.directory, self.size = directory, size
        self.given = 0
        self.done: list[int] = []
        self.reports: list[tuple[str, int, Report]] = []
        self.file = b"a stage"
        self.max_bytes = 1000

    def plan(
        self, machines: Sequence[Machine], generation: int, failed_clusters: Sequence[str] = ()
    ) -> PlannedClusters:
        names = [machine.name for machine in machines]
        if len(names) < self.size:
            raise PlanError(f"{len(names)} nodes are fewer than {self.size}")
        whole = len(names) // self.size * self.size
        groups = [tuple(names[start : start + self.size]) for start in range(0, whole, self.size)]
        clusters = tuple(
            ClusterSpec(
                id=f"c{generation}-{i}", generation=generation, members=members, cuts=(1,) * (self.size - 1),
                accumulate=2, depths=(2,) * self.size, samples_per_s=10.0, reason="they are next to each other by name",
            )
            for i, members in enumerate(groups)
        )  # fmt: skip
        return PlannedClusters(clusters, spares=tuple(IdleNode(name, "one too many") for name in names[whole:]))

    def find_better_plan(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        return (), "nothing is better"

    def stages(
        self,
        cluster: ClusterSpec,
        profiles: Sequence[NodeProfile],
        missing_stages: Sequence[int] = (),
        missing_frozen: Sequence[int] = (),
    ) -> list[StageFiles]:
        return [StageFiles(self.file, b"a config", max_bytes=self.max_bytes) for _ in cluster.members]

    def rings(self, clusters: Sequence[ClusterSpec]) -> list[RingShape]:
        return []

    def available(self) -> int:
        return self.given

    def microbatches(self, batch: int, count: int) -> list[Microbatch]:
        return [Microbatch(1, 1 / count, [bytes(8)]) for _ in range(count)]

    def prompt(self, tokens: Sequence[int]) -> tuple[Microbatch, int]:
        return Microbatch(1, 0.0, [bytes(8)]), len(tokens) - 1

    def batch_started(self, cluster: str, step: int, batch: int, microbatches: Sequence[Microbatch]) -> None:
        """Nothing to remember."""

    def batch_settled(self, batch: int) -> None:
        self.done.append(batch)

    def stage_reported(self, cluster: str, stage: int, report: Report) -> None:
        self.reports.append((cluster, stage, report))

    def cluster_ended(self, cluster: str, reason: str, *, is_lost: bool) -> None:
        """Nothing to forget."""

    def checkpoint_updates(self) -> int:
        return 0

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        return None

    def weights_path(self, cluster: str, stage: int) -> Path:
        return self.directory / f"{cluster}-{stage}"


class RunningCoordinator:
    """A listening coordinator, with helpers to observe it."""

    def __init__(self, config: CoordinatorConfig, requester: FakeRequester, directory: Path) -> None:
        self.requester, self.directory = requester, directory
        self.nodes_by_name: dict[str, FakeNode] = {}
        self._happened = asyncio.Event()
        self.service = CoordinatorServer(
            config, requester, run="test", release="test", on_event=lambda event: self._happened.set()
        )

    @property
    def address(self) -> Address:
        return "127.0.0.1", self.service.port

    @property
    def coordinator(self) -> Coordinator:
        return self.service.coordinator

    @property
    def ticket(self) -> str:
        return self.service.ticket()

    @property
    def log(self) -> list[str]:
        """The descriptions of recent events."""
        return [text for _, text in self.coordinator.state.recent_events]

    @property
    def settled(self) -> int:
        return self.coordinator.state.leases.counts.settled

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for a condition, with a timeout."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not holds():
                    self._happened.clear()
                    with contextlib.suppress(TimeoutError):  # not every condition changes with an event
                        async with asyncio.timeout(0.02):
                            await self._happened.wait()
        except TimeoutError:
            raise AssertionError("\n".join([f"timed out waiting for: {what}", *self.log])) from None

    async def wait_for_log(self, *parts: str) -> None:
        """Wait until one description contains all of these."""
        await self.until(
            lambda: any(all(part in text for part in parts) for text in self.log), f"a log line with {parts}"
        )

    async def train(self, batches: int = 5) -> None:
        """Provide more batches, and wait until each is settled once."""
        self.requester.given += batches
        self.coordinator.running.offer_batches()
        await self.until(lambda: self.settled == self.requester.given, f"{self.requester.given} batches are settled")
        assert sorted(self.requester.done) == list(range(self.requester.given))
        assert self.coordinator.state.leases.counts.is_balanced

    async def enroll(self, name: str) -> Identity:
        return await enrolled(self.ticket, name, self.directory / "nodes")

    async def phase(self, cluster: str, phase: str) -> None:
        """Wait until the cluster is in this phase."""
        clusters = self.coordinator.state.clusters
        await self.until(lambda: cluster in clusters and clusters[cluster].phase == phase, f"{cluster} is {phase}")

    def cluster_of(self, name: str) -> ActiveCluster:
        server = self.coordinator.running.cluster_of(name)
        assert server is not None, f"{name} is in no cluster"
        return server

    async def node(self, name: str, **given: Any) -> FakeNode:
        """A node that connects when it is entered."""
        return FakeNode(await self.enroll(name), self.address, **given)


@contextlib.asynccontextmanager
async def running_coordinator(directory: Path, *, size: int = 2, **changes: Any) -> AsyncIterator[RunningCoordinator]:
    """A coordinator with short timeouts; `changes` are fields of its `CoordinatorConfig`."""
    given = {"membership": QUICK_POLICY, "timeouts": TIMEOUTS, **changes}
    config = CoordinatorConfig(directory=directory / "coordinator", host="127.0.0.1", port=0, **given)
    server = RunningCoordinator(config, FakeRequester(directory, size), directory)
    await server.service.open()
    try:
        yield server
    finally:
        await server.service.close("the test is over")


@contextlib.asynccontextmanager
async def coordinator_with_nodes(
    directory: Path, names: Sequence[str] = ("ann", "bob"), **changes: Any
) -> AsyncIterator[RunningCoordinator]:
    """The same with honest nodes; checks that they train before and after the body."""
    async with running_coordinator(directory, **changes) as server, contextlib.AsyncExitStack() as stack:
        for name in names:
            server.nodes_by_name[name] = await stack.enter_async_context(await server.node(name))
        await server.train()
        yield server
        await server.train()


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test; errors reported to the loop fail it."""
    loop_errors: list[str] = []

    async def checked() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: loop_errors.append(str(context)))
        await test

    asyncio.run(checked())
    assert not loop_errors


def foreign_identity(directory: Path, name: str = "ann", trusts: bytes | None = None) -> Identity:
    """A certificate of another authority with a member's name; `trusts` is the authority it accepts."""
    authority = make_authority("another authority", now=datetime.now(UTC), valid=timedelta(days=30))
    key = make_key()
    certificate = authority.sign(make_request(key, name), name, now=datetime.now(UTC), valid=timedelta(days=30))
    return save_identity(directory, key, certificate, trusts or authority.certificate_pem)


def anonymous_context(protocol: str = "http/1.1") -> ssl.SSLContext:
    """TLS without a certificate and without verification."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    return context


class RawConnection:
    """A connection on which any bytes can be sent."""

    def __init__(self, address: Address, context: ssl.SSLContext | None = None) -> None:
        self._address, self._context = address, context

    async def __aenter__(self) -> RawConnection:
        self.reader, self.writer = await asyncio.open_connection(*self._address, ssl=self._context)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def rest(self) -> bytes:
        """Read until the peer closes the connection, which it must."""
        data_so_far = bytearray()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while data := await self.reader.read(1 << 16):
                    data_so_far += data
        except TimeoutError:
            raise AssertionError(f"the connection was not closed, received: {data_so_far!r}") from None
        except OSError:  # one way to close it
            pass
        return bytes(data_so_far)
