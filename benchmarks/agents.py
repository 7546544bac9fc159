"""Agents without a computer: as many as wanted in one process, each real to the coordinator in all it sees.

Every one enrols with the ticket, has a key, a certificate and a conversation of its own, fetches its part's files and
reports as an agent does. Roots dial their feed and acknowledge a microbatch after a simulated time. Nothing is
computed, and stages have no links to each other: if one is killed, the others of its cluster are told so at once.

A lease takes from the acknowledgement that makes room for a batch to the arrival of its first microbatch.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.agents_feed import Feed, open_feed
from benchmarks.control_child import answer
from benchmarks.fleets import FLOPS_PER_S, home_pcs
from ravnest.core.control import Desired, Hello, NodeProfile, Part, Report, Told, Welcome, Whereabouts
from ravnest.core.errors import RavnestError
from ravnest.core.metrics import StageMetrics
from ravnest.core.orders import Failed, Linked, Lost, Ready, Reports, Updated
from ravnest.net.addresses import Address
from ravnest.net.identity import Identity
from ravnest.net.ticket import Ticket
from ravnest.node.client import Client, member_context
from ravnest.node.enrol import Applicant, enrol
from ravnest.node.session import Outbox, SentAway, converse
from ravnest.plan import Machine

_AT_THE_DOOR = 64  # agents that come in at the same time
_RELEASE = "benchmark"


class Agent:
    """One PC that lends itself."""

    def __init__(self, fleet: Agents, machine: Machine, directory: Path) -> None:
        self.name, self.part, self.feed = machine.name, None, None
        self._fleet, self._directory = fleet, directory / machine.name
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
        await asyncio.wait_for(self._welcomed.wait(), 60.0)

    async def vanish(self) -> None:
        """End all connections, saying nothing."""
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
        members = self._fleet.clusters[self.part.cluster] if self.part is not None else {}
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
            self._fleet.trouble[str(error)] += 1

    def _heard(self, told: Told) -> None:
        match told:
            case Welcome():
                self._welcomed.set()
            case Desired(part=None):
                self._put_down()
            case Desired(part=part) if part is not None:
                self._put_down()
                self.part, self._updates = part, 0
                self._fleet.told_s = time.monotonic()
                self._taking = asyncio.create_task(self._take(part))

    async def _take(self, part: Part) -> None:
        """Fetch the files, make the links, be ready."""
        try:
            await self._client.ask("GET", f"/v1/blobs/{part.file.digest}")
            brief = await self._client.ask("GET", f"/v1/blobs/{part.brief.digest}")
            self._fleet.clusters[part.cluster][part.stage] = self
            if part.before is None:
                accumulate = int(msgspec.json.decode(brief)["accumulate"])
                self.feed = Feed(part, accumulate, self._fleet.seconds_of(part.cluster), self._fleet)
                await open_feed(self.feed, self._client.address, self.identity)
        except (RavnestError, OSError) as error:
            self._fleet.trouble[f"a part was not taken: {error}"] += 1
            self.report(Failed(str(error)))
            return
        for peer in (part.before, part.after):
            if peer is not None:
                self.report(Linked(peer.name, "direct", "it is simulated"))
        self.report(Ready(part.stage))

    def _put_down(self) -> None:
        """Be free."""
        if self.part is not None:
            self._fleet.clusters[self.part.cluster].pop(self.part.stage, None)
        if self._taking is not None:
            self._taking.cancel()
        if self.feed is not None:
            self.feed.close()
        self.part = self.feed = self._taking = None


class Agents:
    """All of them, and what they have measured."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: dict[str, Agent] = {}
        self._pace_s = 1.0
        self.clusters: defaultdict[str, dict[int, Agent]] = defaultdict(dict)
        self.lease_s: list[float] = []
        self.told_s = 0.0
        self.trouble: Counter[str] = Counter()

    # what feeds ask and tell

    def seconds_of(self, cluster: str) -> float:
        """How long this cluster's root takes for a microbatch: not the same for all, so that they do not march."""
        return self._pace_s * random.Random(cluster).uniform(0.7, 1.3)

    def leased(self, seconds: float) -> None:
        self.lease_s.append(seconds)

    def acknowledged(self, part: Part, microbatch: int, *, is_last: bool) -> None:
        """The last stage tells the loss of every microbatch, all stages tell of every window; but not in a hurry."""
        if not self._pace_s:
            return
        members = self.clusters[part.cluster]
        if (leaf := members.get(part.count - 1)) is not None:
            leaf.report(Lost(microbatch, (1.0,)))
        if is_last:
            for member in members.values():
                member.updated()

    # what is asked of all

    async def join(self, *, ticket: str, count: int) -> dict[str, Any]:
        """Enrol and be welcomed, all of them; how long it took, and of that our own CPU time."""
        parsed, door = Ticket.parse(ticket), asyncio.Semaphore(_AT_THE_DOOR)
        made = [Agent(self, machine, self._directory) for machine in home_pcs(count, seed=count).machines]
        self._all = {agent.name: agent for agent in made}

        async def come(agent: Agent) -> None:
            async with door:
                await agent.enrol(parsed)
                await agent.come(parsed.addresses[0])

        return await _timed([come(agent) for agent in made])

    async def visit(self, *, port: int) -> dict[str, Any]:
        """Talk to another coordinator of the same authority."""
        door = asyncio.Semaphore(_AT_THE_DOOR)

        async def come(agent: Agent) -> None:
            async with door:
                await agent.vanish()
                await agent.come(("127.0.0.1", port))

        return await _timed([come(agent) for agent in self._all.values()])

    async def pace(self, *, seconds: float) -> None:
        """From now on a microbatch takes a root about this long."""
        self._pace_s = seconds
        for agent in self._all.values():
            if agent.feed is not None and agent.part is not None:
                agent.feed.microbatch_s = self.seconds_of(agent.part.cluster)

    async def forget(self) -> None:
        """Measure anew, without pauses in which this process collects what thousands of connections are made of."""
        self.lease_s.clear()
        gc.collect()
        gc.freeze()

    async def facts(self) -> dict[str, Any]:
        found = sorted(self.lease_s)
        return {
            "cpu_s": time.process_time(),
            "leases": len(found),
            "p50_s": statistics.median(found) if found else math.nan,
            "p99_s": found[int(0.99 * (len(found) - 1))] if found else math.nan,
            "most_s": found[-1] if found else math.nan,
            "told_s": self.told_s,
            "trouble": dict(self.trouble),
        }

    async def kill(self, *, count: int) -> float:
        """Some agents vanish, whoever they are; their clusters' other members notice. Answers when it was."""
        killed = random.Random(count).sample(sorted(self._all), count)
        began = time.monotonic()
        for name in killed:
            self._all[name].lose_neighbours()
        await asyncio.gather(*(self._all.pop(name).vanish() for name in killed))
        return began


async def _timed(works: list[Any]) -> dict[str, Any]:
    began, cpu_s = time.monotonic(), time.process_time()
    await asyncio.gather(*works)
    return {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu_s}


def _profile_of(machine: Machine) -> NodeProfile:
    return NodeProfile(
        memory_bytes=int(machine.memory_bytes), gflops=machine.speed * FLOPS_PER_S / 1e9,
        up_bytes_per_s=machine.up_bytes_per_s, down_bytes_per_s=machine.down_bytes_per_s, latency_s=machine.latency_s,
    )  # fmt: skip


async def main() -> None:
    part = Agents(Path(sys.argv[1]))
    await answer({
        "join": part.join, "visit": part.visit, "pace": part.pace, "forget": part.forget, "facts": part.facts,
        "kill": part.kill,
    })  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
