"""`python -m benchmarks.recovery_agent TICKET NAME FOLDER`: a real agent that does not measure its PC first.

Seven PCs that measure themselves at once on two cores take most of a minute, and find each other rather than the PC.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from ravnest import __version__
from ravnest.core.control import NodeProfile
from ravnest.net.ticket import Ticket
from ravnest.node.agent import Agent, AgentConfig
from ravnest.node.home import Home
from ravnest.node.say import Speaker

_PROFILE = NodeProfile(memory_bytes=600_000_000, gflops=0.6, threads=1)  # as PCs with 0.15 of a core show at the job


async def _run(ticket: Ticket, name: str, folder: Path) -> None:
    home = Home(folder, ticket.fingerprint, name)
    config = AgentConfig(ticket=ticket, name=name, release=__version__, home=home, profile=_PROFILE)
    agent = Agent(config, Speaker(lambda text: print(text, flush=True)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, agent.leave)
    await agent.run()


if __name__ == "__main__":
    asyncio.run(_run(Ticket.parse(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
