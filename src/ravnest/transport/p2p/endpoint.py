"""A node's endpoint: the one port on which it accepts peers and from which it dials them.

Incoming and outgoing connections use the same port, so that NATs let the replies in. One thread runs an asyncio loop
with all connections that are not links yet; a link belongs to the caller of `connect`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from ravnest.core.clock import Deadline
from ravnest.errors import LinkClosed, LinkTimeout
from ravnest.transport.address import Address
from ravnest.transport.identity import Identity
from ravnest.transport.link import LinkConfig
from ravnest.transport.p2p.acceptor import AcceptorConfig, PeerAcceptor
from ravnest.transport.p2p.candidates import ConnectorConfig, LocalCandidates, PeerCandidates
from ravnest.transport.p2p.connector import ConnectedPeer, PeerConnector
from ravnest.transport.p2p.dialer import Contexts, Dialer
from ravnest.transport.p2p.hole_punching import listen_reusable
from ravnest.transport.p2p.relay_client import Observation, RelayInfo
from ravnest.transport.tls import Allowed

__all__ = ["PeerEndpoint"]

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
        """Ask the relay for this endpoint's public address; keep the result open while peers connect through a NAT."""
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
