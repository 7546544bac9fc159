"""Connects to one peer: checks all its candidates concurrently until both ends agree on one connection.

A candidate becomes an authenticated connection (`Dialer`) by a direct dial, by hole punching, or through a relay. Each
candidate is a task of the `PeerConnector`, which then nominates the connection or waits for its nomination:

    controlling                         controlled
    introduction           <->          introduction
    nominate               ->
                           <-           confirm

The first success cancels all others. A failed check is retried with backoff, because the peer may not have received the
new plan yet.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import ssl
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from ravnest.errors import HandshakeError, LinkClosed, LinkError, LinkTimeout
from ravnest.transport.address import Address, show
from ravnest.transport.identity import Identity
from ravnest.transport.introduction import (
    INTRODUCTION_BYTES,
    Introduction,
    check_introduction,
    decode_introduction,
    encode_introduction,
    is_controlling,
)
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
from ravnest.transport.p2p.hole_punching import dialing_socket, negotiate_as_dialer
from ravnest.transport.p2p.relay_client import Observation, RelayInfo, observe, open_tunnel, relay_context
from ravnest.transport.socket import Handshake, run_async
from ravnest.transport.stream import StreamLink
from ravnest.transport.tls import TlsChannel, mutual_handshake, receive_bytes, send_bytes, tls_context, tune

__all__ = [
    "Connection",
    "Contexts",
    "Dialer",
    "PeerConnector",
    "ConnectedPeer",
    "receive_introduction",
    "send_introduction",
]

_NOMINATED, _CONFIRMED = b"\x02", b"\x03"


def send_introduction(channel: TlsChannel, mine: Introduction) -> Handshake[None]:
    yield from send_bytes(channel, encode_introduction(mine))


def receive_introduction(channel: TlsChannel) -> Handshake[Introduction]:
    return decode_introduction((yield from receive_bytes(channel, INTRODUCTION_BYTES)))


def nominate(channel: TlsChannel) -> Handshake[None]:
    yield from send_bytes(channel, _NOMINATED)
    if (yield from receive_bytes(channel, 1)) != _CONFIRMED:
        raise HandshakeError("peer did not confirm the nomination of this connection")


def accept_nomination(channel: TlsChannel) -> Handshake[None]:
    if (yield from receive_bytes(channel, 1)) != _NOMINATED:
        raise HandshakeError("peer neither nominated nor closed this connection")
    yield from send_bytes(channel, _CONFIRMED)


@dataclass(frozen=True, eq=False)
class Connection:
    """A connection to an authenticated peer, before it becomes a link.

    `introduction` is the peer's, if it was received before the connection was assigned to a connector.
    """

    channel: TlsChannel
    sock: socket.socket
    peer: str
    kind: ConnectionType
    description: str
    is_server: bool
    introduction: Introduction | None = None

    def close(self) -> None:
        self.sock.close()


class Contexts:
    """TLS contexts of this node's identity, loaded once."""

    def __init__(self, identity: Identity) -> None:
        self.client = tls_context(identity, server_side=False)
        self.server = tls_context(identity, server_side=True)
        self.relay = relay_context(identity)

    def side(self, *, is_server: bool) -> ssl.SSLContext:
        return self.server if is_server else self.client


class Dialer:
    """Dials for the node `me`, which listens on `port`; used in one asyncio loop."""

    def __init__(self, me: str, port: int, contexts: Contexts, config: ConnectorConfig) -> None:
        self.me, self.port = me, port
        self._contexts, self._config = contexts, config

    async def connect(self, candidate: Candidate, peer: PeerCandidates) -> Connection:
        if candidate.kind == "direct":
            return await self._connect_direct(candidate, peer.name)
        if candidate.kind == "punched":
            return await self._connect_punched(candidate, peer.name)
        assert peer.relay is not None, "a relayed candidate has a relay"
        return await self._connect_relayed(peer.relay, peer.name)

    async def observe(self, relay: RelayInfo) -> Observation:
        """Request the address of this node's listening port, as the relay observes it."""
        target = (await _resolve(relay.address))[0]
        sock = dialing_socket(self.port, target)
        try:
            await _connect(sock, target)
            return await run_async(observe(sock, relay, self._contexts.relay), sock)
        except BaseException:
            sock.close()
            raise

    async def _connect_direct(self, candidate: Candidate, peer: str) -> Connection:
        sock = _socket_for(candidate.address)
        try:
            async with asyncio.timeout(self._config.check_timeout_s):
                await _connect(sock, candidate.address)
                return await self._authenticate(sock, candidate, peer, is_server=False)
        except BaseException:
            sock.close()
            raise

    async def _connect_punched(self, candidate: Candidate, peer: str) -> Connection:
        sock = dialing_socket(self.port, candidate.address)
        try:
            async with asyncio.timeout(self._config.punch_timeout_s):
                await _connect(sock, candidate.address)
            async with asyncio.timeout(self._config.check_timeout_s):
                handshake = negotiate_as_dialer(sock, is_controlling=is_controlling(self.me, peer))
                is_server = await run_async(handshake, sock)
                return await self._authenticate(sock, candidate, peer, is_server=is_server)
        except BaseException:
            sock.close()
            raise

    async def _connect_relayed(self, relay: RelayInfo, peer: str) -> Connection:
        """Join at the relay, which responds when the peer has joined too; bounded by the connector's deadline only."""
        is_server = not is_controlling(self.me, peer)
        contexts = self._contexts.relay, self._contexts.side(is_server=is_server)
        sock = await self._dial_relay(relay)
        try:
            channel = await run_async(open_tunnel(sock, relay, self.me, peer, contexts), sock)
        except BaseException:
            sock.close()
            raise
        description = f"through {relay.name} at {show(relay.address)}"
        return Connection(channel, sock, peer, "relayed", description, is_server)

    async def _dial_relay(self, relay: RelayInfo) -> socket.socket:
        reason: LinkError = LinkClosed(f"{relay.address[0]} has no address")
        for address in await _resolve(relay.address):
            sock = _socket_for(address)
            try:
                async with asyncio.timeout(self._config.check_timeout_s):
                    await _connect(sock, address)
                return sock
            except TimeoutError:
                sock.close()
                reason = LinkClosed(f"no answer from {show(address)}")
            except LinkError as error:
                sock.close()
                reason = error
            except BaseException:
                sock.close()
                raise
        raise reason

    async def _authenticate(
        self, sock: socket.socket, candidate: Candidate, peer: str, *, is_server: bool
    ) -> Connection:
        tune(sock)
        channel = TlsChannel(sock, self._contexts.side(is_server=is_server), server_side=is_server)
        await run_async(mutual_handshake(channel, lambda name: name == peer), sock)
        source = f" from port {self.port}" if candidate.kind == "punched" else ""
        return Connection(channel, sock, peer, candidate.kind, f"dialed {show(candidate.address)}{source}", is_server)


def _socket_for(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


async def _connect(sock: socket.socket, address: Address) -> None:
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except TimeoutError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)  # asyncio replaces the system's message
        raise LinkClosed(f"cannot reach {show(address)}: {reason}") from error


async def _resolve(address: Address) -> list[Address]:
    """Resolve a host name to numeric addresses.

    A failing lookup may take half a minute. So it runs in a daemon thread: the loop waits for the threads of its own
    executor when it closes.
    """
    result: concurrent.futures.Future[list[Address]] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()  # a cancelled wait does not cancel the lookup

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            result.set_result([(str(at[0]), int(at[1])) for *_, at in infos])
        except OSError as error:
            result.set_exception(LinkClosed(f"cannot resolve {address[0]}: {error}"))

    threading.Thread(target=look_up, name=f"resolve {address[0]}", daemon=True).start()
    return await asyncio.wrap_future(result)


@dataclass(frozen=True)
class ConnectedPeer:
    """A link, its connection type with the reason, and a hint for a better one (empty if direct)."""

    link: StreamLink
    kind: ConnectionType
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
        if connection.kind == "relayed":
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
        reason = f"{connection.kind}: {connection.description}"
        others = {name: failure for name, failure in self._failures.items() if not name.startswith(connection.kind)}
        if connection.kind != "direct" and others:
            reason += f", because {describe_failures(others)}"
        link = StreamLink(connection.channel, self._link, peer=connection.peer)
        hint = improvement_hint(connection.kind, self.peer.name, self._dialer.port, local)
        return ConnectedPeer(link, connection.kind, reason, hint)
