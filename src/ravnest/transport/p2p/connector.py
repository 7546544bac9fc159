"""Connects to one peer: checks all candidates concurrently until both ends agree on one connection.

Each candidate is a task that connects, authenticates the peer, and then nominates the connection or waits for its
nomination (`negotiation`). The first success cancels all others. A failed check is retried with backoff, because the
peer may not have received the new plan yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from ravnest.errors import LinkClosed, LinkError, LinkTimeout
from ravnest.transport.introduction import Introduction, check_introduction, is_controlling
from ravnest.transport.link import LinkConfig
from ravnest.transport.p2p.candidates import (
    Candidate,
    ConnectionType,
    ConnectorConfig,
    LocalCandidates,
    PeerCandidates,
    describe_failures,
    gather_candidates,
    improvement_hint,
)
from ravnest.transport.p2p.dialer import Connection, Dialer
from ravnest.transport.p2p.negotiation import accept_nomination, nominate, receive_introduction, send_introduction
from ravnest.transport.socket import run_async
from ravnest.transport.stream import StreamLink

__all__ = ["PeerConnector", "ConnectedPeer"]


@dataclass(frozen=True)
class ConnectedPeer:
    """A link, its connection type with the reason, and a hint for a better one (empty if direct)."""

    link: StreamLink
    how: ConnectionType
    reason: str
    hint: str


class PeerConnector:
    """Connects to one peer for one purpose in one generation; used in one asyncio loop."""

    def __init__(self, peer: PeerCandidates, link: LinkConfig, dialer: Dialer, config: ConnectorConfig) -> None:
        self.peer = peer
        self.mine = Introduction.of(link.generation, peer.purpose)
        self._is_controlling = is_controlling(dialer.me, peer.name)
        self._link, self._dialer, self._config = link, dialer, config
        self._failures: dict[str, str] = {}
        self._nominating = asyncio.Lock()
        self._selected: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, local: LocalCandidates, deadline_s: float) -> ConnectedPeer:
        for candidate in gather_candidates(self.peer, local, self._config):
            self._start(self._check_repeatedly(candidate))
        try:
            async with asyncio.timeout(deadline_s):
                connection = await self._selected
        except BaseException as error:
            self._close_selected()
            if not isinstance(error, TimeoutError):
                raise
            failures = describe_failures(self._failures)
            raise LinkTimeout(f"no connection to {self.peer.name} within {deadline_s:g} s: {failures}") from None
        finally:
            for task in self._tasks:
                task.cancel()  # each closes its connection
        return self._make_link(connection, local)

    def add_incoming(self, connection: Connection) -> None:
        """Negotiate over a connection that the peer has made to this node."""
        task = self._start(self._check_incoming(connection))
        # A task that is cancelled before it starts cannot close the connection itself.
        task.add_done_callback(lambda done: connection.close() if done.cancelled() else None)

    def give_up(self, reason: str) -> None:
        if not self._selected.done():
            self._selected.set_exception(LinkClosed(reason))

    async def _check_repeatedly(self, candidate: Candidate) -> None:
        await asyncio.sleep(candidate.after_s)
        self._failures[str(candidate)] = "no answer yet"
        pause_s = self._config.retry_s
        while not await self._succeeds(str(candidate), self._check(candidate)):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.max_retry_s)

    async def _check_incoming(self, connection: Connection) -> None:
        await self._succeeds(connection.description, self._negotiate(connection))

    async def _check(self, candidate: Candidate) -> None:
        await self._negotiate(await self._dialer.connect(candidate, self.peer))

    async def _succeeds(self, name: str, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`; record the reason if it fails."""
        try:
            await work
            return True
        except TimeoutError:
            self._failures[name] = "no answer"
        except (LinkError, OSError) as error:
            self._failures[name] = str(error)
        return False

    async def _negotiate(self, connection: Connection) -> None:
        """Return when both ends have selected this connection; close it otherwise."""
        try:
            await self._introduce(connection)
            if self._is_controlling:
                await self._nominate(connection)
            else:
                await run_async(accept_nomination(connection.channel), connection.sock)
                self._select(connection)
        except BaseException:
            connection.close()
            raise

    async def _introduce(self, connection: Connection) -> None:
        """Exchange introductions, the client first. That of an incoming connection has been received already."""
        channel, sock, theirs = connection.channel, connection.sock, connection.introduction
        if not connection.is_server:
            await run_async(send_introduction(channel, self.mine), sock)
        if theirs is None:
            theirs = await run_async(receive_introduction(channel), sock)
        if connection.is_server:
            await run_async(send_introduction(channel, self.mine), sock)
        check_introduction(self.mine, theirs, connection.peer)

    async def _nominate(self, connection: Connection) -> None:
        """Nominate one connection at a time: the next only after the previous one has failed."""
        if connection.how == "relayed":
            await asyncio.sleep(self._config.settle_s)
        async with self._nominating:
            if self._selected.done():
                raise LinkClosed("another connection was selected")
            async with asyncio.timeout(self._config.nomination_timeout_s):
                await run_async(nominate(connection.channel), connection.sock)
            self._select(connection)  # before the lock lets another be nominated

    def _select(self, connection: Connection) -> None:
        if self._selected.done():
            raise LinkClosed("the connection attempt has ended")
        self._selected.set_result(connection)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _close_selected(self) -> None:
        """Close a connection that was selected but will not be returned."""
        if self._selected.done() and not self._selected.cancelled() and self._selected.exception() is None:
            self._selected.result().close()

    def _make_link(self, connection: Connection, local: LocalCandidates) -> ConnectedPeer:
        reason = f"{connection.how}: {connection.description}"
        others = {name: why for name, why in self._failures.items() if not name.startswith(connection.how)}
        if connection.how != "direct" and others:
            reason += f", because {describe_failures(others)}"
        link = StreamLink(connection.channel, self._link, peer=connection.peer)
        hint = improvement_hint(connection.how, self.peer.name, self._dialer.port, local)
        return ConnectedPeer(link, connection.how, reason, hint)
