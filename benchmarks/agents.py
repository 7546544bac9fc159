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
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.agents_agent import Agent
from benchmarks.control_child import answer
from benchmarks.fleets import home_pcs
from ravnest.core.control import Part
from ravnest.core.errors import LinkError
from ravnest.core.orders import Lost
from ravnest.net.ticket import Ticket

_AT_THE_DOOR = 64  # agents that come in at the same time


class Agents:
    """All of them, and what they have measured."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: dict[str, Agent] = {}
        self._pace_s = 1.0
        self.clusters: dict[str, dict[int, Agent]] = {}
        self._losses: dict[str, dict[int, tuple[float | None, ...]]] = {}  # by cluster, of the window under way
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
        """After every window the last stage tells its losses, and all of their update; but not in a hurry."""
        if not self._pace_s:
            return
        members, losses = self.clusters.get(part.cluster, {}), self._losses.setdefault(part.cluster, {})
        losses[microbatch] = (1.0,)
        if is_last:
            if (leaf := members.get(part.count - 1)) is not None:
                leaf.report(Lost(self._losses.pop(part.cluster)))
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
                await self._tried(lambda: agent.enrol(parsed))
                await agent.come(parsed.addresses[0])

        return await _timed([come(agent) for agent in made])

    async def _tried(self, work: Callable[[], Awaitable[None]]) -> None:
        """A second time too, as agents do; that it was needed is told."""
        try:
            await work()
        except LinkError as error:
            self.trouble[str(error)] += 1
            await work()

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


async def main() -> None:
    part = Agents(Path(sys.argv[1]))
    await answer({
        "join": part.join, "visit": part.visit, "pace": part.pace, "forget": part.forget, "facts": part.facts,
        "kill": part.kill,
    })  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
