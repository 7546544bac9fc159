"""`ravnest join TICKET`: the agent of this PC, from the command line to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from . import __version__
from .core.config import config, parse_bytes
from .core.here import host_name
from .core.ids import check_id
from .core.units import parse_rate
from .net.ticket import Ticket
from .node.agent import Agent, AgentConfig
from .node.home import Home, default_directory
from .node.say import Speaker
from .node.session import SentAway

__all__ = ["Asked", "join"]

_INTERRUPTED = 130


@config
class Asked:
    """The command line."""

    ticket: str
    name: str | None = None
    memory: str | None = None
    threads: int | None = None
    max_upload: str | None = None
    port: int = 0
    data_dir: Path | None = None

    @property
    def agent(self) -> AgentConfig:
        ticket, name = Ticket.parse(self.ticket), check_id(self.name) if self.name else host_name()
        return AgentConfig(
            ticket=ticket,
            name=name,
            release=__version__,
            home=Home(self.data_dir or default_directory(), ticket.fingerprint, name),
            port=self.port,
            memory_bytes=None if self.memory is None else parse_bytes(self.memory),
            threads=self.threads,
            max_upload_bytes_per_s=None if self.max_upload is None else parse_rate(self.max_upload),
        )


def join(asked: Asked) -> int:
    """Until Ctrl-C (0), or until the coordinator sends this node away for good (1)."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    speaker = Speaker(console.print)
    try:
        asyncio.run(_run(asked.agent, speaker))
    except SentAway as away:
        speaker.say(f"the coordinator sent this node away: {away}")
        return 1
    speaker.say("left")
    return 0


async def _run(agent_config: AgentConfig, speaker: Speaker) -> None:
    agent = Agent(agent_config, speaker)
    is_asked = False

    def interrupted() -> None:
        nonlocal is_asked
        if is_asked:
            agent.kill()
            os._exit(_INTERRUPTED)
        is_asked = True
        agent.leave()

    with _on_signals(interrupted):
        await agent.run()


@contextlib.contextmanager
def _on_signals(interrupted: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and the system's request to end, heard in the loop."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(interrupted))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
