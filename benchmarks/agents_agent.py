"""One simulated agent: a PC without a computer, real to the coordinator in all it sees."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Protocol

import msgspec

from benchmarks.agents_feed import Feed, Listener, open_feed
from benchmarks.fleets import FLOPS_PER_S
from ravnest.core.control import Desired, Hello, LetGo, NodeProfile, Part, Report, Told, Welcome, Whereabouts
from ravnest.core.errors import RavnestError
from ravnest.core.metrics import StageMetrics
from ravnest.core.orders import Failed, Linked, Ready, Reports, Updated
from ravnest.net.addresses import Address
from ravnest.net.identity import Identity
from ravnest.net.ticket import Ticket
from ravnest.node.client import Client, member_context
from ravnest.node.enrol import Applicant, enrol
from ravnest.node.session import Outbox, SentAway, converse
from ravnest.plan import Machine

_RELEASE = "benchmark"
_WELCOME_S = 60.0


class Others(Listener, Protocol):
    """All agents of this process: who is in which cluster, and what went wrong."""

    clusters: dict[str, dict[int, Agent]]
    trouble: Counter[str]
    told_s: float

    def seconds_of(self, cluster: str) -> float: ...


class Agent:
    """One PC that lends itself."""

    def __init__(self, others: Others, machine: Machine, directory: Path) -> None:
        self.name, self.part, self.feed = machine.name, None, None
        self._others, self._directory = others, directory / machine.name
        self._profile = _profile_of(machine)
        self._outbox = Outbox()
        self._welcomed = asyncio.Event()
        self._talking: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[None] | None = None
        self._updates = 0

    part: Part | None
    feed: Feed | None
    identity: Identity

    async def enrol(self, ticket: Ticket) -> None:
        who = Applicant(ticket=ticket, name=self.name, release=_RELEASE, directory=self._directory)
        self.identity = await enrol(who, ticket.addresses[0])
        self._context = member_context(self.identity)

    async def come(self, address: Address) -> None:
        """Begin a conversation; returns when it is welcomed."""
        self._welcomed.clear()
        self._talking = asyncio.create_task(self._talk(address))
        await asyncio.wait_for(self._welcomed.wait(), _WELCOME_S)

    async def vanish(self) -> None:
        """End all connections at once."""
        self._put_down()
        if self._talking is not None:
            self._talking.cancel()
            await asyncio.gather(self._talking, return_exceptions=True)

    def report(self, said: Reports) -> None:
        if self.part is not None:
            self._outbox.put(Report(self.part.generation, said))

    def updated(self) -> None:
        """A window is done."""
        assert self.part is not None
        self._updates += 1
        self.report(Updated(StageMetrics(stage=self.part.stage, updates=self._updates)))

    def lose_neighbours(self) -> None:
        """Others of the cluster notice that this one is gone."""
        members = self._others.clusters.get(self.part.cluster, {}) if self.part is not None else {}
        for other in list(members.values()):
            if other is not self:
                other.report(Failed(f"the link to {self.name} broke", is_consequence=True))
                other._put_down()

    async def _talk(self, address: Address) -> None:
        hello = Hello(release=_RELEASE, profile=self._profile, where=Whereabouts())
        try:
            async with Client(address, self._context) as self._client:
                await converse(self._client, hello, self._outbox, self._heard, lambda: "training")
        except SentAway:
            self._put_down()
        except RavnestError as error:
            self._put_down()
            self._others.trouble[str(error)] += 1

    def _heard(self, told: Told) -> None:
        match told:
            case Welcome():
                self._welcomed.set()
            case Desired(part=None):
                self._put_down()
            case Desired(part=part) if part is not None:
                self._put_down()
                self.part, self._updates = part, part.begin
                self._others.told_s = time.monotonic()
                self._taking = asyncio.create_task(self._take(part))

    async def _take(self, part: Part) -> None:
        """Fetch the files, make the links, be ready."""
        try:
            await self._client.ask("GET", f"/v1/blobs/{part.file.digest}")
            brief = await self._client.ask("GET", f"/v1/blobs/{part.brief.digest}")
            self._others.clusters.setdefault(part.cluster, {})[part.stage] = self
            if part.before is None:
                accumulate = int(msgspec.json.decode(brief)["accumulate"])
                self.feed = Feed(part, accumulate, self._others.seconds_of(part.cluster), self._others)
                await open_feed(self.feed, self._client.address, self.identity)
        except (RavnestError, OSError) as error:
            self._others.trouble[f"a part was not taken: {error}"] += 1
            self.report(Failed(str(error)))
            return
        for peer in (part.before, part.after):
            if peer is not None:
                self.report(Linked(peer.name, "direct", "it is simulated"))
        self.report(Ready(part.stage))

    def _put_down(self) -> None:
        """Be free."""
        if self.part is not None:
            self._others.clusters.get(self.part.cluster, {}).pop(self.part.stage, None)
            self._outbox.put(LetGo(self.part.generation))
        if self._taking is not None:
            self._taking.cancel()
        if self.feed is not None:
            self.feed.close()
        self.part = self.feed = self._taking = None


def _profile_of(machine: Machine) -> NodeProfile:
    return NodeProfile(
        memory_bytes=int(machine.memory_bytes), gflops=machine.speed * FLOPS_PER_S / 1e9,
        up_bytes_per_s=machine.up_bytes_per_s, down_bytes_per_s=machine.down_bytes_per_s, latency_s=machine.latency_s,
    )  # fmt: skip
