"""Many simulated agents in one process, which the coordinator cannot tell from real ones.

Each enrols with the ticket, has a key, a certificate and a session of its own, fetches the files of its assignment and
reports as an agent does. First stages open their feed and acknowledge a microbatch after a simulated time. Nothing is
computed, and stages have no links to each other: if an agent is killed, the others of its cluster report it at once.

The duration of a lease is from the acknowledgement that makes room for a batch to the arrival of its first microbatch.
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

from benchmarks.control.agent import Agent
from benchmarks.control.child import serve
from benchmarks.planner.fleets import home_pcs
from ravnest.errors import LinkError
from ravnest.protocol.commands import LossReport
from ravnest.protocol.control import Assignment
from ravnest.transport.ticket import Ticket

_MAX_JOINING = 64  # agents that join at the same time


class Agents:
    """All agents and their measurements."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: dict[str, Agent] = {}
        self._microbatch_s = 1.0
        self.clusters: dict[str, dict[int, Agent]] = {}
        self._losses: dict[str, dict[int, tuple[float | None, ...]]] = {}  # by cluster, of the current step
        self.lease_s: list[float] = []
        self.assigned_s = 0.0
        self.failures: Counter[str] = Counter()

    # called by feeds and agents

    def seconds_of(self, cluster: str) -> float:
        """Seconds per microbatch of this cluster's first stage: not the same for all, so that they are not in phase."""
        return self._microbatch_s * random.Random(cluster).uniform(0.7, 1.3)

    def leased(self, seconds: float) -> None:
        self.lease_s.append(seconds)

    def acknowledged(self, part: Assignment, microbatch: int, *, is_last: bool) -> None:
        """After every step the last stage reports losses and all stages their update, unless the rate is unlimited."""
        if not self._microbatch_s:
            return
        members, losses = self.clusters.get(part.cluster, {}), self._losses.setdefault(part.cluster, {})
        losses[microbatch] = (1.0,)
        if is_last:
            if (last := members.get(part.count - 1)) is not None:
                last.report(LossReport(self._losses.pop(part.cluster)))
            for member in members.values():
                member.updated()

    # commands of the benchmark

    async def join(self, *, ticket: str, count: int) -> dict[str, Any]:
        """Enrol and connect all agents; returns the seconds it took and our own CPU seconds."""
        parsed, joining = Ticket.parse(ticket), asyncio.Semaphore(_MAX_JOINING)
        made = [Agent(self, machine, self._directory) for machine in home_pcs(count, seed=count).machines]
        self._all = {agent.name: agent for agent in made}

        async def connect(agent: Agent) -> None:
            async with joining:
                await self._retry_once(lambda: agent.enrol(parsed))
                await agent.connect(parsed.addresses[0])

        return await _timed([connect(agent) for agent in made])

    async def _retry_once(self, work: Callable[[], Awaitable[None]]) -> None:
        """Retry once, as agents do, and count the failure."""
        try:
            await work()
        except LinkError as error:
            self.failures[str(error)] += 1
            await work()

    async def reconnect(self, *, port: int) -> dict[str, Any]:
        """Connect all agents to another server of the same authority."""
        joining = asyncio.Semaphore(_MAX_JOINING)

        async def connect(agent: Agent) -> None:
            async with joining:
                await agent.disconnect()
                await agent.connect(("127.0.0.1", port))

        return await _timed([connect(agent) for agent in self._all.values()])

    async def set_rate(self, *, microbatch_s: float) -> None:
        """Set the seconds per microbatch of first stages; 0 is unlimited."""
        self._microbatch_s = microbatch_s
        for agent in self._all.values():
            if agent.feed is not None and agent.assignment is not None:
                agent.feed.microbatch_s = self.seconds_of(agent.assignment.cluster)

    async def reset(self) -> None:
        """Clear the measurements, and exclude the objects of all connections from garbage collection pauses."""
        self.lease_s.clear()
        gc.collect()
        gc.freeze()

    async def facts(self) -> dict[str, Any]:
        lease_s = sorted(self.lease_s)
        return {
            "cpu_s": time.process_time(),
            "leases": len(lease_s),
            "p50_s": statistics.median(lease_s) if lease_s else math.nan,
            "p99_s": lease_s[int(0.99 * (len(lease_s) - 1))] if lease_s else math.nan,
            "max_s": lease_s[-1] if lease_s else math.nan,
            "assigned_s": self.assigned_s,
            "failures": dict(self.failures),
        }

    async def kill(self, *, count: int) -> float:
        """Disconnect random agents without notice; their clusters' other members report it. Returns when it started."""
        killed = random.Random(count).sample(sorted(self._all), count)
        began = time.monotonic()
        for name in killed:
            self._all[name].lose_neighbours()
        await asyncio.gather(*(self._all.pop(name).disconnect() for name in killed))
        return began


async def _timed(works: list[Any]) -> dict[str, Any]:
    began, cpu_s = time.monotonic(), time.process_time()
    await asyncio.gather(*works)
    return {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu_s}


async def main() -> None:
    agents = Agents(Path(sys.argv[1]))
    names = ("join", "reconnect", "set_rate", "reset", "facts", "kill")
    await serve({name: getattr(agents, name) for name in names})


if __name__ == "__main__":
    asyncio.run(main())
