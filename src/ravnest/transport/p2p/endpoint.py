"""Runs a node's endpoint: the one port on which it accepts peers and from which it dials them.

Incoming and outgoing connections use the same port, so that NATs let the replies in. One thread runs an asyncio loop
with all connections that are not links yet; a link belongs to the caller of `connect`.

A peer may connect before this node expects it, because plans arrive at different times. So `PeerAcceptor` holds an
authenticated connection for a while, until a connector waits for it. It rejects peers that are not in the roster,
connections for a link of another generation, and the oldest of too many unfinished handshakes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from ravnest.core.clock import Deadline
from ravnest.core.config import config, require
from ravnest.errors import LinkClosed, LinkError, LinkTimeout
from ravnest.transport.address import Address, plain_host, show
from ravnest.transport.identity import Identity
from ravnest.transport.link import LinkConfig
from ravnest.transport.p2p.candidates import ConnectorConfig, LocalCandidates, PeerCandidates
from ravnest.transport.p2p.dialer import (
    ConnectedPeer,
    Connection,
    Contexts,
    Dialer,
    PeerConnector,
    receive_introduction,
)
from ravnest.transport.p2p.hole_punching import listen_reusable, negotiate_as_listener
from ravnest.transport.p2p.relay_client import Observation, RelayInfo
from ravnest.transport.socket import run_async
from ravnest.transport.tls import Allowed, TlsChannel, mutual_handshake, tune

__all__ = ["PeerEndpoint", "AcceptorConfig"]

_PAUSE_S = 0.1  # before accepting again when the system has no descriptors left


def _ignore(address: str, reason: str) -> None:
    """Do not report rejections."""


@config
class AcceptorConfig:
    """Timeouts and limits; `on_rejected(address, reason)` is called for each rejected connection."""

    handshake_timeout_s: float = 10.0
    max_handshakes: int = 64
    hold_timeout_s: float = 30.0
    max_held_per_peer: int = 8
    on_rejected: Callable[[str, str], None] = _ignore

    def __post_init__(self) -> None:
        for name in ("handshake_timeout_s", "hold_timeout_s", "max_handshakes", "max_held_per_peer"):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")


class PeerAcceptor:
    """Authenticates connections of a listening socket and passes them to connectors; used in one asyncio loop."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext, allowed: Allowed, config: AcceptorConfig) -> None:
        self._sock, self._tls, self._allowed, self._config = sock, tls, allowed, config
        self._handshakes: dict[asyncio.Task[None], str] = {}  # with the remote address, in order of arrival
        self._connectors: dict[tuple[str, bytes], PeerConnector] = {}
        self._held: dict[str, deque[Connection]] = {}

    def open(self) -> None:
        """Start to accept, in the running loop."""
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def register(self, connector: PeerConnector) -> None:
        """Assign held and future connections of the peer to `connector`."""
        key = connector.peer.name, connector.mine.purpose
        if (older := self._connectors.get(key)) is not None:
            older.give_up(f"replaced by a newer connection attempt to {connector.peer.name}")
        self._connectors[key] = connector
        for connection in self._held.pop(connector.peer.name, ()):
            self._assign(connection)

    def unregister(self, connector: PeerConnector) -> None:
        key = connector.peer.name, connector.mine.purpose
        if self._connectors.get(key) is connector:
            del self._connectors[key]

    def close(self) -> None:
        """Close held connections and the listening socket, after the loop and all its tasks have ended."""
        for connections in self._held.values():
            for connection in connections:
                connection.close()
        self._held.clear()
        self._sock.close()

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionError):  # closed by the peer already
            return
        except OSError as error:
            self._config.on_rejected("unknown address", f"cannot accept connections: {error}")
            loop.remove_reader(self._sock)
            loop.call_later(_PAUSE_S, self.open)
            return
        if len(self._handshakes) >= self._config.max_handshakes:
            self._reject_slowest()
        self._start(sock, show((plain_host(address[0]), address[1])))

    def _start(self, sock: socket.socket, address: str) -> None:
        def on_done(task: asyncio.Task[None]) -> None:
            self._handshakes.pop(task, None)
            if task.cancelled():  # perhaps before it started, so it could not close the socket itself
                sock.close()

        task = asyncio.get_running_loop().create_task(self._handshake(sock, address))
        self._handshakes[task] = address
        task.add_done_callback(on_done)

    def _reject_slowest(self) -> None:
        task = next(iter(self._handshakes))
        task.cancel()
        reason = f"slowest of more than {self._config.max_handshakes} unfinished handshakes"
        self._config.on_rejected(self._handshakes.pop(task), reason)

    async def _handshake(self, sock: socket.socket, address: str) -> None:
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                self._assign(await self._authenticate(sock, address))
        except TimeoutError:
            sock.close()
            self._config.on_rejected(address, f"no introduction within {self._config.handshake_timeout_s:g} s")
        except (LinkError, OSError) as error:
            sock.close()
            self._config.on_rejected(address, str(error))

    async def _authenticate(self, sock: socket.socket, address: str) -> Connection:
        tune(sock)
        sock.setblocking(False)
        is_punched = await run_async(negotiate_as_listener(sock), sock)
        channel = TlsChannel(sock, self._tls, server_side=True)
        peer = await run_async(mutual_handshake(channel, self._allowed), sock)
        introduction = await run_async(receive_introduction(channel), sock)
        description = f"{peer} dialed this node from {address}"
        return Connection(channel, sock, peer, "punched" if is_punched else "direct", description, True, introduction)

    def _assign(self, connection: Connection) -> None:
        """Pass the connection to its connector; hold it if there is none yet."""
        theirs = connection.introduction
        assert theirs is not None, "an accepted connection has an introduction"
        connector = self._connectors.get((connection.peer, theirs.purpose))
        if connector is None:
            self._hold(connection)
            return
        expected = connector.mine.generation
        if theirs.generation != expected:
            reason = f"peer is of generation {theirs.generation}, this node of generation {expected}"
            self._config.on_rejected(connection.peer, reason)
        connector.add_incoming(connection)  # it sends this node's generation before it rejects another

    def _hold(self, connection: Connection) -> None:
        held = self._held.setdefault(connection.peer, deque())
        held.append(connection)
        timeout_s = self._config.hold_timeout_s
        reason = f"this node did not connect to the peer within {timeout_s:g} s"
        asyncio.get_running_loop().call_later(timeout_s, self._release, connection, reason)
        if len(held) > self._config.max_held_per_peer:
            self._release(held[0], f"oldest of more than {self._config.max_held_per_peer} held connections of one peer")

    def _release(self, connection: Connection, reason: str) -> None:
        held = self._held.get(connection.peer)
        if held is not None and connection in held:
            held.remove(connection)
            connection.close()
            self._config.on_rejected(connection.peer, reason)
            if not held:
                del self._held[connection.peer]


T = TypeVar("T")

_GRACE_S = 5.0  # normally the loop ends a call at its deadline


class PeerEndpoint:
    """Listens at `address` ("::" for IPv6 and IPv4) for the nodes of the roster, for which `allowed` is true."""

    def __init__(
        self,
        address: Address,
        identity: Identity,
        *,
        allowed: Allowed,
        acceptor: AcceptorConfig | None = None,
        connector: ConnectorConfig | None = None,
    ) -> None:
        contexts, self._config = Contexts(identity), connector or ConnectorConfig()
        sock = listen_reusable(address)
        sock.setblocking(False)
        host, port = sock.getsockname()[:2]
        self.address: Address = (host, port)
        self._dialer = Dialer(identity.name, port, contexts, self._config)
        self._acceptor = PeerAcceptor(sock, contexts.server, allowed, acceptor or AcceptorConfig())
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._closing = asyncio.Event()
        self._lock = threading.Lock()  # guards `_is_open`, so that no call starts on a loop that ends
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=f"endpoint {port}", daemon=True)
        self._thread.start()

    def connect(
        self, peer: PeerCandidates, link: LinkConfig, *, local: LocalCandidates | None = None, deadline_s: float
    ) -> ConnectedPeer:
        """Open a link to `peer`, which must connect to this node too; a newer call for the same peer ends this one."""
        return self._wait_for(
            self._connect(peer, link, local or LocalCandidates(), Deadline(deadline_s).seconds), deadline_s
        )

    def observe(self, relay: RelayInfo, *, deadline_s: float) -> Observation:
        """Request the public address of this endpoint; keep the result open while peers connect through a NAT."""
        return self._wait_for(self._observe(relay, Deadline(deadline_s).seconds), deadline_s)

    def close(self) -> None:
        """Stop listening and end all calls with `LinkClosed`; existing links stay open."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def __enter__(self) -> PeerEndpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            with self._runner:  # cancels all remaining tasks
                self._runner.run(self._serve())
        finally:
            self._acceptor.close()

    async def _serve(self) -> None:
        self._acceptor.open()
        await self._closing.wait()

    async def _connect(
        self, peer: PeerCandidates, link: LinkConfig, local: LocalCandidates, deadline_s: float
    ) -> ConnectedPeer:
        connector = PeerConnector(peer, link, self._dialer, self._config)
        self._acceptor.register(connector)
        try:
            return await connector.run(local, deadline_s)
        finally:
            self._acceptor.unregister(connector)

    async def _observe(self, relay: RelayInfo, deadline_s: float) -> Observation:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._dialer.observe(relay)
        except TimeoutError:
            raise LinkTimeout(f"no answer from relay {relay.name} within {deadline_s:g} s") from None

    def _wait_for(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        with self._lock:
            if not self._is_open:
                work.close()
                raise LinkClosed("endpoint closed locally")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline_s + _GRACE_S)
        except CancelledError:
            raise LinkClosed("endpoint closed locally") from None
        except BaseException:  # the caller was interrupted
            future.cancel()
            raise
