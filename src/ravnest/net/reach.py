"""One call to one peer: every way is tried at once until both ends agree on one connection.

Each way is a task that connects, proves who is there, and then waits to choose or to be chosen (`agree`).
The first that gets through ends all others. A way that fails is tried again, ever more slowly: the peer
may not have heard of the new plan yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from ravnest.core.errors import LinkClosed, LinkError, LinkTimeout
from ravnest.net.agree import Introduction, be_chosen, check_same, choose, hear_introduction, introduce, leads
from ravnest.net.converse import converse
from ravnest.net.dialling import Connection, Dialler
from ravnest.net.link import LinkConfig
from ravnest.net.stream import StreamLink
from ravnest.net.ways import Here, How, PeerInfo, ReachConfig, Way, advise, choose_ways, tell_failures

__all__ = ["Call", "Reached"]


@dataclass(frozen=True)
class Reached:
    """A link, how it came about, and what would make it better (nothing when it is direct)."""

    link: StreamLink
    how: How
    reason: str
    hint: str


class Call:
    """Reaching one peer for one purpose in one generation; lives in one asyncio loop."""

    def __init__(self, peer: PeerInfo, link: LinkConfig, dialler: Dialler, config: ReachConfig) -> None:
        self.peer = peer
        self.mine = Introduction.of(link.generation, peer.purpose)
        self._leads = leads(dialler.me, peer.name)
        self._link, self._dialler, self._config = link, dialler, config
        self._failures: dict[str, str] = {}
        self._choosing = asyncio.Lock()
        self._agreed: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, here: Here, deadline_s: float) -> Reached:
        for way in choose_ways(self.peer, here, self._config):
            self._start(self._keep_trying(way))
        try:
            async with asyncio.timeout(deadline_s):
                connection = await self._agreed
        except BaseException as error:
            self._drop_agreed()
            if not isinstance(error, TimeoutError):
                raise
            tried = tell_failures(self._failures)
            raise LinkTimeout(f"{self.peer.name} could not be reached within {deadline_s:g} s: {tried}") from None
        finally:
            for task in self._tasks:
                task.cancel()  # each closes its connection
        return self._reached(connection, here)

    def welcome(self, guest: Connection) -> None:
        """A connection that the peer has made to this node."""
        task = self._start(self._keep(guest))
        task.add_done_callback(lambda done: guest.close() if done.cancelled() else None)  # perhaps before it began

    def give_up(self, reason: str) -> None:
        if not self._agreed.done():
            self._agreed.set_exception(LinkClosed(reason))

    async def _keep_trying(self, way: Way) -> None:
        await asyncio.sleep(way.after_s)
        self._failures[str(way)] = "no answer yet"
        pause_s = self._config.retry_s
        while not await self._succeeds(str(way), self._go(way)):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.max_retry_s)

    async def _keep(self, guest: Connection) -> None:
        await self._succeeds(guest.words, self._agree(guest))

    async def _go(self, way: Way) -> None:
        await self._agree(await self._dialler.connect(way, self.peer))

    async def _succeeds(self, what: str, work: Coroutine[Any, Any, None]) -> bool:
        """Or else remembers why not."""
        try:
            await work
            return True
        except TimeoutError:
            self._failures[what] = "no answer"
        except (LinkError, OSError) as error:
            self._failures[what] = str(error)
        return False

    async def _agree(self, connection: Connection) -> None:
        """Returns when this is the connection that both ends use; else it is closed."""
        try:
            await self._introduce(connection)
            if self._leads:
                await self._choose(connection)
            else:
                await converse(be_chosen(connection.channel), connection.sock)
                self._take(connection)
        except BaseException:
            connection.close()
            raise

    async def _introduce(self, connection: Connection) -> None:
        """The client first. A guest's words were heard before it was known that it is for this call."""
        channel, sock, theirs = connection.channel, connection.sock, connection.heard
        if not connection.is_server:
            await converse(introduce(channel, self.mine), sock)
        if theirs is None:
            theirs = await converse(hear_introduction(channel), sock)
        if connection.is_server:
            await converse(introduce(channel, self.mine), sock)
        check_same(self.mine, theirs, connection.peer)

    async def _choose(self, connection: Connection) -> None:
        """One at a time: the next is chosen only when the peer can no longer take the one before."""
        if connection.how == "relayed":
            await asyncio.sleep(self._config.settle_s)
        async with self._choosing:
            if self._agreed.done():
                raise LinkClosed("another connection was chosen")
            async with asyncio.timeout(self._config.confirm_s):
                await converse(choose(connection.channel), connection.sock)
            self._take(connection)  # before the next may choose

    def _take(self, connection: Connection) -> None:
        if self._agreed.done():
            raise LinkClosed("the call had ended")
        self._agreed.set_result(connection)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _drop_agreed(self) -> None:
        """Nobody will take the connection that was agreed on a moment ago."""
        if self._agreed.done() and not self._agreed.cancelled() and self._agreed.exception() is None:
            self._agreed.result().close()

    def _reached(self, connection: Connection, here: Here) -> Reached:
        reason = f"{connection.how}: {connection.words}"
        others = {way: why for way, why in self._failures.items() if not way.startswith(connection.how)}
        if connection.how != "direct" and others:
            reason += f", because {tell_failures(others)}"
        link = StreamLink(connection.channel, self._link, peer=connection.peer)
        hint = advise(connection.how, self.peer.name, self._dialler.port, here)
        return Reached(link, connection.how, reason, hint)
