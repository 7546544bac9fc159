"""Connections of a worker to the members of a fleet, anywhere: one port, mutual TLS, NAT traversal, relay."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ravnest.errors import LinkError
from ravnest.protocol.peer import Peer, PeerAddresses
from ravnest.protocol.worker import StartWorker
from ravnest.transport.feed import dial_feed
from ravnest.transport.identity import Identity
from ravnest.transport.link import LinkConfig
from ravnest.transport.p2p.acceptor import AcceptorConfig
from ravnest.transport.p2p.candidates import LocalCandidates, PeerCandidates
from ravnest.transport.p2p.endpoint import PeerEndpoint
from ravnest.transport.p2p.relay_client import RelayInfo
from ravnest.transport.stream import StreamLink
from ravnest.worker.local_peers import PeerConnection
from ravnest.worker.reachability import ReachabilityMonitor

__all__ = ["RemotePeers"]

_REJECTIONS_S = 1.0
_log = logging.getLogger("ravnest.worker")


class RemotePeers:
    """Listens for the members that `allowed` admits, and connects to them; `on_change` gets new addresses."""

    def __init__(
        self, start: StartWorker, allowed: Callable[[str], bool], on_change: Callable[[PeerAddresses], None]
    ) -> None:
        self._coordinator = start.coordinator
        self._identity = Identity.load(Path(start.identity))
        self._endpoint = _open_endpoint(start, self._identity, allowed)
        self._monitor = ReachabilityMonitor(self._endpoint, start.coordinator, on_change, host=start.host)

    @property
    def port(self) -> int:
        return self._endpoint.address[1]

    @property
    def addresses(self) -> PeerAddresses:
        return self._monitor.addresses

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Stay reachable meanwhile."""
        with self._endpoint:
            yield
            self._monitor.close()

    def watch(self) -> None:
        """Keep the address under which the coordinator sees this node."""
        self._monitor.start()

    def connect(self, peer: Peer, purpose: str, config: LinkConfig, *, deadline_s: float) -> PeerConnection:
        """Return a link to a member, which must call this node too."""
        candidates = PeerCandidates(
            name=peer.name,
            addresses=peer.where.addresses,
            observed=peer.where.observed,
            relay=RelayInfo(address=self._coordinator, token=peer.relay_token),
            purpose=purpose,
        )
        own = self.addresses
        local = LocalCandidates(addresses=own.addresses, observed=own.observed)
        found = self._endpoint.connect(candidates, config, local=local, deadline_s=deadline_s)
        return PeerConnection(found.link, found.how, found.reason, found.hint)

    def connect_feed(self, purpose: str, config: LinkConfig, *, deadline_s: float) -> StreamLink:
        """Return the link to the coordinator that feeds the first stage."""
        return dial_feed(self._coordinator, self._identity, config, purpose=purpose, deadline_s=deadline_s)


class _RejectionLog:
    """Logs rejected connections, at most one a second."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def __call__(self, address: str, reason: str) -> None:
        if (now_s := time.monotonic()) - self._last_s >= _REJECTIONS_S:
            self._last_s = now_s
            _log.info("rejected %s: %s", address, reason)


def _open_endpoint(start: StartWorker, identity: Identity, allowed: Callable[[str], bool]) -> PeerEndpoint:
    """Listen at the port that this node had before, if it is free; on IPv6 and IPv4, where there are both."""
    error = LinkError("there is no port to listen on")
    for port in (start.port,) if start.is_port_fixed else (start.port, 0):
        for host in ("::", "0.0.0.0"):
            try:
                acceptor = AcceptorConfig(on_rejected=_RejectionLog())
                return PeerEndpoint((host, port), identity, allowed=allowed, acceptor=acceptor)
            except LinkError as refused:
                error = refused
    raise error
