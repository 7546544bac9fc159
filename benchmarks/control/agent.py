"""A simulated agent, which the coordinator cannot tell from a real one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Protocol

import msgspec

from benchmarks.control.agent_feed import FeedListener, SimulatedFeed, open_feed
from benchmarks.planner.fleets import FLOPS_PER_S
from ravnest.core.metrics import StageMetrics
from ravnest.errors import RavnestError
from ravnest.node.client import Client, member_context
from ravnest.node.membership import EnrollmentRequest, enrol
from ravnest.node.session import DisconnectedByCoordinator, Outbox, run_session
from ravnest.planner import Machine
from ravnest.protocol.commands import LinkReport, Report, StageFailed, StageReady, StepReport
from ravnest.protocol.control import (
    Assignment,
    AssignmentReleased,
    DesiredAssignment,
    FromCoordinator,
    Hello,
    NodeProfile,
    StageReport,
    Welcome,
)
from ravnest.protocol.peer import PeerAddresses
from ravnest.transport.address import Address
from ravnest.transport.identity import Identity
from ravnest.transport.ticket import Ticket

_RELEASE = "benchmark"
_WELCOME_S = 60.0


class AgentRegistry(FeedListener, Protocol):
    """All agents of this process: the members of each cluster, and failures."""

    clusters: dict[str, dict[int, Agent]]
    failures: Counter[str]
    assigned_s: float

    def seconds_of(self, cluster: str) -> float: ...


class Agent:
    """One simulated PC."""

    def __init__(self, registry: AgentRegistry, machine: Machine, directory: Path) -> None:
        self.name, self.assignment, self.feed = machine.name, None, None
        self._registry, self._directory = registry, directory / machine.name
        self._profile = _profile_of(machine)
        self._outbox = Outbox()
        self._welcomed = asyncio.Event()
        self._session: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._updates = 0

    assignment: Assignment | None
    feed: SimulatedFeed | None
    identity: Identity

    async def enrol(self, ticket: Ticket) -> None:
        who = EnrollmentRequest(ticket=ticket, name=self.name, release=_RELEASE, directory=self._directory)
        self.identity = await enrol(who, ticket.addresses[0])
        self._context = member_context(self.identity)

    async def connect(self, address: Address) -> None:
        """Open a session; returns when it is welcomed."""
        self._welcomed.clear()
        self._session = asyncio.create_task(self._run_session(address))
        await asyncio.wait_for(self._welcomed.wait(), _WELCOME_S)

    async def disconnect(self) -> None:
        """Abort all connections without notice."""
        self._release()
        if self._session is not None:
            self._session.cancel()
            await asyncio.gather(self._session, return_exceptions=True)

    def report(self, report: Report) -> None:
        if self.assignment is not None:
            self._outbox.put(StageReport(self.assignment.generation, report))

    def updated(self) -> None:
        """Report that a step is done."""
        assert self.assignment is not None
        self._updates += 1
        self.report(StepReport(StageMetrics(stage=self.assignment.stage, updates=self._updates)))

    def lose_neighbours(self) -> None:
        """Let the others of the cluster report that this agent is gone."""
        members = self._registry.clusters.get(self.assignment.cluster, {}) if self.assignment is not None else {}
        for other in list(members.values()):
            if other is not self:
                other.report(StageFailed(f"the link to {self.name} was lost", is_consequence=True))
                other._release()

    async def _run_session(self, address: Address) -> None:
        hello = Hello(release=_RELEASE, profile=self._profile, addresses=PeerAddresses())
        try:
            async with Client(address, self._context) as self._client:
                await run_session(self._client, hello, self._outbox, self._handle, lambda: "training")
        except DisconnectedByCoordinator:
            self._release()
        except RavnestError as error:
            self._release()
            self._registry.failures[str(error)] += 1

    def _handle(self, message: FromCoordinator) -> None:
        match message:
            case Welcome():
                self._welcomed.set()
            case DesiredAssignment(assignment=None):
                self._release()
            case DesiredAssignment(assignment=part) if part is not None:
                self._release()
                self.assignment, self._updates = part, part.first_update
                self._registry.assigned_s = time.monotonic()
                self._starting = asyncio.create_task(self._start(part))

    async def _start(self, part: Assignment) -> None:
        """Fetch the files, open the feed, and report the links and that the stage is ready."""
        try:
            await self._client.ask("GET", f"/v1/blobs/{part.file.digest}")
            config = await self._client.ask("GET", f"/v1/blobs/{part.config.digest}")
            self._registry.clusters.setdefault(part.cluster, {})[part.stage] = self
            if part.before is None:
                accumulate = int(msgspec.json.decode(config)["accumulate"])
                self.feed = SimulatedFeed(part, accumulate, self._registry.seconds_of(part.cluster), self._registry)
                await open_feed(self.feed, self._client.address, self.identity)
        except (RavnestError, OSError) as error:
            self._registry.failures[f"an assignment failed: {error}"] += 1
            self.report(StageFailed(str(error)))
            return
        for peer in (part.before, part.after):
            if peer is not None:
                self.report(LinkReport(peer.name, "direct", "simulated"))
        self.report(StageReady(part.stage))

    def _release(self) -> None:
        """Release the assignment."""
        if self.assignment is not None:
            self._registry.clusters.get(self.assignment.cluster, {}).pop(self.assignment.stage, None)
            self._outbox.put(AssignmentReleased(self.assignment.generation))
        if self._starting is not None:
            self._starting.cancel()
        if self.feed is not None:
            self.feed.close()
        self.assignment = self.feed = self._starting = None


def _profile_of(machine: Machine) -> NodeProfile:
    return NodeProfile(
        memory_bytes=int(machine.memory_bytes), gflops=machine.speed * FLOPS_PER_S / 1e9,
        up_bytes_per_s=machine.up_bytes_per_s, down_bytes_per_s=machine.down_bytes_per_s, latency_s=machine.latency_s,
    )  # fmt: skip
