"""A real agent without the initial measurement: `python -m benchmarks.recovery.agent TICKET NAME FOLDER`.

Seven agents that measure two cores at the same time take most of a minute and measure each other's load.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from ravnest import __version__
from ravnest.node.agent import Agent, AgentConfig
from ravnest.node.console import AgentConsole
from ravnest.node.membership import TicketMembership
from ravnest.node.storage import NodeStorage, node_directory
from ravnest.protocol.control import NodeProfile
from ravnest.transport.ticket import Ticket

_PROFILE = NodeProfile(memory_bytes=600_000_000, gflops=0.6, threads=1)  # as measured for this job with 0.15 of a core


async def _run(ticket: Ticket, name: str, folder: Path) -> None:
    membership = TicketMembership(ticket, name, __version__, node_directory(folder, ticket.fingerprint, name))
    config = AgentConfig(release=__version__, home=NodeStorage(Path(membership.identity)), profile=_PROFILE)
    agent = Agent(config, membership, AgentConsole(lambda text: print(text, flush=True)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, agent.leave)
    await agent.run()


if __name__ == "__main__":
    asyncio.run(_run(Ticket.parse(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
